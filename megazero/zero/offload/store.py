"""One block's float32 state in another form than float32 tensors: in fewer bits, in files, or both."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from megazero.zero.offload import formats
from megazero.zero.offload.media import Fields, InMemory, Medium, OnDisk
from megazero.zero.offload.settings import Offload

if TYPE_CHECKING:
    from megazero.zero.offload.tier import Tier

MOMENTS = ("exp_avg", "exp_avg_sq")


class Working(NamedTuple):
    """float32 state of a piece, to be changed in place."""

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


def stored_fields(settings: Offload, values_leave: bool) -> Fields:
    """Name and dtype of what is stored besides the values; ``values_leave``: these are in host memory."""
    fields: dict[str, torch.dtype] = {}
    masters = masters_of(settings, values_leave)
    if masters == "fp32":
        fields["weight"] = torch.float32
    elif masters == "split":
        fields["lower"] = torch.int16
    elif not values_leave:
        fields["upper"] = torch.bfloat16
    dtype = torch.bfloat16 if settings.moments == "bf16" else torch.float32
    return {**fields, **dict.fromkeys(MOMENTS, dtype)}


def masters_of(settings: Offload, values_leave: bool) -> str:
    """Where values stay on the device, the bits that they lack are no use without them."""
    return "fp32" if settings.masters == "split" and not values_leave else settings.masters


class Store:
    """``values``: the owned values in the parameters' dtype, where they are in host memory; else None."""

    def __init__(self, tier: Tier, name: str, numel: int, values: torch.Tensor | None) -> None:
        self._tier, self._name, self._numel, self._values = tier, name, numel, values
        self.piece = tier.settings.buffer_size
        self._masters = masters_of(tier.settings, values is not None)
        self._fields = stored_fields(tier.settings, values is not None)
        self._medium: Medium
        if tier.disk is not None:
            self._medium = OnDisk(tier.disk, self._fields, numel, self.piece)
        else:
            self._medium = InMemory(tier.memory, self._fields, numel)
        self._views: dict[str, torch.Tensor] = {}
        self._start = self._end = 0

    @property
    def itemsize(self) -> int:
        """Bytes stored of an element."""
        return sum(dtype.itemsize for dtype in self._fields.values())

    @property
    def is_in_file(self) -> bool:
        """Whether pieces are fetched into buffers that others take after them."""
        return self._tier.disk is not None

    @property
    def has_values(self) -> bool:
        """Whether the values are a part of the masters: what is written here is written there."""
        return self._values is not None and self._masters != "fp32"

    def ahead(self) -> None:
        """An update of all of it has been asked for."""
        self._medium.ahead()

    def open(self, start: int, end: int) -> None:
        """Fetch the next piece of an update."""
        self._start, self._end = start, end
        self._views = self._medium.fetch(start, end)

    def working(self, start: int, end: int) -> Working:
        """float32 state of a part of that."""
        views = self._part(start, end)
        moments = [
            views[name] if views[name].dtype == torch.float32 else self._scratch(name, end - start).copy_(views[name])
            for name in MOMENTS
        ]
        return Working(self._master(views, start, end), *moments)

    def _part(self, start: int, end: int) -> dict[str, torch.Tensor]:
        return {name: view[start - self._start : end - self._start] for name, view in self._views.items()}

    def _master(self, views: dict[str, torch.Tensor], start: int, end: int) -> torch.Tensor:
        if self._masters == "fp32":
            return views["weight"]
        master = self._scratch("master", end - start)
        if self._masters == "bf16":
            return master.copy_(self._upper(views, start, end))
        formats.join(self._upper(views, start, end), views["lower"], master)
        return master

    def _upper(self, views: dict[str, torch.Tensor], start: int, end: int) -> torch.Tensor:
        return views["upper"] if self._values is None else self._values[start:end]

    def _scratch(self, name: str, numel: int) -> torch.Tensor:
        return self._tier.scratch(name, numel)

    def keep(self, working: Working, start: int, end: int, step: float) -> None:
        """What ``working`` gave has been updated. ``step``: for rounding at random."""
        views = self._part(start, end)
        for name, values in zip(MOMENTS, working[1:], strict=True):
            if views[name].dtype != torch.float32:
                formats.round_at_random(values, self._noise(name, start, end, step), views[name])
        if self._masters == "bf16":
            noise = self._noise("weight", start, end, step)
            formats.round_at_random(working.master, noise, self._upper(views, start, end))
        elif self._masters == "split":
            formats.split(working.master, self._upper(views, start, end), views["lower"])

    def new_values(self) -> torch.Tensor | None:
        """What the block's values are to be where the piece is, None where they are that already."""
        if self._masters == "fp32":
            return self._views["weight"]
        return self._views["upper"] if self._values is None else None

    def _noise(self, kind: str, start: int, end: int, step: float) -> torch.Tensor:
        whole = self._tier.noise.of(self._end - self._start, self._name, kind, self._start, step)
        return whole[start - self._start : end - self._start]

    def done(self, start: int, changed: bool) -> None:
        """The piece is done with."""
        self._views = {}
        self._medium.put(start, changed)

    def skip(self) -> None:
        """An update that was asked for changes nothing."""
        for start in range(0, self._numel, self.piece) if self.is_in_file else ():
            self._medium.fetch(start, min(start + self.piece, self._numel))
            self._medium.put(start, changed=False)

    def read(self, kind: str, start: int, end: int) -> torch.Tensor:
        """float32 values of any part, between updates."""
        if kind != "weight" or self._masters == "fp32":
            return self._medium.read(kind, start, end).float()
        upper = self._medium.read("upper", start, end) if self._values is None else self._values[start:end]
        if self._masters == "bf16":
            return upper.float()
        whole = torch.empty(end - start, dtype=torch.float32)
        formats.join(upper, self._medium.read("lower", start, end), whole)
        return whole

    def write(self, kind: str, start: int, values: torch.Tensor) -> None:
        """Replace any part; rounded to the nearest."""
        values = values.detach().to("cpu", torch.float32).reshape(-1)
        if kind != "weight" or self._masters == "fp32":
            self._medium.write(kind, start, values.to(self._fields[kind]))
            return
        upper = torch.empty(values.numel(), dtype=torch.bfloat16)
        lower = torch.empty(values.numel(), dtype=torch.int16)
        formats.split(values.clone(), upper, lower)
        if self._masters == "split":
            self._medium.write("lower", start, lower)
        if self._values is None:
            self._medium.write("upper", start, upper)
        else:
            self._values[start : start + values.numel()].copy_(upper)
