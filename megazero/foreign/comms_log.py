"""comms_logger: what each kind of collective moved, and how long it took."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megazero.comm import Communicator
from megazero.ds_config.tree import CommsLogger
from megazero.errors import ConfigError
from megazero.topology import Topology
from megazero.zero.groups import DataParallel

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")


@dataclass
class Sum:
    """Of the collectives of one kind since the last report."""

    calls: int = 0
    elements: int = 0
    bytes: int = 0
    seconds: float = 0.0


class CommsLog:
    """Counts and times the collectives of some communicators.

    To time one it is waited for where it is issued, so nothing is hidden behind it: a run is slower while it is logged.
    """

    def __init__(self, settings: CommsLogger, device: torch.device, say: Callable[[str], None]) -> None:
        unknown = [name for name in settings.prof_ops if not any(kind in name for kind in KINDS)]
        if unknown:
            raise ConfigError.single("comms_logger.prof_ops", f"{unknown[0]!r} is none of {', '.join(KINDS)}")
        self._settings, self._device, self._say = settings, device, say
        self._wrapped: dict[Communicator, Communicator] = {}
        self.sums: dict[str, Sum] = {}

    def wrap_all(self, groups: DataParallel, topology: Topology) -> DataParallel:
        """The same groups, logged. The topology's are from here on, too."""
        topology.world = self.wrap(topology.world)
        local = self.wrap(groups.local) if groups.local is not None else None
        whole, shard, replicate = (self.wrap(c) for c in (groups.whole, groups.shard, groups.replicate))
        return replace(groups, whole=whole, shard=shard, replicate=replicate, local=local)

    def wrap(self, communicator: Communicator) -> Communicator:
        """The same group, logged; one for one."""
        if communicator not in self._wrapped:
            self._wrapped[communicator] = _Logged(communicator, self)
        return self._wrapped[communicator]

    def time(self, kind: str, buffers: Sequence[torch.Tensor], issue: Callable[[], Any]) -> Any:
        """Issue a collective, wait for it, and note it."""
        if not self._settings.prof_all and not any(kind in name for name in self._settings.prof_ops):
            return issue()
        self._synchronize()
        start = time.perf_counter()
        work = issue()
        if work is not None:
            work.wait()
        self._synchronize()
        seconds = time.perf_counter() - start
        elements, size = sum(b.numel() for b in buffers), sum(b.nbytes for b in buffers)
        noted = self.sums.setdefault(kind, Sum())
        noted.calls, noted.elements = noted.calls + 1, noted.elements + elements
        noted.bytes, noted.seconds = noted.bytes + size, noted.seconds + seconds
        if self._settings.verbose:
            caller = f" from {_caller()}" if self._settings.debug else ""
            self._say(f"{kind} of {elements:,} elements, {size:,} bytes, {seconds * 1e3:.3f} ms{caller}")
        return work

    def report(self) -> None:
        """Say what was noted since the last time."""
        for kind, noted in self.sums.items():
            self._say(
                f"{kind}: {noted.calls} calls, {noted.elements:,} elements, {noted.bytes:,} bytes, "
                f"{noted.seconds * 1e3:.3f} ms"
            )
        self.sums.clear()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _caller() -> str:
    frames = [f for f in traceback.extract_stack() if f.filename != __file__]
    return f"{frames[-1].name} in {frames[-1].filename}, line {frames[-1].lineno}"


class _Logged(Communicator):
    def __init__(self, inner: Communicator, log: CommsLog) -> None:
        super().__init__(inner.group, inner.size, inner.rank)
        self._log = log

    def all_reduce(self, buffers: Sequence[torch.Tensor]) -> Any:
        return self._log.time("all_reduce", buffers, lambda: Communicator.all_reduce(self, buffers))

    def reduce_scatter(self, buffers: Sequence[torch.Tensor], slices: Sequence[torch.Tensor]) -> Any:
        return self._log.time("reduce_scatter", buffers, lambda: Communicator.reduce_scatter(self, buffers, slices))

    def all_gather(self, buffers: Sequence[torch.Tensor], slices: Sequence[torch.Tensor]) -> Any:
        return self._log.time("all_gather", buffers, lambda: Communicator.all_gather(self, buffers, slices))

    def broadcast(self, buffer: torch.Tensor, source: int = 0) -> None:
        self._log.time("broadcast", [buffer], lambda: Communicator.broadcast(self, buffer, source))
