"""DeepSpeed's five learning rate schedules: values per step as DeepSpeed gives them, save where docs say otherwise.

Iteration i, counted from 0, is what the i-th call of ``step`` sets; before the first, which is what the first
optimizer step uses, the schedule stands at iteration -1.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from megazero.errors import ConfigError

Rates = float | tuple[float, ...] | None


class HasGroups(Protocol):
    """All that a schedule needs of an optimizer."""

    param_groups: list[dict[str, Any]]


class Schedule:
    """What torch's schedulers offer: ``step`` after each optimizer step, ``get_last_lr``, state in and out."""

    def __init__(self, optimizer: HasGroups) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = -1
        self._last_lr: list[float] = []

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Sets the next iteration's rates, or a given one's."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._apply()

    def get_last_lr(self) -> list[float]:
        """The rate of each parameter group, as it stands."""
        return self._last_lr

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the iteration saved, and sets its rates."""
        self.last_batch_iteration = state["last_batch_iteration"]
        self._apply()

    def _rates(self, iteration: int) -> list[float]:
        raise NotImplementedError

    def _apply(self) -> None:
        self._last_lr = self._rates(self.last_batch_iteration)
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _per_group(self, rates: Rates, name: str) -> list[float]:
        """One rate per parameter group; the optimizer's own where none is given."""
        groups = self.optimizer.param_groups
        if rates is None:
            return [float(group["lr"]) for group in groups]
        if isinstance(rates, Sequence):
            if len(rates) != len(groups):
                told = f"{len(rates)} values for {len(groups)} parameter groups; give one, or one for each"
                raise ConfigError.single(f"scheduler.params.{name}", told)
            return list(rates)
        return [rates] * len(groups)


class _Warmup(Schedule):
    """A climb from 0 to 1 over ``warmup_num_steps``, at least 2 as in DeepSpeed, or none at all for 0."""

    def __init__(self, optimizer: HasGroups, warmup_num_steps: int, warmup_type: str) -> None:
        super().__init__(optimizer)
        self.warmup_num_steps = max(2, warmup_num_steps) if warmup_num_steps else 0
        self.warmup_type = warmup_type

    def _climb(self, iteration: int) -> float | None:
        """None once it is over."""
        iteration = max(iteration, 0)
        if iteration >= self.warmup_num_steps:
            return None
        if self.warmup_type == "log":
            return 1.0 / math.log(self.warmup_num_steps) * math.log(iteration + 1)
        return iteration / self.warmup_num_steps


class WarmupLR(_Warmup):
    """From ``warmup_min_lr`` to ``warmup_max_lr``, the optimizer's own rate unless given; then constant."""

    def __init__(
        self,
        optimizer: HasGroups,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type)
        self.min_lrs = self._per_group(warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self._per_group(warmup_max_lr, "warmup_max_lr")
        self._apply()

    def _rates(self, iteration: int) -> list[float]:
        climb = self._climb(iteration)
        height = self._after(max(iteration, 0)) if climb is None else climb
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs)]

    def _after(self, iteration: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """As WarmupLR, then linearly back to ``warmup_min_lr`` at iteration ``total_num_steps``."""

    def __init__(
        self,
        optimizer: HasGroups,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)

    def _after(self, iteration: int) -> float:
        left = self.total_num_steps - iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Warmup):
    """Multiples of the optimizer's own rate: from ``warmup_min_ratio`` to 1, then by a cosine to ``cos_min_ratio``."""

    def __init__(
        self,
        optimizer: HasGroups,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type)
        self.total_num_steps, self.warmup_min_ratio, self.cos_min_ratio = (
            total_num_steps,
            warmup_min_ratio,
            cos_min_ratio,
        )
        self.org_lrs = self._per_group(None, "")
        self._apply()

    def _rates(self, iteration: int) -> list[float]:
        ratio = self._ratio(max(iteration, 0))
        return [rate * ratio for rate in self.org_lrs]

    def _ratio(self, iteration: int) -> float:
        climb = self._climb(iteration)
        if climb is not None:
            return self.warmup_min_ratio + climb * (1.0 - self.warmup_min_ratio)
        done = (iteration - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps)
        height = (1 + math.cos(math.pi * min(1.0, done))) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * height)


class LRRangeTest(Schedule):
    """Grows by ``lr_range_test_step_rate`` times the first rate every ``lr_range_test_step_size`` steps (Smith 2018,
    arXiv 1803.09820), in stairs or evenly; the first rate is the optimizer's own unless given.
    """

    def __init__(
        self,
        optimizer: HasGroups,
        lr_range_test_min_lr: Rates = None,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
    ) -> None:
        super().__init__(optimizer)
        self.min_lrs = self._per_group(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        self._apply()

    def _rates(self, iteration: int) -> list[float]:
        interval = (iteration + 1) / self.step_size
        growth = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [rate * growth for rate in self.min_lrs]


class OneCycle(Schedule):
    """One rise and fall of the rate, against the momentum (the first of ``betas``), then decay (Smith 2018).

    ``cycle_momentum``: None cycles it where every group has betas. The second beta becomes 0.99, as in DeepSpeed.
    """

    def __init__(
        self,
        optimizer: HasGroups,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: float = 2000,
        cycle_second_step_size: float | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: float = 0,
        cycle_momentum: bool | None = None,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
    ) -> None:
        super().__init__(optimizer)
        first, second = cycle_first_step_size, cycle_second_step_size
        self.first, self.second = float(first), float(first if second is None else second)
        stairs = cycle_first_stair_count
        self.stairs = stairs, stairs if cycle_second_stair_count is None else cycle_second_stair_count
        self.decay_step_size, self.decay_lr_rate, self.decay_mom_rate = decay_step_size, decay_lr_rate, decay_mom_rate
        self.min_lrs = self._per_group(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._per_group(cycle_max_lr, "cycle_max_lr")
        self.min_moms = self._per_group(cycle_min_mom, "cycle_min_mom")
        self.max_moms = self._per_group(cycle_max_mom, "cycle_max_mom")
        self.cycle_momentum = self._has_betas(cycle_momentum)
        self._apply()

    def _has_betas(self, asked: bool | None) -> bool:
        has = all("betas" in group for group in self.optimizer.param_groups)
        if has or asked is False:
            return has and asked is not False
        if asked:
            told = "true needs an optimizer with betas; use Adam, AdamW or Lion, or set it to false"
            raise ConfigError.single("scheduler.params.cycle_momentum", told)
        warnings.warn("scheduler OneCycle: the optimizer has no betas, so momentum is not cycled", stacklevel=4)
        return False

    def _apply(self) -> None:
        super()._apply()
        if self.cycle_momentum:
            for group, momentum in zip(self.optimizer.param_groups, self._momenta(self.last_batch_iteration)):
                group["betas"] = (momentum, 0.99)

    def _rates(self, iteration: int) -> list[float]:
        total = self.first + self.second
        if iteration < total:
            height = self._height(iteration + 1)
            return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs)]
        return [rate / self._decay(self.decay_lr_rate, iteration - total + 1) for rate in self.min_lrs]

    def _momenta(self, iteration: int) -> list[float]:
        total = self.first + self.second
        if iteration < 0:
            # DeepSpeed starts at the lower bound, and only then cycles down from the upper one.
            return self.min_moms
        if iteration < total:
            height = self._height(iteration + 1)
            return [high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms)]
        return [momentum * self._decay(self.decay_mom_rate, iteration - total + 1) for momentum in self.max_moms]

    def _decay(self, rate: float, iterations: float) -> float:
        return 1 + rate * (iterations / self.decay_step_size) if self.decay_step_size else 1.0

    def _height(self, position: int) -> float:
        """From 0 over 1, at the end of the first half, to 0 again; in stairs where they are asked for."""
        position = position % (self.first + self.second)
        rising = position <= self.first
        left, size = (position, self.first) if rising else (self.first + self.second - position, self.second)
        stairs = self.stairs[0 if rising else 1]
        return math.floor(left * stairs / size) / stairs if stairs > 0 else left / size
