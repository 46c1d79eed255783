"""Dynamic loss scaling for float16 (Micikevicius et al. 2018, arXiv 1710.03740, section 3.2), by DeepSpeed's rules."""

from __future__ import annotations

from typing import Any

import torch

from megazero.ds_config.tree import Precision


class LossScale:
    """``value``: what losses are multiplied by. Fixed at 1 outside float16."""

    def __init__(self, precision: Precision) -> None:
        self.half = precision.dtype == torch.float16
        self.dynamic = self.half and precision.loss_scale is None
        self.value = (precision.loss_scale or precision.initial_loss_scale) if self.half else 1.0
        self.precision = precision
        self.good_steps = 0
        self.patience = precision.hysteresis

    def update(self, overflow: bool) -> bool:
        """After a step: halve after ``hysteresis`` overflows, double after a window without. False where an overflow
        came at the smallest scale, which no smaller one can mend."""
        if not self.dynamic:
            return not overflow
        if overflow:
            at_least = self.value <= self.precision.min_loss_scale
            if self.patience > 1:
                self.patience -= 1
            else:
                self.value = max(self.value / 2, self.precision.min_loss_scale)
            self.good_steps = 0
            return not at_least
        if self.precision.consecutive_hysteresis:
            self.patience = self.precision.hysteresis
        self.good_steps += 1
        if self.good_steps % self.precision.loss_scale_window == 0:
            self.value *= 2
            self.patience = self.precision.hysteresis
        return True

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "good_steps": self.good_steps, "patience": self.patience}

    def load(self, state: dict[str, Any]) -> None:
        self.value, self.good_steps, self.patience = state["value"], state["good_steps"], state["patience"]
