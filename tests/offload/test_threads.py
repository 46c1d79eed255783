"""What goes wrong in one of the threads reaches the training loop, as itself and at once."""

from __future__ import annotations

import copy
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megazero
from megazero.models.config import ModelConfig
from megazero.optim import host_adamw
from megazero.zero.offload.link import Link
from tests.distributed.runs import TokenSource, make_engine, random_weights, settings
from tests.distributed.test_cases import GPT2
from tests.foreign import models
from tests.offload.choices import CPU, nvme


def _fails_from(call: int, function: Callable) -> Callable:
    calls = iter(range(1, 1 << 30))

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) >= call:
            raise ValueError("planted")
        return function(*args, **kwargs)

    return failing


@pytest.mark.parametrize("state", ["host", "files"])
@pytest.mark.parametrize("place", ["update", "values"])
def test_an_error_ends_the_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: str, place: str) -> None:
    if place == "update":
        monkeypatch.setattr(host_adamw, "_kernel", _fails_from(3, host_adamw._kernel))
    else:
        way = "bring_masters" if state == "host" else "bring"
        monkeypatch.setattr(Link, way, _fails_from(3, getattr(Link, way)))
    offload = {"offload_optimizer": CPU} if state == "host" else nvme(tmp_path)
    tree = settings(GPT2, zero={"stage": 1, **offload})
    tree["train"] |= {"precision": "bf16", "steps": 4}
    source = TokenSource(37, 12, samples=16)
    with (
        pytest.raises(ValueError, match="planted"),
        make_engine(tree, random_weights(ModelConfig(**GPT2))) as engine,
    ):
        for _ in range(4):
            engine.train_batch(source)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_interrupted_wait_leaves_whole_updates(monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    """Control-C while a forward waits for an update: who then saves, or goes on, has the state after it."""
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    config = models.config(stage, 1, 0.0, zero_optimization=zero, optimizer=models.ADAMW)
    kernel, weights = host_adamw._kernel, []
    for interrupted in (False, True):
        engine, *_ = megazero.initialize(model=models.build(models.Odd), config=copy.deepcopy(config))
        waiting, go = threading.Event(), threading.Event()

        def held(*args: Any, go: threading.Event = go) -> None:
            assert go.wait(60)
            kernel(*args)

        def interrupt(waiting: threading.Event = waiting) -> None:
            assert waiting.wait(60)
            time.sleep(0.1)  # by then the main thread waits
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        for step in range(2):
            if step == 1 and interrupted:
                threading.Thread(target=interrupt).start()
                with pytest.raises(KeyboardInterrupt):
                    waiting.set()
                    models.loss_of(engine, models.batch(step, 0, 0))
            go.set()
            engine.backward(models.loss_of(engine, models.batch(step, 0, 0)))
            go.clear()
            monkeypatch.setattr(host_adamw, "_kernel", held if step == 0 and interrupted else kernel)
            engine.step()
        weights.append(models.whole_weights(engine))
        engine.destroy()
    assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items())
