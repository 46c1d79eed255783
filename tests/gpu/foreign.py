"""Trains the odd model of tests/foreign with megazero.initialize where it is launched, against a plain float64 loop.

megazero launch --nproc 2 tests/gpu/foreign.py STAGE
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from megazero.launch.devices import gpu_of
from tests.foreign.models import Odd, config, plain, trained

ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}}


def adamw(parameters: list) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)


def main() -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(gpu_of(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()))
    dist.init_process_group()
    losses, norms, weights = trained(Odd, config(int(sys.argv[1]), 2, 0.5, optimizer=ADAMW), 3)
    wanted_losses, wanted_norms, wanted = plain(Odd, adamw, 3, 2, dist.get_world_size(), clip=0.5)
    worst = max(abs(a - b) / b for a, b in zip(losses, wanted_losses, strict=True))
    assert worst < 2e-6, (losses, wanted_losses)
    worst_norm = max(abs(a - b) / b for a, b in zip(norms, wanted_norms, strict=True))
    assert worst_norm < 5e-5, (norms, wanted_norms)
    for name, value in weights.items():
        error = (value.cpu().double() - wanted[name]).norm()
        assert error <= 1e-4 * wanted[name].norm(), (name, float(error))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
