"""A process's number on its machine, which is also where its tensors go."""

from __future__ import annotations

import torch


class LocalRank(str):
    """``tensor.to(engine.local_rank)`` works on a GPU, where a number would do, and on the CPU, where it would not.

    It is the name of the device to torch, and the number to everything else: it compares, counts and prints as one.
    """

    number: int

    def __new__(cls, number: int, device: torch.device | str) -> LocalRank:
        made = super().__new__(cls, str(device))
        made.number = number
        return made

    def __getnewargs__(self) -> tuple[int, str]:
        return self.number, str.__str__(self)

    def __index__(self) -> int:
        return self.number

    __int__ = __index__

    def __bool__(self) -> bool:
        return self.number != 0

    def __add__(self, other: int) -> int:
        return self.number + other

    __radd__ = __add__

    def __sub__(self, other: int) -> int:
        return self.number - other

    def __mul__(self, other: int) -> int:
        return self.number * other

    __rmul__ = __mul__

    def __mod__(self, other: int) -> int:
        return self.number % other

    def __floordiv__(self, other: int) -> int:
        return self.number // other

    def __eq__(self, other: object) -> bool:
        return self.number == other.number if isinstance(other, LocalRank) else self.number == other

    def __hash__(self) -> int:
        return hash(self.number)

    def __lt__(self, other: int) -> bool:
        return self.number < int(other)

    def __gt__(self, other: int) -> bool:
        return self.number > int(other)

    def __le__(self, other: int) -> bool:
        return self.number <= int(other)

    def __ge__(self, other: int) -> bool:
        return self.number >= int(other)

    def __repr__(self) -> str:
        return str(self.number)

    def __str__(self) -> str:
        return repr(self.number)

    def __format__(self, spec: str) -> str:
        return format(self.number, spec)
