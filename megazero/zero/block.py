"""One block's storage: the flat parameter buffer, its gradient, and the float32 state of the part that a rank owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Sharding:
    """What of a block is cut into slices: the three switches of ZeRO (arXiv 1910.02054, section 5)."""

    state: bool
    gradients: bool
    parameters: bool

    @staticmethod
    def of_stage(stage: int) -> Sharding:
        return Sharding(stage >= 1, stage >= 2, stage >= 3)


class Block:
    """Parameters as views of one flat buffer, and the slice of it that this rank updates.

    [Note: views through .data]
    Parameters are installed as views of ``flat`` by assigning ``.data``, because writing into a leaf in place
    would trip autograd's version counter. Nothing then warns of a stale weight: every use of a block's
    parameters must come after ``use()``, which the hooks of zero.hooks call.

    [Note: parameters that come and go]
    Where parameters are cut, ``flat`` keeps its place as a tensor and loses its storage between uses, so that what
    autograd saved of it in forward (views of weights among it) is whole again when backward has gathered it anew.
    Storage is taken and given back on the compute stream, and a collective waits for that stream when it is issued,
    so memory is never written while a kernel still reads what was there before.

    ``owned``: the [start, end) range this rank updates and keeps float32 state for: its slice, or everything
    where the optimizer state is not sharded. ``shard``: its slice, in either case. ``trainable``: its parameters have
    gradients and optimizer state. ``optimizer_state``: what the optimizer keeps of the owned range, by name. ``guard``:
    the class of its parameters while they are not whole.
    """

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Mapping[str, nn.Parameter],
        rank: int,
        sharding: Sharding,
        dtype: torch.dtype,
        grad_dtype: torch.dtype,
        device: torch.device,
        trainable: bool = True,
        guard: type[nn.Parameter] | None = None,
    ) -> None:
        self.layout, self.sharding = layout, sharding
        self.shard = layout.shard(rank)
        self.owned = self.shard if sharding.state else (0, layout.numel)
        self.grad_dtype, self.trainable = grad_dtype, trainable
        self.flat = torch.zeros(layout.numel, dtype=dtype, device=device)
        owned = self.flat[slice(*self.owned)]
        # The owned values in the parameters' dtype: where parameters are cut, all that stays of them.
        self.values = owned.clone() if sharding.parameters else owned
        # In float32 the parameter is its own master.
        keeps_master = trainable and dtype != torch.float32
        self.master = torch.zeros_like(owned, dtype=torch.float32) if keeps_master else self.values
        self.optimizer_state: dict[str, torch.Tensor] = {}
        self.grad: torch.Tensor | None = None
        self._kept: torch.Tensor | None = None  # of the owned range, reduced
        self.parameters = [parameters[entry.name] for entry in layout.entries]
        for parameter, entry in zip(self.parameters, layout.entries, strict=True):
            parameter.data = self._view(self.flat, entry.start, entry.spec.local_shape)
        self._guard = guard if sharding.parameters else None
        self._gather: Work | None = None
        self.state = State.SHARDED
        if sharding.parameters:
            self._drop_storage()

    @staticmethod
    def _view(flat: torch.Tensor, start: int, shape: Sequence[int]) -> torch.Tensor:
        return flat[start : start + torch.Size(shape).numel()].view(shape)

    def _drop_storage(self) -> None:
        self.flat.untyped_storage().resize_(0)
        self._set_class(nn.Parameter, self._guard)

    def _set_class(self, before: type | None, after: type | None) -> None:
        """See zero.guard. Parameters of a class of their own are left as they are."""
        if before is None or after is None:
            return
        for parameter in self.parameters:
            if type(parameter) is before:
                parameter.__class__ = after

    def gather_into(self) -> torch.Tensor:
        """The buffer for an all-gather of ``values``, with storage."""
        assert self.state is State.SHARDED, (self.layout.name, self.state)
        if self.sharding.parameters:
            self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.itemsize)
        return self.flat

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
        self._set_class(self._guard, nn.Parameter)

    def release(self) -> None:
        """Give the gathered parameters' memory back; see [Note: parameters that come and go]."""
        assert self.sharding.parameters, self.layout.name
        if self.state is State.SHARDED:
            return
        self.use()
        self._drop_storage()
        self.state = State.SHARDED

    def updated(self) -> None:
        """The owned float32 values changed: write them in the parameters' dtype; other slices are now stale."""
        if self.sharding.parameters:
            self.release()
        else:
            self.use()
        if self.master is not self.values:
            self.values.copy_(self.master)
        self.drop_grad()
        self.state = State.SHARDED

    def accumulate(self) -> None:
        """Move the gradients autograd left on the parameters into the flat buffer, adding to what is there.

        [Note: lifetime of gradient buffers]
        The buffer is taken when backward first reaches the block and dropped by the update, or, where gradients are
        cut, when its reduction is done; collectives on it have been waited for on the compute stream by then, so the
        allocator may hand it out again.
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

    def keep_owned(self) -> None:
        """The buffer was reduced: add the owned range of it to those of earlier reductions, and drop the rest."""
        assert self.grad is not None, self.layout.name
        part = self.grad[slice(*self.owned)]
        if self._kept is None:
            self._kept = part.clone() if part.numel() < self.grad.numel() else part
        else:
            self._kept += part
        self.grad = None

    @property
    def has_grad(self) -> bool:
        return self.grad is not None or self._kept is not None

    def owned_grad(self) -> torch.Tensor:
        """The reduced gradient of the owned range."""
        if self._kept is not None and self.grad is not None:
            self.keep_owned()
        if self._kept is not None:
            return self._kept
        assert self.grad is not None, self.layout.name
        return self.grad[slice(*self.owned)]

    def drop_grad(self) -> None:
        """Forget what was accumulated."""
        self.grad = self._kept = None

    def owned_state(self, kind: str) -> torch.Tensor:
        """The owned range of the weights (``weight``, in float32), or of what the optimizer keeps under that name."""
        return self.master if kind == "weight" else self.optimizer_state[kind]

    def load(self, kind: str, read: Reader) -> None:
        """Fill one state of the owned range with global tensors' values; after ``weight`` the block wants gathering."""
        state, base = self.owned_state(kind), self.owned[0]
        for at, piece, box in self.layout.boxes(*self.owned):
            values = read(piece.name, piece.global_shape, box)
            state[at - base : at - base + box.numel].copy_(values.reshape(-1))
        if kind == "weight":
            if self.sharding.parameters:
                self.release()
            if self.master is not self.values:
                self.values.copy_(self.master)
            self.state = State.SHARDED

    def chunks(self, kind: str) -> Iterator[tuple[Piece, Rectangle, torch.Tensor]]:
        """One state of this rank's slice, as boxes of global tensors; views, in buffer order."""
        state, base = self.owned_state(kind), self.owned[0]
        for at, piece, box in self.layout.boxes(*self.shard):
            yield piece, box, state[at - base : at - base + box.numel].view(box.shape)
