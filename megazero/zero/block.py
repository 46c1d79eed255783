"""One block's storage: the flat parameter buffer, its gradient, and the float32 state of the part that a rank owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch import nn

from megazero.checkpoint.writer import row_runs
from megazero.comm import Work
from megazero.errors import MegazeroError, OffloadError
from megazero.sharding import Piece, Rectangle
from megazero.zero.flat import FlatLayout
from megazero.zero.gradient import GradientBuffer, views_of
from megazero.zero.guard import Guard, placeholder, set_class
from megazero.zero.offload.gradients import HostGradient
from megazero.zero.offload.link import ARRIVED, Arrival
from megazero.zero.offload.store import Store
from megazero.zero.offload.tier import Tier
from megazero.zero.offload.values import FileValues

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
    so memory is never written while a kernel still reads what was there before. A guarded parameter is a placeholder
    of its shape meanwhile: what finds a way around the guard reads nan, not memory that is not there.

    ``owned``: the [start, end) range this rank updates and keeps float32 state for: its slice, or everything
    where the optimizer state is not sharded. ``shard``: its slice, in either case. ``trainable``: its parameters have
    gradients and optimizer state. ``optimizer_state``: what the optimizer keeps of the owned range, by name. ``guard``:
    the classes of its parameters while they are not whole. ``holders``: how many GatheredParameters keep it whole;
    ``lent``: it is whole for their sake alone. ``host_grad``: where the float32 state is kept off the device, the
    reduced gradient beside it; else None. ``store``: that state where it is not float32 tensors, which ``master`` and
    ``optimizer_state`` then are not. ``sends_masters``: the device reads new values from the masters in host memory.
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
        guard: Guard | None = None,
        tier: Tier | None = None,
        state_leaves: bool = False,
    ) -> None:
        """``tier``: what is kept off the device, where anything is. ``state_leaves``: this block's float32 state is."""
        self.layout, self.sharding = layout, sharding
        self.shard = layout.shard(rank)
        self.owned = self.shard if sharding.state else (0, layout.numel)
        self.trainable = trainable
        self.flat = torch.zeros(layout.numel, dtype=dtype, device=device)
        owned = self.flat[slice(*self.owned)]
        # The owned values in the parameters' dtype: where parameters are cut, all that stays of them.
        self.values = owned.clone() if sharding.parameters else owned
        self._in_file: FileValues | None = None
        self.values_leave = tier is not None and tier.settings.parameters != "none" and sharding.parameters
        if tier is not None and self.values_leave:
            self._in_file = tier.file_values(owned.numel(), dtype)
            numel = 0 if self._in_file is not None else owned.numel()
            self.values = tier.memory.empty(numel, dtype, pin=tier.settings.pin_parameters)
        self._tier, self._memory = tier, tier.memory if tier is not None and state_leaves else None
        self.host_grad = HostGradient(tier, owned.numel(), grad_dtype) if tier is not None and state_leaves else None
        self.sends_masters = tier is not None and state_leaves and tier.settings.sends_masters(self.values_leave)
        self._update: Future[Arrival] | None = None
        self._arrival: Arrival = ARRIVED  # of the last update's values
        self._behind = False  # the values may not be what the masters are rounded to
        # In float32 the parameter is its own master, where both are kept in the same place.
        apart = dtype != torch.float32 or state_leaves != self.values_leave or self._in_file is not None
        keeps_master = trainable and apart
        self.store: Store | None = None
        if self.host_grad is not None and tier is not None and not tier.settings.plain:
            values = self.values if self.values_leave and self._in_file is None else None
            self.store = Store(tier, layout.name, owned.numel(), values)
            self.master = torch.empty(0)
        else:
            self.master = self.new_state(pin=self.sends_masters) if keeps_master else self.values
        self.optimizer_state: dict[str, torch.Tensor] = {}
        self.parameters = [parameters[entry.name] for entry in layout.entries]
        self.gradient = GradientBuffer(
            layout, self.parameters, sharding.gradients, self.shard, self.owned, grad_dtype, device, self.host_grad
        )
        self.views = views_of(self.layout, self.flat)
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.data = view
        self._guard: type[nn.Parameter] | None = None
        self._placeholders: list[torch.Tensor] = []
        if guard is not None:
            self._guard = guard.cut if sharding.parameters else guard.late
            if sharding.parameters:
                self._placeholders = [placeholder(view) for view in self.views]
        self._versions: list[int] = []
        self._gather: Work | None = None
        self.holders, self.lent = 0, False
        self.state = State.SHARDED
        if sharding.parameters:
            self._drop_storage()

    def new_state(self, pin: bool = False) -> torch.Tensor:
        """float32 zeros for the owned range, where its state is kept; in host memory pinned if asked for."""
        numel = self.owned[1] - self.owned[0]
        if self._memory is not None:
            return self._memory.empty(numel, torch.float32, pin)
        return torch.zeros(numel, dtype=torch.float32, device=self.flat.device)

    def _drop_storage(self) -> None:
        self.flat.untyped_storage().resize_(0)
        self._install(self._placeholders)
        set_class(self.parameters, nn.Parameter, self._guard)

    def _install(self, values: Sequence[torch.Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=False):  # none where nothing is guarded
            parameter.data = value

    def install(self) -> None:
        """Where the user has put other tensors in place of the gathered parameters, these again."""
        self._install(self.views)

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
        if not self.sharding.parameters:
            set_class(self.parameters, nn.Parameter, self._guard)

    def index_of(self, parameter: nn.Parameter) -> int:
        """Its place among the block's parameters."""
        return next(i for i, own in enumerate(self.parameters) if own is parameter)

    def use(self) -> None:
        """Order what follows after the all-gather; a use of parameters nobody asked for is our bug."""
        if self.state is State.GATHERED:
            return
        assert self.state is State.GATHERING, (self.layout.name, self.state)
        if self._gather is not None:
            self._gather.wait()
            self._gather = None
        self.state = State.GATHERED
        set_class(self.parameters, self._guard, nn.Parameter)
        if self._placeholders:
            self._install(self.views)
            self.note_versions()

    def note_versions(self) -> None:
        """The gathered values are what they should be."""
        self._versions = [parameter._version for parameter in self.parameters]

    def changed(self) -> str | None:
        """The name of a parameter that a forward has changed in place since, in the copy that is about to go."""
        if self._placeholders and self.state is State.GATHERED:
            for entry, parameter, version in zip(self.layout.entries, self.parameters, self._versions, strict=True):
                if parameter._version != version:
                    return entry.name
        return None

    def release(self) -> None:
        """Give the gathered parameters' memory back; see [Note: parameters that come and go]."""
        assert self.sharding.parameters, self.layout.name
        if self.state is State.SHARDED:
            return
        if self.holders:
            raise MegazeroError(
                f"the parameters of {self.layout.name} were to change inside `with GatheredParameters(...):`; call "
                "engine.step and engine.load_checkpoint after it"
            )
        self.use()
        self._drop_storage()
        self.state = State.SHARDED

    def move_out(self) -> None:
        """As ``release``, but tensors that the user made of the parameters (``.data``, slices) stay what they are: they
        keep the old storage for themselves."""
        assert self._placeholders or not self.parameters
        self.use()
        self._install(self._placeholders)
        set_class(self.parameters, nn.Parameter, self._guard)
        numel, dtype, device = self.flat.numel(), self.flat.dtype, self.flat.device
        del self.views, self.flat
        with torch.inference_mode(False):  # what is made here is used in training as well
            self.flat = torch.empty(numel, dtype=dtype, device=device)
            self.views = views_of(self.layout, self.flat)
        self.flat.untyped_storage().resize_(0)
        self.state = State.SHARDED

    @torch.no_grad()
    def adopt(self) -> None:
        """The gathered values were changed, alike on every rank: they are the model's from here on. A master that a
        value is still the rounded form of stays."""
        changed = self.flat[slice(*self.owned)]
        if self.master is not self.values:
            master = self.owned_state("weight")
            there = changed.to(master.device)
            master = torch.where(master.to(there.dtype) == there, master, there.float())
            self.write_state("weight", 0, master)
        self.set_values(0, changed)
        if self._placeholders:
            self.note_versions()

    def updated(self, copied: bool = False) -> None:
        """The owned float32 values changed: write them in the parameters' dtype (unless that is ``copied`` already);
        other slices are now stale."""
        self.before_update()
        if self.master is not self.values and not copied:
            self.set_values(0, self.master)
        self._behind = False
        self.gradient.drop()
        self.state = State.SHARDED

    def changing(self) -> None:
        """An optimizer is about to change the masters on the device. ``updated`` follows, unless a signal comes
        between: then ``settle`` has the values follow."""
        self._behind = self.sharding.parameters and self.master is not self.values

    def before_update(self) -> None:
        """The owned values are about to change: nothing may be under way with them."""
        if self.sharding.parameters:
            self.release()
        else:
            self.use()

    def updating(self, update: Future[Arrival]) -> None:
        """Follows ``before_update``: the host is changing the owned values, and sends them on its way here."""
        self._update = update
        self.gradient.drop()
        self.state = State.SHARDED

    @property
    def is_updating(self) -> bool:
        return self._update is not None

    @property
    def waits_for_host(self) -> bool:
        """Whether ``settle`` would wait."""
        return self._update is not None and not self._update.done()

    def settle(self) -> None:
        """Where the host is changing the owned values: wait for that, and order what follows after their arrival.
        Raises what an update, of this block or another, has ended in: values are of two steps then."""
        if self._update is not None:
            assert self._tier is not None
            try:
                with self._tier.meter.timed("wait"):
                    self._arrival = self._update.result()
            finally:
                if self._update.done():  # else a signal has come between: it is still to be waited for
                    self._update = None
            self._arrival.wait()
        if self._tier is not None and self._tier.error is not None:
            raise self._tier.error
        if self._behind:
            self.set_values(0, self.master)
            self._behind = False

    def owned_state(self, kind: str) -> torch.Tensor:
        """The owned range of the weights (``weight``, in float32), or of what the optimizer keeps under that name."""
        self.settle()
        if self.store is not None:
            return self.store.read(kind, 0, self.owned[1] - self.owned[0])
        if kind == "weight" and self._is_in_file:
            return self.held_values().float()
        return self.master if kind == "weight" else self.optimizer_state[kind]

    def write_state(self, kind: str, start: int, values: torch.Tensor) -> None:
        """Replace a part of that, from element ``start`` of the owned range."""
        self.settle()
        if self.store is not None:
            self.store.write(kind, start, values)
        elif kind == "weight" and self._is_in_file:
            self.set_values(start, values)
        else:
            self._arrival.wait_on_host()  # the device may still be reading the masters
            self.owned_state(kind)[start : start + values.numel()].copy_(values.reshape(-1))

    @property
    def _is_in_file(self) -> bool:
        """Whether the float32 weights are the values alone, and these are in a file."""
        return self._in_file is not None and self.master is self.values

    def set_values(self, start: int, values: torch.Tensor) -> None:
        """Replace a part of the owned values, from element ``start`` on, rounded to their dtype."""
        if self._in_file is not None:
            assert self._tier is not None
            try:
                self._in_file.write(start, values)
            except OffloadError as error:
                self._tier.fail(error)
                raise
        else:
            self.values[start : start + values.numel()].copy_(values.reshape(-1))

    def held_values(self) -> torch.Tensor:
        """The owned values, wherever they are: a copy where that is a file."""
        return self.values if self._in_file is None else self._in_file.read(0, self.owned[1] - self.owned[0])

    def send_values(self, target: torch.Tensor) -> Arrival:
        """The owned values, which are off the device, to a tensor on it."""
        assert self._tier is not None and self.values_leave, self.layout.name
        return self._tier.link.back(target, self.values) if self._in_file is None else self._in_file.bring(target)

    def load(self, kind: str, read: Reader, only: str | None = None) -> None:
        """Fill one state of the owned range with global tensors' values, all of them or one; after ``weight`` the block
        wants gathering."""
        for at, piece, box in self.layout.boxes(*self.owned):
            if only not in (None, piece.name):
                continue
            self.write_state(kind, at - self.owned[0], read(piece.name, piece.global_shape, box))
        if kind == "weight":
            if self.sharding.parameters:
                self.release()
            # What a store has rounded to values may not be rounded anew, another way: its further bits are of those.
            if self.master is not self.values and not (self.store is not None and self.store.has_values):
                self.set_values(0, self.owned_state("weight"))
            self.state = State.SHARDED

    def chunks(
        self, kind: str, start: int | None = None, end: int | None = None
    ) -> Iterator[tuple[Piece, Rectangle, torch.Tensor | Callable[[], torch.Tensor]]]:
        """One state of this rank's slice, or of [start, end), as boxes of global tensors, in buffer order: views of it,
        or what reads them where it is kept in another form: a run of rows at a time, as a checkpoint takes them."""
        self.settle()
        base = self.owned[0]
        state = self.owned_state(kind) if self.store is None else None
        low, high = self.shard if start is None or end is None else (start, end)
        for at, piece, box in self.layout.boxes(low, high):
            first = at - base
            if state is not None:
                yield piece, box, state[first : first + box.numel].view(box.shape)
                continue
            for run in row_runs(box):
                yield piece, run, partial(_read, self.store, kind, first, first + run.numel, run.shape)
                first += run.numel


def _read(store: Store, kind: str, start: int, end: int, shape: Sequence[int]) -> torch.Tensor:
    return store.read(kind, start, end).view(shape)
