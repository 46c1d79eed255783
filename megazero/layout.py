"""The rank grid: which coordinates a rank has, and who stands beside it. Pure arithmetic, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Axis = Literal["pp", "dp", "tp"]
AXES: tuple[Axis, ...] = ("pp", "dp", "tp")  # slowest first, so that tp neighbours share a node


@dataclass(frozen=True)
class Layout:
    """Sizes of the three axes; world size is their product."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def size(self, axis: Axis) -> int:
        return {"pp": self.pp, "dp": self.dp, "tp": self.tp}[axis]

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Rank → its coordinate along every axis."""
        tp = rank % self.tp
        dp = rank // self.tp % self.dp
        return {"pp": rank // (self.tp * self.dp), "dp": dp, "tp": tp}

    def rank(self, pp: int, dp: int, tp: int) -> int:
        """Coordinates → rank."""
        return (pp * self.dp + dp) * self.tp + tp

    def along(self, rank: int, axis: Axis, members: tuple[int, ...] | None = None) -> list[int]:
        """Ranks that differ from ``rank`` along ``axis`` only, at the coordinates ``members`` (default: all)."""
        coordinates = self.coordinates(rank)
        return [self.rank(**{**coordinates, axis: c}) for c in members or range(self.size(axis))]
