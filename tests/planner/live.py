"""The storages that are alive: what a planner's bytes are compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of every storage that an operation inside it made, for as long as anything holds it.

    ``peak``: the most at the end of any operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id_of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and id_of(x) not in given:
                storage = x.untyped_storage()
                self._storages[id_of(x)] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.bytes())
        return result

    def bytes(self) -> int:
        """Bytes alive now."""
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        return sum(size for _, size in self._storages.values())


def id_of(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def storage_bytes(tensors: Any) -> int:
    """Bytes of the storages of ``tensors``, each once."""
    return sum({id_of(x): x.untyped_storage().nbytes() for x in tensors}.values())
