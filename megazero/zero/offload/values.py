"""Parameters in files: a rank's share of each block, read when the block is about to be used.

[Note: from file to device] A thread reads a block's values into one of a few pinned buffers and issues the copy to the
device from there, in the order in which blocks were asked for: while one is used, the next is on its way. A buffer is
read into again when the copy from it is done. Blocks are written by whoever changes them, before they are asked for
again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from megazero.host_memory import HostMemory
from megazero.zero.offload.files import PAGE, StateFile
from megazero.zero.offload.link import ARRIVED, Arrival, Link
from megazero.zero.offload.media import InFile
from megazero.zero.offload.meter import Meter

SLOTS = 3
"""Buffers: one is read into while the copies from the others end."""


def pages_of(size: int) -> int:
    """``size`` bytes in whole pages."""
    return -(-size // PAGE) * PAGE


def file_and_slots(sizes: Iterable[int]) -> tuple[int, int]:
    """Bytes of the file, and of the buffers, for blocks of so many bytes."""
    pages = [pages_of(size) for size in sizes]
    return sum(pages), SLOTS * max(pages, default=0)


class ParameterFile:
    """One rank's. ``read_bytes``: so far, by the thread."""

    def __init__(
        self,
        path: str,
        size: int,
        slots: int,
        memory: HostMemory,
        link: Link,
        meter: Meter,
        pin: bool,
        beside: StateFile | None,
    ) -> None:
        """``size``, ``slots``: bytes, as ``file_and_slots`` has them. ``beside``: the file of the rank's other state.
        Raises OffloadError where there is no room."""
        self.file = StateFile(path, size, "offload_param.nvme_path", beside)
        self.memory, self.link, self.meter = memory, link, meter
        self.read_bytes = 0
        self._slots: deque[tuple[torch.Tensor, Arrival]] = deque(
            (memory.empty(slots // SLOTS, torch.uint8, pin), ARRIVED) for _ in range(SLOTS)
        )
        self._thread = ThreadPoolExecutor(1, "offload_parameters", link.begin_thread)

    def bring(self, target: torch.Tensor, offset: int) -> Arrival:
        """The file's values from ``offset`` on to a tensor of the device."""
        return _Promised(self._thread.submit(self._bring, target, offset, self.link.mark()), self.meter)

    def _bring(self, target: torch.Tensor, offset: int, asked: Arrival) -> Arrival:
        slot, arrival = self._slots.popleft()
        try:
            arrival.wait_on_host()
            pages = slot[: pages_of(target.nbytes)]
            with self.meter.timed("parameters"):
                self.file.read(pages, offset)
            self.read_bytes += len(pages)
            arrival = self.link.back_after(target, pages[: target.nbytes].view(target.dtype), asked)
        finally:
            self._slots.append((slot, arrival))
        return arrival

    def close(self) -> None:
        """Wait for the thread; the file is removed."""
        self._thread.shutdown()
        self.file.close()


class FileValues:
    """One block's values."""

    def __init__(self, where: ParameterFile, numel: int, dtype: torch.dtype) -> None:
        self._where, self._numel, self._dtype = where, numel, dtype
        self._stored = InFile(where, {"values": dtype}, numel, max(numel, 1))

    def bring(self, target: torch.Tensor) -> Arrival:
        """All of them to a tensor of the device. Wait for it on the compute stream before the target is used."""
        return self._where.bring(target, self._stored.offset_of(0)) if self._numel else ARRIVED

    def read(self, start: int, end: int) -> torch.Tensor:
        """A copy of a part, in host memory."""
        return self._stored.read("values", start, end)

    def write(self, start: int, values: torch.Tensor) -> None:
        """Replace a part; in their dtype."""
        if values.numel():
            self._stored.write("values", start, values.detach().to("cpu", self._dtype).reshape(-1))


class _Promised:
    """The arrival of what a thread is still to send."""

    def __init__(self, sent: Future[Arrival], meter: Meter) -> None:
        self._sent, self._meter = sent, meter

    def _arrival(self) -> Arrival:
        with self._meter.timed("wait"):
            return self._sent.result()

    def wait(self) -> None:
        self._arrival().wait()

    def wait_on_host(self) -> None:
        self._arrival().wait_on_host()
