"""Trains the layers of tests/foreign/pipe_models.py as two stages where it is launched, against a plain float64 loop.

megazero launch --nproc 2 tests/gpu/pipe.py ZERO_STAGE
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tests.foreign.models import whole_weights
from tests.foreign.pipe_models import layers, own_batches, plain, settings, start

STEPS = 4


def main() -> None:
    engine = start(layers, 2, settings(int(sys.argv[1])))
    iterator = own_batches(engine, 3)
    losses, norms = [], []
    for step in range(STEPS):
        # The first step exchanges shapes and connects; from then on nothing waits for the device.
        if engine.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error" if step else "default")
        loss = engine.train_batch(iterator)
        if engine.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        losses.append(float(loss))
        norms.append(engine.get_global_grad_norm())
    evaluated = float(engine.eval_batch(iterator))
    wanted_losses, wanted_norms, wanted, wanted_evaluation = plain(layers, STEPS)
    pairs = zip([*losses, evaluated], [*wanted_losses, wanted_evaluation], strict=True)
    assert max(abs(a - b) / b for a, b in pairs) < 2e-6, (losses, evaluated, wanted_losses, wanted_evaluation)
    assert max(abs(a - b) / b for a, b in zip(norms, wanted_norms, strict=True)) < 5e-5, (norms, wanted_norms)
    for name, value in whole_weights(engine).items():
        error = (value.cpu().double() - wanted[name]).norm()
        assert error <= 1e-4 * wanted[name].norm(), (name, float(error))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
