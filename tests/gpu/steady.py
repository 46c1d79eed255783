"""Trains and evaluates on the ranks it is launched on; a wait for the GPU in a steady step raises.

    megazero launch --nproc 2 tests/gpu/steady.py --section.field VALUE ...

Prints on rank 0 a JSON line: peak bytes of training, of the first two evaluation batches and of those that follow.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from data.sources import build_sources
from megazero.config import load_config
from megazero.engine import Engine
from megazero.launch.environment import process_environment

BATCHES = 50


def peak_since(engine: Engine) -> int:
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated(engine.device)
    torch.cuda.reset_peak_memory_stats(engine.device)
    return peak


def main() -> None:
    environment = process_environment()
    config = load_config(sys.argv[1:], world_size=environment.world_size)
    train, _ = build_sources(config.data, vocab_size=config.model.vocab_size)
    with Engine(config, environment) as engine:
        for step in range(7):
            torch.cuda.set_sync_debug_mode("error" if step >= 3 else "default")
            engine.train_batch(train)
        torch.cuda.set_sync_debug_mode("default")
        peaks = [peak_since(engine)]
        for batch in range(BATCHES):
            engine.eval_batch(train, batch)
            with torch.inference_mode():
                engine.eval_batch(train, batch)
            if batch == 1:
                peaks.append(peak_since(engine))
        peaks.append(peak_since(engine))
        if environment.rank == 0:
            print("PEAKS", json.dumps(peaks), flush=True)


if __name__ == "__main__":
    main()
