"""What to do about a step whose gradient is not finite, or whose loss is far above those before it.

[Note: the rule of a spike]
The loss of the good steps has an exponential mean and variance over about the last 50. A step is a spike where its loss
is above the mean by more than ``watch.loss_spike`` standard deviations, once 50 steps have been good. All of it is
numbers on the device that every rank computes from the same sums, so that ranks agree and the host is not asked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_SPAN = 50
IN_A_ROW = 10
"""Skipped steps after which skipping has not helped: the run stops."""


NOTHING_SEEN: Sequence[float | None] = (0, 0, 0, 0, 0, 0, None)
"""Mean and variance of the loss, good steps, bad steps in a row, all that were skipped, the last of them, and the loss
of the spike that stopped the run."""


class BadSteps:
    """Judges every step. ``skips``: a bad step is not applied, and the run goes on; else it stops the run.

    ``spike``: standard deviations, 0 where the loss is not judged.
    """

    def __init__(self, skips: bool, spike: float, device: torch.device) -> None:
        self._skips, self._spike = skips, spike
        self._device = device
        self.load(NOTHING_SEEN)

    def judge(
        self, step: int, loss: torch.Tensor, bad: torch.Tensor, fatal: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(whether the update is left out, whether the run stops).

        ``bad``, ``fatal``: the same as a step without this would have it; an overflow that a lower loss scale may mend
        is bad, and not fatal.
        """
        mean, variance, seen, in_a_row, skipped, last, stopped = self._numbers.unbind()
        above = loss - mean
        spike = (seen >= _SPAN) & (above > self._spike * variance.sqrt()) if self._spike else torch.zeros_like(bad)
        trouble = fatal | spike
        good = ~(bad | trouble)
        # At first a plain mean, so that the first steps do not count for more than others.
        weight = 1 / (seen + 1).clamp(max=_SPAN)
        step_above = torch.where(good, above, 0.0)
        in_a_row = torch.where(trouble, in_a_row + 1, torch.where(good, 0.0, in_a_row))
        stops = in_a_row >= IN_A_ROW if self._skips else trouble
        self._numbers = torch.stack(
            (
                mean + weight * step_above,
                torch.where(good, (1 - weight) * (variance + weight * step_above**2), variance),
                seen + good,
                in_a_row,
                skipped + trouble,
                torch.where(trouble, float(step), last),
                torch.where(stops & spike & stopped.isnan(), loss, stopped),
            )
        )
        return bad | trouble, stops

    def skipped(self) -> tuple[int, int]:
        """(updates left out since the last call, the step of the last one). Waits for the device."""
        total, last = int(self._numbers[4]), int(self._numbers[5])
        new, self._reported = total - self._reported, total
        return new, last

    def spike(self) -> str | None:
        """What is to be said of the spike that stopped the run, None where none did. Waits for the device."""
        mean, variance, *_, loss = self._numbers.tolist()
        if loss != loss:
            return None
        return f"the loss is {loss:.4g}, where {mean:.4g} is the mean and {variance**0.5:.2g} the deviation of late"

    def state(self) -> list[float | None]:
        """For a checkpoint, as JSON has it."""
        return [None if number != number else number for number in self._numbers.tolist()]

    def load(self, state: Sequence[float | None]) -> None:
        values = [torch.nan if number is None else number for number in state]
        self._numbers = torch.tensor(values, dtype=torch.float64, device=self._device)
        self._reported = int(self._numbers[4])
