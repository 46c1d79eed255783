"""One block's storage: the flat parameter buffer, its gradient buffer, and the float32 state of the shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum

import torch
from torch import nn

from megazero.comm import Work
from megazero.sharding import Piece, Rectangle
from megazero.zero.flat import FlatLayout

Reader = Callable[[str, tuple[int, ...], Rectangle], torch.Tensor]
"""(global name, global shape, box) → float32 values of the box."""


class State(Enum):
    """What the flat parameter buffer holds."""

    SHARDED = "only this rank's slice is current"
    GATHERING = "an all-gather of it is under way"
    GATHERED = "every parameter is current"


class Block:
    """Parameters as views of one flat buffer, and the slice of it that this rank updates.

    [Note: views through .data]
    Parameters are installed as views of ``flat`` by assigning ``.data``, because writing into a leaf in place
    would trip autograd's version counter. Nothing then warns of a stale weight: every use of a block's
    parameters must come after ``use()``, which the forward hooks of zero.sharded call.

    ``owned``: the [start, end) range this rank updates and keeps float32 state for: its slice, or everything
    where the optimizer state is not sharded. ``shard``: its slice, in either case.
    """

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Mapping[str, nn.Parameter],
        rank: int,
        sharded: bool,
        dtype: torch.dtype,
        grad_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.shard = layout.shard(rank)
        self.owned = self.shard if sharded else (0, layout.numel)
        self.grad_dtype = grad_dtype
        self.flat = torch.zeros(layout.numel, dtype=dtype, device=device)
        self.grad: torch.Tensor | None = None
        # In float32 the parameter is its own master.
        owned = self.flat[slice(*self.owned)]
        self.master = owned if dtype == torch.float32 else torch.zeros_like(owned, dtype=torch.float32)
        self.exp_avg = torch.zeros_like(owned, dtype=torch.float32)
        self.exp_avg_sq = torch.zeros_like(owned, dtype=torch.float32)
        self.parameters = [parameters[entry.name] for entry in layout.entries]
        for parameter, entry in zip(self.parameters, layout.entries, strict=True):
            parameter.data = self._view(self.flat, entry.start, entry.spec.local_shape)
        self._gather: Work | None = None
        self.state = State.SHARDED

    @staticmethod
    def _view(flat: torch.Tensor, start: int, shape: Sequence[int]) -> torch.Tensor:
        return flat[start : start + torch.Size(shape).numel()].view(shape)

    def gathering(self, work: Work | None) -> None:
        """An all-gather was issued; None where there was nobody to gather from."""
        assert self.state is State.SHARDED, (self.layout.name, self.state)
        self._gather = work
        self.state = State.GATHERING

    def use(self) -> None:
        """Order what follows after the all-gather; a use of parameters nobody asked for is our bug."""
        if self.state is State.GATHERED:
            return
        assert self.state is State.GATHERING, (self.layout.name, self.state)
        if self._gather is not None:
            self._gather.wait()
            self._gather = None
        self.state = State.GATHERED

    def updated(self) -> None:
        """The owned float32 values changed: write them into the buffer; other slices are now stale."""
        assert self.state is State.GATHERED, (self.layout.name, self.state)
        if self.master.dtype != self.flat.dtype:
            self.flat[slice(*self.owned)].copy_(self.master)
        self.grad = None
        self.state = State.SHARDED

    def accumulate(self) -> None:
        """Move the gradients autograd left on the parameters into the flat buffer, adding to what is there.

        [Note: lifetime of gradient buffers]
        The buffer is taken when backward first reaches the block and dropped by the update; collectives on it
        have been waited for on the compute stream by then, so the allocator may hand it out again.
        """
        grads = [p.grad for p in self.parameters]
        first = self.grad is None
        if first:
            self.grad = torch.empty(self.layout.numel, dtype=self.grad_dtype, device=self.flat.device)
            torch._foreach_zero_([self.grad[a:b] for a, b in self.layout.gaps()] or [self.grad[:0]])
        views = [self._view(self.grad, e.start, e.spec.local_shape) for e in self.layout.entries]
        if first and (unused := [v for v, g in zip(views, grads, strict=True) if g is None]):
            torch._foreach_zero_(unused)
        used = [(v, g) for v, g in zip(views, grads, strict=True) if g is not None]
        if used:
            operation = torch._foreach_copy_ if first else torch._foreach_add_
            operation([v for v, _ in used], [g for _, g in used])
        for parameter in self.parameters:
            parameter.grad = None

    def owned_grad(self) -> torch.Tensor:
        """The reduced gradient of the owned range."""
        assert self.grad is not None, self.layout.name
        return self.grad[slice(*self.owned)]

    def load(self, state: torch.Tensor, read: Reader) -> None:
        """Fill one float32 state of the owned range (master, exp_avg, exp_avg_sq) with global tensors' values."""
        base = self.owned[0]
        for at, piece, box in self.layout.boxes(*self.owned):
            values = read(piece.name, piece.global_shape, box)
            state[at - base : at - base + box.numel].copy_(values.reshape(-1))

    def load_master(self, read: Reader) -> None:
        """Set the weights; afterwards the block wants gathering."""
        self.load(self.master, read)
        if self.master.dtype != self.flat.dtype:
            self.flat[slice(*self.owned)].copy_(self.master)
        self.state = State.SHARDED

    def chunks(self, state: torch.Tensor) -> Iterator[tuple[Piece, Rectangle, torch.Tensor]]:
        """One float32 state of this rank's slice, as boxes of global tensors; views, in buffer order."""
        base = self.owned[0]
        for at, piece, box in self.layout.boxes(*self.shard):
            yield piece, box, state[at - base : at - base + box.numel].view(box.shape)
