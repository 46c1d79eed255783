"""Which samples every step reads: a pure function of where it begins, and of what is left out."""

from __future__ import annotations

from collections.abc import Iterable

from megazero.config_tree import RampUp, TrainSection


class Course:
    """``left_out``: positions in the sample order that no step reads, a range for each roll-back (see
    megazero.divergence)."""

    def __init__(self, train: TrainSection) -> None:
        self._full, self._ramp_up = train.global_batch_size, train.rampup_batch_size
        self.left_out: list[range] = []

    def leave_out(self, ranges: Iterable[range]) -> None:
        """Those of them that are not known yet."""
        self.left_out = list(dict.fromkeys((*self.left_out, *ranges)))

    def begin(self, position: int) -> int:
        """The first position from this one on from which a step reads nothing that is left out."""
        while True:
            end = position + self.size(position)
            over = [samples.stop for samples in self.left_out if samples.start < end and position < samples.stop]
            if not over:
                return position
            position = max(over)

    def size(self, position: int) -> int:
        """Samples of the step that begins there."""
        return self._full if self._ramp_up is None else ramped(self._ramp_up, self._full, self._taken(position))[0]

    def _taken(self, position: int) -> int:
        """How many of the samples before it are not left out: sizes grow by what was trained on."""
        taken, end = position, 0
        for out in sorted(self.left_out, key=lambda samples: samples.start):
            taken -= max(0, min(out.stop, position) - max(out.start, end))
            end = max(end, out.stop)
        return taken

    def after(self, position: int) -> int:
        """Where the step begins that follows the one that begins there."""
        return self.begin(position + self.size(position))

    def samples(self, position: int, steps: int) -> range:
        """What the step reads that comes ``steps`` steps after the one that begins at ``position``."""
        for _ in range(steps):
            position = self.after(position)
        return range(position, position + self.size(position))

    def total(self, position: int, steps: int) -> int:
        """Samples of so many steps from there on, as long as nothing further is left out."""
        first = position = self._taken(position)
        left = steps
        while left and self._ramp_up is not None:
            size, until = ramped(self._ramp_up, self._full, position)
            if until is None:
                break
            taken = min(left, -(-(until - position) // size))
            position, left = position + taken * size, left - taken
        return position - first + left * self._full


def ramped(ramp_up: RampUp, full: int, position: int) -> tuple[int, int | None]:
    """(samples of a step that comes after ``position`` of them, after how many they are more: None for never).

    As Megatron-LM's --rampup-batch-size: the way from the first size to the full one is divided into steps of the
    increment, each for an equal share of the samples.
    """
    start, increment, samples = ramp_up
    count = (full - start) // increment
    index = position * count // samples
    if index >= count:
        return full, None
    return start + index * increment, -(-(index + 1) * samples // count)
