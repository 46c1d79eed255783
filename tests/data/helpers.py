"""What the tests of this room share."""

from __future__ import annotations

import gzip
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from data.indexed import token_dtype
from data.indexed_writer import DatasetWriter

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = Path(__file__).resolve().parent / "fixtures"
AUSTEN = ROOT / "data/austen"


def write_dataset(
    prefix: Path,
    documents: Sequence[Sequence[int]],
    *,
    vocab_size: int = 1000,
    masks: Sequence[Sequence[int]] | None = None,
    metadata: dict[str, Any] | None = None,
) -> str:
    """A dataset of these documents; returns its prefix."""
    with DatasetWriter(prefix, token_dtype(vocab_size), vocab_size=vocab_size, masked=masks is not None) as writer:
        for row, document in enumerate(documents):
            writer.add_document(document, None if masks is None else np.array(masks[row], np.uint8))
        writer.commit(metadata)
    return str(prefix)


def settings(train: Any, **changes: Any) -> SimpleNamespace:
    """A data section with its defaults, in order and without shuffling unless said otherwise."""
    values = {
        "train": train,
        "valid": None,
        "split": None,
        "seq_length": 4,
        "shuffle": False,
        "seed": 1234,
        "reset_at_document": False,
        "mask_eod": False,
        "eod_id": None,
        "tokenizer": None,
    }
    assert changes.keys() <= values.keys()
    return SimpleNamespace(**(values | changes))


def run_script(script: str, *arguments: Any, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script of the checkout in a process of its own."""
    command = [sys.executable, str(ROOT / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def gpt2_folder(folder: Path) -> Path:
    """The GPT-2 vocabulary, unpacked into ``folder``."""
    for name in ("encoder.json", "vocab.bpe"):
        (folder / name).write_bytes(gzip.decompress((FIXTURES / f"gpt2/{name}.gz").read_bytes()))
    return folder


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file under ``folder`` and what it holds."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
