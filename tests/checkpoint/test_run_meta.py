"""What a run needs to go on from: notes that are not as a run writes them are named before any state is touched."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megazero.checkpoint.rng import check_rng_state
from megazero.checkpoint.run_meta import check_run
from megazero.errors import CheckpointError

GOOD: dict[str, Any] = {
    "step": 3,
    "consumed_samples": 24,
    "optimizer_steps": 3,
    "loss_scale": 65536.0,
    "loss_scale_good_steps": 3,
    "bad_steps": [1.0, 0.5, 3.0, 0.0, 0.0, 0.0, None],
    "run_id": "x",
    "layout": {"tp": 1, "pp": 1, "dp": 1},
    "config": {"data": {}},
}


def of(meta: dict[str, Any], *kinds: str) -> Any:
    return SimpleNamespace(kinds={"weight", *kinds}, meta=meta, path=Path("step_00000003"))


def test_what_a_run_writes_is_taken_and_weights_alone_are_another_matter() -> None:
    check_run(of(GOOD, "exp_avg"))
    check_run(of({**GOOD, "loss_scale": None, "loss_scale_good_steps": None, "bad_steps": None}, "exp_avg"))
    check_run(of({}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", "3"),
        ("step", 2**63),
        ("consumed_samples", -1),
        ("optimizer_steps", 1.5),
        ("loss_scale", float("nan")),
        ("loss_scale", 0),
        ("loss_scale_good_steps", True),
        ("bad_steps", [1.0]),
        ("bad_steps", ["1"] * 7),
        ("run_id", []),
        ("layout", [1]),
        ("layout", None),
    ],
)
def test_what_no_run_writes_is_named(name: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=rf"step_00000003/manifest.json: meta.{name} is not as a run writes it"):
        check_run(of({**GOOD, name: value}, "exp_avg"))


@pytest.mark.parametrize("name", [name for name in GOOD if name != "bad_steps"])
def test_what_a_run_writes_is_all_there(name: str) -> None:
    meta = {key: value for key, value in GOOD.items() if key != name}
    with pytest.raises(CheckpointError, match=rf"meta.{name}.* is not as a run writes it"):
        check_run(of(meta, "exp_avg"))


def test_a_random_state_that_is_none() -> None:
    good = torch.get_rng_state()
    check_rng_state({"rng_cpu": good}, Path("here"))
    for state in ({}, {"rng_cpu": good[:-1]}, {"rng_cpu": good.float()}, {"rng_cpu": torch.full_like(good, 255)}):
        with pytest.raises(CheckpointError, match="here: the state of a rank's random generator"):
            check_rng_state(state, Path("here"))
