"""Where a dry run keeps what is off its device: nowhere, but every byte taken and moved is counted."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property
from typing import Any

import torch

from megazero.host_memory import HostMemory
from megazero.planner.traffic import Route, Traffic
from megazero.zero.offload.formats import OFFSETS, Noise
from megazero.zero.offload.link import ARRIVED, Arrival, Direction, Link
from megazero.zero.offload.meter import Meter
from megazero.zero.offload.settings import Offload
from megazero.zero.offload.sizes import HostState
from megazero.zero.offload.tier import Tier
from megazero.zero.offload.values import FileValues, pages_of

_SCALARS = (2.0, 0.0, 1.0)
"""What the host is told of a step: gradients are divided by 2, nothing is skipped, it is Adam's first."""


def _done(result: Any) -> Future:
    future: Future = Future()
    future.set_result(result)
    return future


class PaperMemory(HostMemory):
    """``storages``: of all that was given out, so that none is taken for the device's."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"))
        self._given: list[torch.Tensor] = []

    @property
    def storages(self) -> set[int]:
        return {tensor.untyped_storage()._cdata for tensor in self._given}

    def empty(self, numel: int, dtype: torch.dtype, pin: bool = False) -> torch.Tensor:
        self._given.append(torch.empty(numel, dtype=dtype, device="meta"))
        self.taken += numel * dtype.itemsize
        return self._given[-1]


class _PaperLink(Link):
    """Takes its buffers as a GPU's link has after a few steps. A step's scalars are not counted."""

    def __init__(self, memory: HostMemory, settings: Offload, traffic: Traffic) -> None:
        super().__init__(torch.device("meta"), memory, settings.buffer_count, settings.buffer_size)
        self._traffic, self._staging = traffic, False

    def _count(self, direction: Direction, size: int) -> None:
        self._traffic[Route("host", direction, 1)] += size

    def out(self, host: torch.Tensor, source: torch.Tensor) -> Arrival:
        if host.is_meta:
            return super().out(host, source)
        host.copy_(torch.tensor(_SCALARS))
        return ARRIVED

    def bring(self, target: torch.Tensor, values: torch.Tensor) -> Arrival:
        if not self._staging:
            self._memory.empty(self._buffers * self._buffer_size * 4, torch.uint8)
            self._staging = True
        return super().bring(target, values)


class _PaperDisk:
    """As offload.media.Disk; it is its own file, of ``size`` bytes."""

    reads_ahead = False

    def __init__(self, memory: HostMemory, settings: Offload, planned: HostState, traffic: Traffic) -> None:
        self.memory, self._traffic, self.file, self.size = memory, traffic, self, 0
        self._buffers = [memory.empty(planned.record, torch.uint8) for _ in range(settings.buffer_count)]

    def claim(self, size: int) -> int:
        start, self.size = self.size, self.size + size
        return start

    def order(self, offset: int, size: int, after: Future | None) -> Future[Future[torch.Tensor]]:
        self._traffic[Route("files", "read", 1)] += size
        return _done(_done(self._buffers[0]))

    def give_back(self, buffer: torch.Tensor, offset: int, size: int, changed: bool) -> None:
        self._traffic[Route("files", "write", 1)] += size if changed else 0


class _PaperValues(FileValues):
    """Parameters of a block in a file that is not there."""

    def __init__(self, link: Link, traffic: Traffic, numel: int, dtype: torch.dtype) -> None:
        self._link, self._traffic, self._numel, self._dtype = link, traffic, numel, dtype

    def bring(self, target: torch.Tensor) -> Arrival:
        self._traffic[Route("files", "read", 1)] += pages_of(target.nbytes)
        return self._link.back_after(target, target, ARRIVED)

    def read(self, start: int, end: int) -> torch.Tensor:
        return torch.empty(end - start, dtype=self._dtype, device="meta")

    def write(self, start: int, values: torch.Tensor) -> None:
        self._traffic[Route("files", "write", 1)] += values.numel() * self._dtype.itemsize


class _PaperNoise(Noise):
    def __init__(self, memory: HostMemory, numel: int) -> None:
        self._table = memory.empty(numel + OFFSETS, torch.int32)


class PaperTier(Tier):
    """Updates run at once, in the thread that asks for them. ``files``: bytes on disk."""

    def __init__(self, settings: Offload, planned: HostState, traffic: Traffic) -> None:
        self.settings, self.device, self.planned = settings, torch.device("meta"), planned
        self.memory = PaperMemory()
        self.disk = _PaperDisk(self.memory, settings, planned, traffic) if settings.optimizer == "nvme" else None
        self.link = _PaperLink(self.memory, settings, traffic)
        self.threads = settings.buffer_size  # strips of an update are as long as its pieces: nothing is in a cache
        self.meter = Meter(self.link.bytes, 1, 1, True)
        self._scratch: dict[str, torch.Tensor] = {}
        self.error = None
        self._traffic = traffic
        if planned.parameter_slots:
            self.memory.empty(planned.parameter_slots, torch.uint8)

    @property
    def files(self) -> int:
        return self.planned.parameter_files + (self.disk.size if self.disk is not None else 0)

    def file_values(self, numel: int, dtype: torch.dtype) -> FileValues | None:
        if self.settings.parameters != "nvme":
            return None
        return _PaperValues(self.link, self._traffic, numel, dtype)

    @cached_property
    def noise(self) -> Noise:
        return _PaperNoise(self.memory, self.settings.buffer_size)

    def submit(self, work: Callable[[], Any]) -> Future:
        return _done(work())

    def hand_on(self, work: Callable[[], Any]) -> Future:
        return _done(work())

    def close(self) -> None:
        pass
