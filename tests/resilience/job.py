"""A tiny run of several ranks in which something goes wrong: job.py FAULT RANK STEP --section.field VALUE …

FAULT happens on RANK after step STEP, in the first start only: never (a batch that never comes), stop (SIGSTOP), kill
(SIGKILL), raise, slow (from then on, each read takes a while). With pace every read takes a while, in every start, and
a file plant-RANK beside checkpoint.dir says what else is to happen on that rank: nan (gradients from then on), bit N
(that bit of a weight flips).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

import torch  # noqa: E402

from data.sources import build_sources  # noqa: E402
from megazero.config import load_config  # noqa: E402
from megazero.engine import Engine  # noqa: E402
from megazero.launch.environment import process_environment  # noqa: E402
from megazero.launch.errors import report_errors  # noqa: E402


class FaultySource:
    """Batches of ``source``, and a fault before the one of step ``step``."""

    def __init__(self, source: Any, fault: str, step: int) -> None:
        self.source, self.fault, self.left = source, fault, step

    def read(self, *where: int) -> Any:
        self.left -= 1
        if self.left < 0:
            self.happen()
        return self.source.read(*where)

    def happen(self) -> None:
        if self.fault in ("slow", "pace"):
            time.sleep(0.1)
        elif self.fault == "never":
            time.sleep(1000)
        elif self.fault == "raise":
            raise ValueError("planted")
        else:
            os.kill(os.getpid(), signal.SIGSTOP if self.fault == "stop" else signal.SIGKILL)


def plant(engine: Engine, order: Path) -> None:
    """Do what the file ``order`` says, where it is there; once."""
    if not order.exists():
        return
    what, _, bit = order.read_text().partition(" ")
    order.unlink()
    name, weight = next(iter(engine.stage.sharded.named_parameters()))
    print(f"planted {what} {bit} in {name} after step {engine.step}", file=sys.stderr, flush=True)
    if what == "nan":
        weight.register_hook(lambda grad: grad * torch.nan)
    else:
        weight.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << int(bit))


def main() -> None:
    fault, rank, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    environment = process_environment()
    config = load_config(sys.argv[4:], world_size=environment.world_size)
    source, _ = build_sources(config.data, vocab_size=config.model.vocab_size)
    if fault == "pace" or environment.rank == rank and os.environ.get("MEGAZERO_RESTARTS", "0") == "0":
        source = FaultySource(source, fault, step)
    with Engine(config, environment) as engine:
        while engine.running():
            if fault == "pace":
                plant(engine, Path(config.checkpoint.dir).parent / f"plant-{environment.rank}")
            engine.train_batch(source)
            if engine.due(config.checkpoint.save_interval):
                engine.save(source)


if __name__ == "__main__":
    with report_errors():
        main()
