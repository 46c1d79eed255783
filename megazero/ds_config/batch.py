"""The three batch sizes: any two give the third."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

TOTAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


class Batch(NamedTuple):
    """Samples per step over all processes; samples per forward pass of one; forward passes per step of one."""

    total: int
    micro: int
    steps: int


def settle(values: Mapping[str, int | None], world_size: int) -> tuple[Batch, list[tuple[str, str]]]:
    """The three sizes, of which ``values`` may lack some, and (field, what is wrong and the fix).

    ``world_size``: processes that see different samples. With only the total, or only the micro-batch, there is no
    accumulation; with neither, a micro-batch is one sample.
    """
    total, micro, steps = (values[name] for name in (TOTAL, MICRO, STEPS))
    if total is None:
        micro, steps = micro or 1, steps or 1
        return Batch(micro * steps * world_size, micro, steps), []
    given = " x ".join(
        [*(f"{name} {value}" for name, value in ((MICRO, micro), (STEPS, steps)) if value), f"{world_size} processes"]
    )
    unit = (micro or 1) * (steps or 1) * world_size
    if micro is not None and steps is not None:
        if unit != total:
            fix = f"set it to {unit}, or leave out one of the three"
            return Batch(total, micro, steps), [(TOTAL, f"{total} is not {given} = {unit}; {fix}")]
    elif total % unit:
        below = total // unit * unit
        near = f"{below} or {below + unit}" if below else unit
        return Batch(total, micro or 1, steps or 1), [
            (TOTAL, f"{total} is not a multiple of {given} = {unit}; use {near}")
        ]
    elif micro is not None:
        steps = total // unit
    else:
        micro, steps = total // unit, steps or 1
    return Batch(total, micro, steps), []
