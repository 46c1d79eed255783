"""What recomputed layers keep between forward and backward, their inputs, in host memory meanwhile."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from megazero.host_memory import HostMemory
from megazero.zero.offload.link import Arrival, Link


class _Kept:
    """A tensor that is in host memory; ``before``: the one kept just before it, which backward asks for next."""

    def __init__(self, like: torch.Tensor, host: torch.Tensor, arrival: Arrival, before: _Kept | None) -> None:
        self.shape, self.dtype, self.host, self.arrival = like.shape, like.dtype, host, arrival
        self.before = weakref.ref(before) if before is not None else None
        self.back: tuple[torch.Tensor, Arrival] | None = None


class HostActivations:
    """Backward takes them back in reverse; each is fetched one ahead. Buffers are pinned and used again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.memory = HostMemory(device)
        self.link = Link(device, self.memory, 0, 0)
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)  # by bytes
        self._last: weakref.ref[_Kept] | None = None

    def around(self, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """``forward`` of a layer, whose first argument autograd is to find in host memory."""

        def run(x: torch.Tensor, *rest: Any) -> torch.Tensor:
            if not torch.is_grad_enabled():
                return forward(x, *rest)

            def pack(saved: torch.Tensor) -> torch.Tensor | _Kept:
                is_input = saved.data_ptr() == x.data_ptr() and saved.shape == x.shape and saved.is_contiguous()
                return self._keep(saved) if is_input else saved

            with saved_tensors_hooks(pack, self._give):
                return forward(x, *rest)

        return run

    def _keep(self, x: torch.Tensor) -> _Kept:
        free = self._free[x.nbytes]
        host = free.pop() if free else self.memory.empty(x.nbytes, torch.uint8, pin=True)
        arrival = self.link.out(host.view(x.dtype).view(x.shape), x.detach())
        kept = _Kept(x, host, arrival, self._last() if self._last is not None else None)
        # The next copy out to this buffer waits for the compute stream, which has waited for the copy back.
        weakref.finalize(kept, free.append, host).atexit = False
        self._last = weakref.ref(kept)
        return kept

    def _give(self, kept: torch.Tensor | _Kept) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        self._fetch(kept)
        assert kept.back is not None
        before = kept.before() if kept.before is not None else None
        if before is not None:
            self._fetch(before)
        x, arrival = kept.back
        arrival.wait()
        return x

    def _fetch(self, kept: _Kept) -> None:
        if kept.back is None:
            x = torch.empty(kept.shape, dtype=kept.dtype, device=self._device)
            kept.back = x, self.link.back(x, kept.host.view(kept.dtype).view(kept.shape), kept.arrival)
