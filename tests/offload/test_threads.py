"""What goes wrong in one of the threads reaches the training loop, as itself and at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megazero.models.config import ModelConfig
from megazero.optim import host_adamw
from megazero.zero.offload.link import Link
from tests.distributed.runs import TokenSource, make_engine, random_weights, settings
from tests.distributed.test_cases import GPT2
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
