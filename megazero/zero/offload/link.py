"""Copies between the device and host memory: on streams of their own, counted by direction."""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Literal, Protocol

import torch

from megazero.host_memory import HostMemory

Direction = Literal["out", "back"]

LEAVING = 3
"""Tensors on their way out before the compute stream waits for the first of them."""


class Arrival(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Order what follows on the current stream after it."""

    def wait_on_host(self) -> None:
        """Return when it is done."""


class _Arrived:
    def wait(self) -> None:
        pass

    def wait_on_host(self) -> None:
        pass


ARRIVED: Arrival = _Arrived()


class _Event:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def wait_on_host(self) -> None:
        self._event.synchronize()


class Link:
    """One rank's way between its device and its host memory. ``bytes``: moved so far, by direction.

    [Note: streams of the link]
    One stream per direction, so that both run at once. Either waits for the compute stream when a copy is issued: what
    is copied out has been computed, and memory that is copied to is not read any more. Memory of the device is given
    back on the compute stream, after that has waited for the copy: of what is copied back, whoever uses it waits; of
    what is copied out, the link keeps a few tensors until then. (Tensor.record_stream would not do: the host runs ahead
    of the device, and memory so recorded cannot be used again before the host sees that the copy is done, so that all
    gradients of a step would be there at once.)
    """

    def __init__(self, device: torch.device, memory: HostMemory, buffers: int, buffer_size: int) -> None:
        """``buffers``: how many copies back of up to ``buffer_size`` elements may be on their way at once."""
        self._device, self._memory = device, memory
        self.bytes: Counter[str] = Counter()
        self._cuda = device.type == "cuda"
        self._buffers, self._buffer_size = buffers, buffer_size
        self._slots: deque[tuple[torch.Tensor, Arrival]] = deque()
        self._wide: torch.Tensor | None = None
        self._leaving: deque[tuple[torch.Tensor, Arrival]] = deque()
        self._counting = threading.Lock()
        if self._cuda:
            # What is rounded on its way back does not queue behind the kernels of a step.
            self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device, priority=-1)

    def _count(self, direction: Direction, size: int) -> None:
        with self._counting:  # the worker copies as well
            self.bytes[direction] += size

    def out(self, host: torch.Tensor, source: torch.Tensor) -> Arrival:
        """Copy a tensor of the device to one of the host."""
        self._count("out", source.nbytes)
        if not self._cuda:
            host.copy_(source)
            return ARRIVED
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            host.copy_(source, non_blocking=True)
        arrival = _Event(self._out)
        self._leaving.append((source, arrival))
        self._let_go(LEAVING)
        return arrival

    def _let_go(self, keep: int) -> None:
        while len(self._leaving) > keep:
            source, arrival = self._leaving.popleft()
            arrival.wait()
            del source

    def drain(self) -> None:
        """Order what follows on the current stream after all copies out; their memory is free."""
        self._let_go(0)

    def back(self, target: torch.Tensor, host: torch.Tensor, after: Arrival = ARRIVED) -> Arrival:
        """Copy a tensor of the host, which ``after`` may still be on its way there, to one of the device. Wait for it
        on the compute stream before the target is used or let go of."""
        self._count("back", target.nbytes)
        if not self._cuda:
            target.copy_(host)
            return ARRIVED
        self._back.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._back):
            after.wait()
            target.copy_(host, non_blocking=True)
        return _Event(self._back)

    def begin_thread(self) -> None:
        """At the start of a thread that copies."""
        torch.set_grad_enabled(False)
        if self._cuda:
            torch.cuda.set_device(self._device)

    def mark(self) -> Arrival:
        """All that has been issued on the compute stream, for ``back_after``."""
        return _Event(torch.cuda.current_stream(self._device)) if self._cuda else ARRIVED

    def back_after(self, target: torch.Tensor, host: torch.Tensor, asked: Arrival) -> Arrival:
        """As ``back``, from another thread: ``asked``, a ``mark`` of the one that will use the target, is what the copy
        waits for."""
        self._count("back", target.nbytes)
        if not self._cuda:
            target.copy_(host)
            return ARRIVED
        with torch.cuda.stream(self._back):
            asked.wait()
            target.copy_(host, non_blocking=True)
        return _Event(self._back)

    def bring(self, target: torch.Tensor, values: torch.Tensor) -> Arrival:
        """Copy up to ``buffer_size`` float32 values of the host, which may change right after, to a tensor of the
        device, in its dtype. From one thread only, and to memory that no kernel under way uses."""
        self._count("back", target.nbytes)
        if not self._cuda:
            target.copy_(values)
            return ARRIVED
        if len(self._slots) < self._buffers:
            slot = self._memory.empty(self._buffer_size * 4, torch.uint8, pin=True)
        else:
            slot, sent = self._slots.popleft()
            sent.wait_on_host()
        staged = slot[: target.nbytes].view(target.dtype)
        staged.copy_(values)
        with torch.cuda.stream(self._back):
            target.copy_(staged, non_blocking=True)
        arrival = _Event(self._back)
        self._slots.append((slot, arrival))
        return arrival

    def bring_masters(self, target: torch.Tensor, masters: torch.Tensor) -> Arrival:
        """Copy up to ``buffer_size`` float32 values that are pinned, and stay as they are until then, to a tensor of
        the device, in its dtype. From one thread only, and to memory that no kernel under way uses."""
        self._count("back", masters.nbytes)
        if not self._cuda:
            target.copy_(masters)
            return ARRIVED
        with torch.cuda.stream(self._back):
            if target.dtype == masters.dtype:
                target.copy_(masters, non_blocking=True)
            else:
                # Torch would round them on the host, which waits for that.
                if self._wide is None:
                    self._wide = torch.empty(self._buffer_size, dtype=torch.float32, device=self._device)
                there = self._wide[: masters.numel()]
                there.copy_(masters, non_blocking=True)
                target.copy_(there)
        return _Event(self._back)

    def finish(self) -> None:
        """Return when nothing is on its way any more."""
        if self._cuda:
            self._out.synchronize()
            self._back.synchronize()

    def stream_back(self) -> torch.cuda.stream:
        """A context in which work is issued after all copies back."""
        return torch.cuda.stream(self._back if self._cuda else None)
