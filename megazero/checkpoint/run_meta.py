"""What a run notes of itself in a checkpoint's manifest: whether what stands there can be such notes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from megazero.checkpoint import manifest
from megazero.checkpoint.reader import Checkpoint
from megazero.errors import CheckpointError


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < math.inf


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 7 and all(each is None or _number(each) for each in value)


def _layout(value: Any) -> bool:
    """Of an import, another program's layout, in its own words."""
    return isinstance(value, dict)


_RIGHT: dict[tuple[str, ...], Callable[[Any], bool]] = {
    ("step",): _count,
    ("consumed_samples",): _count,
    ("optimizer_steps",): _count,
    ("loss_scale",): lambda value: value is None or _number(value) and value > 0,
    ("loss_scale_good_steps",): lambda value: value is None or _count(value),
    ("bad_steps",): lambda value: value is None or _numbers(value),
    ("run_id",): lambda value: value is None or isinstance(value, str),
    ("layout",): _layout,
    ("config", "data"): lambda value: isinstance(value, dict),
}


_YOUNGER = {"bad_steps"}
"""Notes that earlier checkpoints lack."""


def check_run(checkpoint: Checkpoint) -> None:
    """CheckpointError, naming the note, unless a run can go on from what the checkpoint says of the one that saved."""
    if "exp_avg" not in checkpoint.kinds:
        return  # weights alone, which are refused when they are read
    for path, right in _RIGHT.items():
        there = path[0] in checkpoint.meta or path[0] in _YOUNGER
        if not there or not right(manifest.within(checkpoint.meta, *path)):
            where = f"{checkpoint.path / manifest.NAME}: meta.{'.'.join(path)}"
            raise CheckpointError(f"{where} is not as a run writes it; as model.init_from its weights can be taken")
