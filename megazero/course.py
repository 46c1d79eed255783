"""Which samples every step reads: a pure function of where it begins, and of what is left out."""

from __future__ import annotations

from collections.abc import Iterable


class Course:
    """``batch_size``: samples per step. ``left_out``: positions in the sample order that no step reads, a range for
    each roll-back (see megazero.divergence)."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self.left_out: list[range] = []

    def leave_out(self, ranges: Iterable[range]) -> None:
        """Those of them that are not known yet."""
        self.left_out = list(dict.fromkeys((*self.left_out, *ranges)))

    def begin(self, position: int) -> int:
        """The first position from this one on that is not left out."""
        while over := [samples.stop for samples in self.left_out if position in samples]:
            position = max(over)
        return position

    def size(self, position: int) -> int:
        """Samples of the step that begins there: the global batch."""
        return self._batch_size

    def after(self, position: int) -> int:
        """Where the step begins that follows the one that begins there."""
        return self.begin(position + self.size(position))

    def samples(self, position: int, steps: int) -> range:
        """What the step reads that comes ``steps`` steps after the one that begins at ``position``."""
        for _ in range(steps):
            position = self.after(position)
        return range(position, position + self.size(position))
