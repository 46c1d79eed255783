"""Batches for a model that is not ours: each process's own samples, and their way to its device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from megazero.ds_config import DsConfig
from megazero.errors import ConfigError, MegazeroError
from megazero.topology import Topology


class EpochLoader(DataLoader):
    """Batches of this process's share of a dataset. Each run through it is one epoch, in an order of its own.

    Every process has the same number of batches: where the samples do not divide by the processes, some come twice.
    """

    def __init__(self, data: Any, ds: DsConfig, topology: Topology, collate_fn: Callable | None) -> None:
        rank, size = topology.coordinates["dp"], topology.layout.dp
        super().__init__(
            data,
            batch_size=ds.train_micro_batch_size_per_gpu,
            sampler=DistributedSampler(data, num_replicas=size, rank=rank, seed=ds.seed or 0),
            collate_fn=collate_fn,
            drop_last=ds.dataloader_drop_last,
            pin_memory=topology.device.type == "cuda",
        )
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        return super().__iter__()


def make_loader(data: Any, ds: DsConfig, topology: Topology, collate_fn: Callable | None) -> EpochLoader | None:
    """The loader of ``training_data``; None where there is none. Raises ConfigError where it is no dataset."""
    if data is None:
        return None
    if not hasattr(data, "__getitem__") or not isinstance(data, Sized):
        raise ConfigError.single(
            "training_data",
            f"is a {type(data).__name__}; give a dataset with __len__ and __getitem__, or use a DataLoader of your own "
            "and leave this out",
        )
    if not len(data):
        raise ConfigError.single("training_data", "holds no sample")
    return EpochLoader(data, ds, topology, collate_fn)


class Batches:
    """What the micro-batches of a step are read from: an iterator that is given, or ``loader``, epoch after epoch."""

    def __init__(self, loader: Iterable[Any] | None = None) -> None:
        self.loader = loader
        self._epoch: Iterator[Any] | None = None

    def read(self, what: str, given: Iterator[Any] | None, count: int) -> Iterator[Any]:
        """``count`` of them; to be read before anything is computed, as others may wait for what is missing."""
        for number in range(count):
            try:
                batch = self._next() if given is None else next_of(given)
            except StopIteration:
                raise MegazeroError(
                    f"{what}: the iterator ended after {number} of {count} micro-batches; give one that goes on, "
                    "or call it fewer times on every process"
                ) from None
            yield batch

    def _next(self) -> Any:
        if self.loader is None:
            raise MegazeroError("train_batch: give an iterator over batches, or training_data to initialize")
        if self._epoch is None:
            self._epoch = iter(self.loader)
        try:
            return next(self._epoch)
        except StopIteration:
            self._epoch = iter(self.loader)
            return next(self._epoch)


def next_of(data_iter: Iterator[Any]) -> Any:
    """The next batch. MegazeroError for a dataloader or a list, of which there is no next."""
    if not hasattr(data_iter, "__next__"):
        kind = type(data_iter).__name__
        raise MegazeroError(f"data_iter is a {kind} and no iterator over batches; give iter(...) of it")
    return next(data_iter)


def to_device(batch: Any, device: torch.device) -> Any:
    """The tensors of nested mappings, tuples and lists, moved; the rest as it is."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return [to_device(value, device) for value in batch]
    return batch


def cast_floats(inputs: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors of nested mappings, tuples and lists in ``dtype``."""
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, inputs
    )


def loss_of(call: Callable[..., Any], batch: Any, device: torch.device) -> torch.Tensor:
    """The loss that a module returns of a batch.

    A batch is a tuple or list of arguments, a mapping of keyword arguments, or the one argument. The module returns the
    loss, or an object or mapping with it under ``loss``, or a tuple that begins with it.
    """
    batch = to_device(batch, device)
    if isinstance(batch, Mapping):
        output = call(**batch)
    else:
        output = call(*batch) if isinstance(batch, list) else call(batch)
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif hasattr(output, "loss"):
        output = output.loss
    loss = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise MegazeroError(
            "the module must return a loss of one element, alone, as `loss`, or first in a tuple; for another loss, "
            "call engine(...), engine.backward(loss) and engine.step() yourself"
        )
    return loss
