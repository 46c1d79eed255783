"""Scripts under the launcher, in processes of their own: libraries must not have looked for deepspeed before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent


def launched(*words: str | Path, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess:
    """`megazero launch WORDS…`, offline, on the CPU unless CUDA_VISIBLE_DEVICES is given."""
    return python("-m", "megazero", "launch", *words, timeout=timeout, **environment)


def python(*words: str | Path, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess:
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "offline", "CUDA_VISIBLE_DEVICES": ""}
    shared = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env=os.environ | offline | shared | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
