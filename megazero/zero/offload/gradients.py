"""One block's reduced gradient in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megazero.zero.offload.link import ARRIVED, Arrival
from megazero.zero.offload.tier import Tier


class HostGradient:
    """The gradient of a block's owned range: it leaves the device as soon as it is reduced, and is added up there.

    Where several reductions of a step make it (stage 2 and above with accumulation), what is there is brought back
    ahead of the next one, added to on the device and sent out again: the CPU's cores and its memory are left to the
    update. ``norm_ranges``: parts whose norms are taken on the way; ``norms``: of these, float32 scalars.
    """

    def __init__(self, tier: Tier, numel: int, dtype: torch.dtype) -> None:
        self._tier = tier
        self.values = tier.memory.empty(numel, dtype, pin=tier.settings.pin_memory)
        self.present = False
        self.norm_ranges: Sequence[tuple[int, int]] = ()
        self.norms: list[torch.Tensor] = []
        self._arrival: Arrival = ARRIVED
        self._earlier: tuple[torch.Tensor, Arrival] | None = None

    def fetch_ahead(self) -> None:
        """A further summand is about to come: bring back what is there."""
        if self.present and self._earlier is None:
            there = torch.empty_like(self.values, device=self._tier.device)
            with self._tier.meter.timed("copies"):
                self._earlier = there, self._tier.link.back(there, self.values, self._arrival)

    def take(self, part: torch.Tensor) -> None:
        """Add a tensor of the device, which nothing else uses from here on."""
        self.fetch_ahead()
        if self._earlier is not None:
            there, arrival = self._earlier
            arrival.wait()
            part = there.add_(part)
            self._earlier = None
        self._measure(part)
        with self._tier.meter.timed("copies"):
            self._arrival = self._tier.link.out(self.values, part)
        self.present = True

    def _measure(self, part: torch.Tensor) -> None:
        parts = [part[a:b] for a, b in self.norm_ranges]
        self.norms = list(torch._foreach_norm(parts, 2, dtype=torch.float32)) if parts else []

    def there(self) -> torch.Tensor:
        """The gradient, when it has arrived."""
        self._arrival.wait_on_host()
        return self.values

    def send_back(self) -> torch.Tensor:
        """A copy on the device, in order on the current stream."""
        copy = torch.empty_like(self.values, device=self._tier.device)
        self._tier.link.back(copy, self.values, self._arrival).wait()
        return copy

    def replace(self, part: torch.Tensor) -> None:
        """Take another one in its place."""
        self.drop()
        self.take(part)

    def drop(self) -> None:
        if self._earlier is not None:
            self._earlier[1].wait()
        self.present, self._earlier, self.norms = False, None, []
