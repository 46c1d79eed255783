"""One block's gradient: the flat buffer that backward fills, and the part of it that is kept once it is reduced."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megazero.zero.flat import FlatLayout
from megazero.zero.offload.gradients import HostGradient


def views_of(layout: FlatLayout, flat: torch.Tensor) -> list[torch.Tensor]:
    """A block's parameters in a buffer of its layout, in their order."""
    return [flat[entry.start : entry.end].view(entry.spec.local_shape) for entry in layout.entries]


class GradientBuffer:
    """``cut``: what of it other ranks own is dropped once it is reduced. ``shard``, ``owned``: as of the block.
    ``host``: where the reduced gradient of the owned range goes, if that is off the device.

    ``buffer``: the whole, where it is there.
    """

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Sequence[nn.Parameter],
        cut: bool,
        shard: tuple[int, int],
        owned: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        host: HostGradient | None,
    ) -> None:
        self._layout, self._parameters, self._cut = layout, parameters, cut
        self._shard, self._owned = shard, owned
        self._dtype, self._device, self._host = dtype, device, host
        self.buffer: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._written: set[int] = set()  # parameters whose gradient is in the buffer
        self._kept: torch.Tensor | None = None  # of the owned range, reduced
        self._incoming: torch.Tensor | None = None  # the same, of a reduction under way

    def accumulate(self) -> None:
        """The running backward has made all the gradients it makes of these parameters: move those that are still on
        the parameters into the flat buffer, and let the rest of it be zero.

        [Note: lifetime of gradient buffers]
        The buffer is taken when backward first reaches the block and dropped by the update, or, where gradients are
        cut, when its reduction is done; collectives on it have been waited for on the compute stream by then, so the
        allocator may hand it out again.
        """
        self.move()
        unused = [view for i, view in enumerate(self._views) if i not in self._written]
        if unused:
            torch._foreach_zero_(unused)
        self._written.update(range(len(self._parameters)))

    def move(self, indices: Sequence[int] | None = None) -> None:
        """Move the gradients of some parameters (None: of all that have one) into the flat buffer, adding to what is
        there."""
        if indices is None:
            indices = [i for i, parameter in enumerate(self._parameters) if parameter.grad is not None]
        self._take_buffer()
        for operation, chosen in (
            (torch._foreach_copy_, [i for i in indices if i not in self._written]),
            (torch._foreach_add_, [i for i in indices if i in self._written]),
        ):
            if chosen:
                operation([self._views[i] for i in chosen], [_dense(self._parameters[i].grad) for i in chosen])
        self._written.update(indices)
        for i in indices:
            self._parameters[i].grad = None

    def _take_buffer(self) -> None:
        """Backward reaches the block: the flat buffer of gradients, if it is not there. Its gaps are zero."""
        if self.buffer is None:
            self.buffer = torch.empty(self._layout.numel, dtype=self._dtype, device=self._device)
            self._views, self._written = views_of(self._layout, self.buffer), set()
            torch._foreach_zero_([self.buffer[a:b] for a, b in self._layout.gaps()] or [self.buffer[:0]])

    def add_product(self, index: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add ``left`` (rows, n) · ``right`` (n, columns) to the gradient of a matrix, in the flat buffer."""
        self._take_buffer()
        write_product(self._views[index], left, right, adds=index in self._written)
        self._written.add(index)

    def take(self, whole: torch.Tensor) -> None:
        """All gradients of the step are, or will be in order on the current stream, in a buffer that somebody keeps; no
        backward adds to them."""
        assert self.buffer is None, self._layout.name
        self.buffer, self._views = whole, []

    def reduce_into(self) -> torch.Tensor:
        """Where a reduce-scatter of the buffer puts this rank's slice: elsewhere, if the rest is to be dropped."""
        assert self.buffer is not None, self._layout.name
        if not self._cut:
            return self.buffer[slice(*self._shard)]
        self._incoming = torch.empty_like(self.buffer[slice(*self._shard)])
        return self._incoming

    def keep_owned(self) -> None:
        """The buffer was reduced: add the owned range of it to those of earlier reductions, and drop the rest."""
        assert self.buffer is not None, self._layout.name
        part, self._incoming = self._incoming, None
        if part is None:
            part = self.buffer[slice(*self._owned)]
            part = part.clone() if part.numel() < self.buffer.numel() else part
        if self._kept is None:
            self._kept = part
        else:
            self._kept += part
        self.buffer, self._views = None, []

    def leave(self) -> None:
        """The buffer was reduced, and the state is kept off the device: so is the gradient of the owned range from here
        on, and the rest is dropped."""
        assert self._host is not None
        part = self._kept
        if part is None:
            assert self.buffer is not None, self._layout.name
            part = self.buffer[slice(*self._owned)]
        self._host.take(part)
        self.buffer = self._kept = None
        self._views = []

    @property
    def present(self) -> bool:
        left = self._host is not None and self._host.present
        return left or self.buffer is not None or self._kept is not None

    def owned(self) -> torch.Tensor:
        """The reduced gradient of the owned range; where the state is kept off the device, there."""
        if self._host is not None and self._host.present:
            assert self.buffer is None and self._kept is None, self._layout.name
            return self._host.there()
        if self._kept is not None and self.buffer is not None:
            self.keep_owned()
        if self._kept is not None:
            return self._kept
        assert self.buffer is not None, self._layout.name
        return self.buffer[slice(*self._owned)]

    def share(self, start: int, end: int, reduced: bool) -> torch.Tensor:
        """This rank's summand of the gradient of [start, end), float32: over all ranks they add up to the whole.

        ``reduced``: whether ``buffer`` holds the sum in this rank's slice.
        """
        share = torch.zeros(end - start, dtype=torch.float32, device=self._device)
        left = self._host.send_back() if self._host is not None and self._host.present else None
        start_of = self._owned[0]
        for values, base, whole in (
            (left, start_of, False),
            (self._kept, start_of, False),
            (self.buffer, 0, not reduced),
        ):
            if values is not None:
                low, high = (start, end) if whole else (max(start, self._shard[0]), min(end, self._shard[1]))
                if low < high:
                    share[low - start : high - start] += values[low - base : high - base]
        return share

    def drop(self) -> None:
        """Forget what was accumulated."""
        self.buffer = self._kept = None
        self._views = []
        if self._host is not None:
            self._host.drop()


def write_product(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, adds: bool) -> None:
    """``out`` = left · right, or that added to it. A GPU's product ends in ``out`` itself, without being rounded to the
    factors' dtype."""
    alike = out.dtype == left.dtype
    if out.is_cuda and (alike or out.dtype == torch.float32):
        dtype = {} if alike else {"out_dtype": out.dtype}
        if adds:
            torch.addmm(out, left, right, out=out, **dtype)
        else:
            torch.mm(left, right, out=out, **dtype)
    elif adds:
        out += left @ right
    elif alike:
        torch.mm(left, right, out=out)
    else:
        out.copy_(left @ right)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
