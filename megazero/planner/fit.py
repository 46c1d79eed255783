"""A chip's efficiencies fitted to steps that were measured on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megazero.config import Config
from megazero.planner.chips import Chip
from megazero.planner.step_time import step_time

SHARES = ("matmul", "attention", "memory", "link", "network")
DOUBT = 0.1  # a share that is this far off, relatively, weighs as much as a run
ACCURACY = 0.02  # that is this far off
ROUNDS = 8
LEAST = np.log(0.01)


class Measured(NamedTuple):
    """``seconds``: of a step of ``config`` on ``gpus`` GPUs."""

    config: Config
    gpus: int
    seconds: float


def fitted(chip: Chip, runs: Sequence[Measured]) -> Chip:
    """``chip`` with those shares under which the runs are likeliest.

    The least squares of log(predicted / measured), each against ACCURACY, and of log(share / share before), each
    against DOUBT: what no run tells apart stays near where it was. By Gauss and Newton's method.
    """
    start = np.log([getattr(chip.efficiency, name) for name in SHARES])
    measured = np.log([run.seconds for run in runs])
    shares = start.copy()
    for _ in range(ROUNDS):
        predicted = _log_seconds(chip, shares, runs)
        step = 1e-3
        slopes = np.stack(
            [(_log_seconds(chip, shares + step * unit, runs) - predicted) / step for unit in np.eye(len(SHARES))],
            axis=1,
        )
        left = np.concatenate([slopes / ACCURACY, np.eye(len(SHARES)) / DOUBT])
        right = np.concatenate([(measured - predicted) / ACCURACY, (start - shares) / DOUBT])
        shares = np.clip(shares + np.linalg.lstsq(left, right, rcond=None)[0], LEAST, 0.0)
    return _with_shares(chip, shares)


def _log_seconds(chip: Chip, shares: np.ndarray, runs: Sequence[Measured]) -> np.ndarray:
    # A share a little above 1, as a slope at 1 needs it, is only calculated with.
    changed = _with_shares(chip, shares)
    return np.log([step_time(run.config, run.gpus, changed).seconds for run in runs])


def _with_shares(chip: Chip, shares: np.ndarray) -> Chip:
    values = dict(zip(SHARES, np.exp(shares).tolist(), strict=True))
    return chip.model_copy(update={"efficiency": chip.efficiency.model_copy(update=values)})
