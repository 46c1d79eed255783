"""The ranks of a save that runs beside training: they talk through the process group's store, not by collectives."""

from __future__ import annotations

import pickle
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megazero.checkpoint.group import Group
from megazero.errors import CheckpointError

_PIECE = 4 * 2**20  # bytes; a TCPStore refuses values above 8 MiB


class StoreGroup:
    """A ``megazero.checkpoint.Group`` for a thread.

    [Note: no collectives beside training]
    A collective issued by a thread could pair with one that training issues meanwhile, on a rank where the two come
    the other way round; and a group of its own would be destroyed under the thread by a script that ends its process
    groups before it exits. The store has neither fault. A clone of it has its own connection, so that a thread that
    waits holds nobody up.

    Args:
        name: the same on all ranks, and of this group alone among those that the store ever sees.
        timeout: seconds to wait for another rank; then CheckpointError.
    """

    def __init__(self, name: str, timeout: float) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        self._whole = store  # where this process serves it, it must not go before the last rank is done
        self._store = dist.PrefixStore(f"megazero/save/{name}", store.clone())
        self._timeout = timedelta(seconds=timeout)
        self._count = 0

    @staticmethod
    def beside(group: Group, timeout: float) -> Group:
        """One of the same ranks, made by all of them together; of one process, ``group`` itself."""
        if group.size == 1:
            return group
        return StoreGroup(group.all_gather(uuid.uuid4().hex)[0], timeout)

    def all_gather(self, value: Any) -> list[Any]:
        values = self.gather(value)
        everyone, read = f"{self._count}/all", f"{self._count}/read"
        if self.rank > 0:
            values = self._receive(everyone, 0)
            self._store.set(f"{read}/{self.rank}", b"")
            return values
        assert values is not None
        self._send(everyone, values)
        # Not before all have read it may this process end, which may be the one that serves the store.
        for rank in range(1, self.size):
            self._wait(f"{read}/{rank}", rank)
            self._store.delete_key(f"{read}/{rank}")
        self._delete(everyone)
        return values

    def gather(self, value: Any) -> list[Any] | None:
        self._count += 1
        if self.rank > 0:
            self._send(f"{self._count}/{self.rank}", value)
            return None
        values = [value]
        for rank in range(1, self.size):
            key = f"{self._count}/{rank}"
            values.append(self._receive(key, rank))
            self._delete(key)
        return values

    def _send(self, key: str, value: Any) -> None:
        data = pickle.dumps(value)
        pieces = [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)]
        for index, piece in enumerate(pieces):
            self._store.set(f"{key}/{index}", piece)
        self._store.set(key, str(len(pieces)))

    def _receive(self, key: str, rank: int) -> Any:
        self._wait(key, rank)
        count = int(self._store.get(key))
        return pickle.loads(b"".join(self._store.get(f"{key}/{index}") for index in range(count)))

    def _delete(self, key: str) -> None:
        for index in range(int(self._store.get(key))):
            self._store.delete_key(f"{key}/{index}")
        self._store.delete_key(key)

    def _wait(self, key: str, rank: int) -> None:
        try:
            self._store.wait([key], self._timeout)
        except RuntimeError as error:  # torch.distributed.DistStoreError among them
            raise CheckpointError(f"rank {rank} took no part in the save for {self._timeout}: {error}") from error
