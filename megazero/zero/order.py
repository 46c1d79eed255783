"""The order in which units are used, recorded so that the next pass can fetch ahead of it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from megazero.errors import LaunchError


class UseOrder:
    """The units that one kind of pass (forward, evaluation, backward) used last time, and how far this one has come.

    A pass that leaves the recorded order is recorded anew and fetches nothing ahead.
    """

    def __init__(self) -> None:
        self._known: list[int] = []
        self._seen: list[int] = []
        self._following = False

    def begin(self) -> None:
        """A pass starts; one that was never ended (an error in the user's code) is forgotten."""
        self._seen = []
        self._following = bool(self._known)

    def use(self, unit: int) -> bool:
        """Note a use; whether it is the recorded one."""
        position = len(self._seen)
        self._seen.append(unit)
        self._following &= position < len(self._known) and self._known[position] == unit
        return self._following

    def ahead(self) -> Iterator[int]:
        """The units whose uses should follow, in order."""
        if self._following:
            yield from self._known[len(self._seen) :]

    def end(self) -> None:
        if not self._following or len(self._seen) < len(self._known):
            self._known = self._seen
        self._seen = []


class Agreement:
    """Makes sure that all ranks of a group are about to gather the same unit, where no recorded order says so.

    Through the default process group's store: no collective, which would pair with another rank's all-gather. A rank
    that waits for one that goes another way gets an error, not a hang.
    """

    def __init__(self, ranks: list[int], rank: int, timeout: timedelta) -> None:
        self._ranks, self._rank, self._timeout = ranks, rank, timeout
        self._count = 0
        group = f"megazero/order/{min(ranks)}-{max(ranks)}-{len(ranks)}"
        # Each rank's n-th agreement of the group is one: a model after another, or beside it, has keys of its own.
        number = dist.distributed_c10d._get_default_store().add(f"{group}/made/{rank}", 1)
        self._prefix = f"{group}/{number}"

    def on(self, name: str) -> None:
        """Raises LaunchError where another rank uses another unit, or none, in ``timeout``."""
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{self._prefix}/{self._count}/{self._rank}", name)
        for other in self._ranks:
            key = f"{self._prefix}/{self._count}/{other}"
            try:
                store.wait([key], self._timeout)
                theirs = store.get(key).decode()
            except RuntimeError:  # torch.distributed.DistStoreError among them
                theirs = None
            if theirs != name:
                does = f"uses {theirs}" if theirs else "does not"
                raise LaunchError(
                    f"rank {self._rank} uses the parameters of {name}, rank {other} {does}. Where parameters are cut "
                    "into slices (stage 3) every rank must use the same modules in the same order: let every rank call "
                    "the module, or keep its parameters whole with stage3_param_persistence_threshold, or use stage 2"
                )
        if self._count:
            store.delete_key(f"{self._prefix}/{self._count - 1}/{self._rank}")
        self._count += 1
