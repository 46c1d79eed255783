"""Whole parameters for a while: `with GatheredParameters(...)`, and modules that use those of others."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Protocol

import torch
from torch import nn

from megazero.comm import Communicator
from megazero.errors import MegazeroError
from megazero.zero.fingerprint import fingerprints
from megazero.zero.homes import EXTERNAL, InEngine, home_of
from megazero.zero.hooks import use_in
from megazero.zero.sharded import ShardedModel
from megazero.zero.slices import Pending, Slice

Named = dict[str, nn.Parameter]


class GatheredParameters:
    """``with GatheredParameters(params):`` on every rank: whole values inside, memory given back after.

    Args:
        params: a parameter or several, from anything that can be iterated over; doubles count once, and
            None (the bias of a module without) not at all. Those that are not
            cut over ranks, at stages 0 to 2 or outside an engine, are whole anyway.
        modifier_rank: the one data-parallel rank whose changes, in place, become everybody's, at every stage, in the
            float32 masters as well. Without it a change to what stage 3 keeps is an error on every rank.
        fwd_module: a module that uses the parameters in its forward: see ``register_external_parameter``.
        enabled: false: do nothing.

    What is gathered is the blocks that hold the parameters, as wide as those are. Inside a forward with gradients they
    stay until its backward has ended. Before there is an engine, whole values are on the parameter's device, which is
    where the model was built or moved to.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._parameters: list[nn.Parameter] = []
        if enabled:
            self._parameters = _checked(params)
        self._modifier = modifier_rank
        self._open: list[_Loan] = []
        for parameter in self._parameters if fwd_module is not None else ():
            register_external_parameter(fwd_module, parameter)

    def __enter__(self) -> None:
        of_model: dict[ShardedModel, list[nn.Parameter]] = {}
        sliced: list[nn.Parameter] = []
        for parameter in self._parameters:
            home = home_of(parameter)
            if isinstance(home, Pending):
                home = home.builder.cut(parameter)
            if isinstance(home, InEngine):
                of_model.setdefault(home.sharded, []).append(parameter)
            elif isinstance(home, Slice):
                sliced.append(parameter)
        sliced.sort(key=lambda parameter: home_of(parameter).serial)  # a set has another order on every rank
        loans: list[_Loan] = [_BlockLoan(model, own, self._modifier) for model, own in of_model.items()]
        for loan in (*loans, *([_SliceLoan(sliced, self._modifier)] if sliced else [])):
            _check_modifier(self._modifier, loan.group)
            loan.start()
            loan.before = fingerprints([p.detach() for p in loan.watched.values()])
            self._open.append(loan)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            while self._open:
                loan = self._open.pop()
                try:
                    # After an error here, other ranks may never come to a collective.
                    if kind is None:
                        self._settle(loan)
                finally:
                    loan.end()
        finally:
            for loan in self._open:
                loan.end()
            self._open.clear()

    @torch.no_grad()
    def _settle(self, loan: _Loan) -> None:
        changed = fingerprints([p.detach() for p in loan.watched.values()]) != loan.before
        if changed.numel() and loan.group.size > 1:
            counts = changed.int().to(loan.device)
            loan.group.all_reduce([counts]).wait()
            changed = counts > 0
        names = [name for name, is_changed in zip(loan.watched, changed.tolist(), strict=True) if is_changed]
        if names and self._modifier is None:
            raise MegazeroError(
                f"{', '.join(names[:5])}: changed inside `with GatheredParameters(...):`, which reads only. Pass "
                "modifier_rank=RANK, the rank whose changes everybody is to take"
            )
        if names:
            raise MegazeroError(
                f"{', '.join(names[:5])}: changed inside `with GatheredParameters(..., modifier_rank="
                f"{self._modifier}):` without being among its parameters; add them there"
            )
        if self._modifier is not None:
            loan.adopt(self._modifier)


def _checked(given: nn.Parameter | Iterable[nn.Parameter | None]) -> list[nn.Parameter]:
    """Each once. MegazeroError for what holds no parameters."""
    if isinstance(given, torch.Tensor) or not isinstance(given, Iterable) or isinstance(given, str | nn.Module):
        given = [given]
    found = list(dict.fromkeys(given))
    for value in found:
        if value is not None and not isinstance(value, torch.Tensor):
            remedy = ": give its parameters()" if isinstance(value, nn.Module) else ""
            remedy = ": give parameters(), without names" if isinstance(value, tuple) else remedy
            raise MegazeroError(f"GatheredParameters: takes parameters, not a {type(value).__name__}{remedy}")
    return [value for value in found if value is not None]


def _check_modifier(rank: int | None, group: Communicator) -> None:
    if rank is not None and not 0 <= rank < group.size:
        raise MegazeroError(f"GatheredParameters: modifier_rank is {rank}, but there are ranks 0 to {group.size - 1}")


class _Loan(Protocol):
    """Parameters of one kind of home while they are whole. ``watched``: those that must not change, by name."""

    group: Communicator
    device: torch.device
    watched: Named
    before: torch.Tensor

    def start(self) -> None: ...

    def adopt(self, modifier: int) -> None: ...

    def end(self) -> None: ...


class _BlockLoan:
    def __init__(self, sharded: ShardedModel, parameters: list[nn.Parameter], modifier: int | None) -> None:
        self._sharded, self._parameters, self._modifies = sharded, parameters, modifier is not None
        self.group, self.device = sharded.groups.whole, sharded.device
        self._indices = sorted({home_of(parameter).index for parameter in parameters})
        self.watched: Named = {}

    def start(self) -> None:
        names = [home_of(parameter).name_of(parameter) for parameter in self._parameters]
        self._sharded.hold(self._indices, f"GatheredParameters({', '.join(names[:5])})")
        if not self._sharded.sharding.parameters:
            return
        changes = set(self._parameters) if self._modifies else set()
        for block in (self._sharded.blocks[i] for i in self._indices):
            for entry, parameter in zip(block.layout.entries, block.parameters, strict=True):
                if parameter not in changes:
                    self.watched[entry.name] = parameter

    def adopt(self, modifier: int) -> None:
        own = set(self._parameters)
        for block in (self._sharded.blocks[i] for i in self._indices):
            for parameter, view in zip(block.parameters, block.views, strict=True):
                if parameter in own:
                    view.copy_(parameter.data)  # it may be another tensor by now: `parameter.data = ...`
                    if self.group.size > 1 and view.numel():
                        self.group.broadcast(view, modifier)
            block.adopt()

    def end(self) -> None:
        for block in (self._sharded.blocks[i] for i in self._indices):
            block.install()
        self._sharded.let_go(self._indices)


class _SliceLoan:
    def __init__(self, parameters: list[nn.Parameter], modifier: int | None) -> None:
        self._parameters = parameters
        self._slices: list[Slice] = [home_of(parameter) for parameter in parameters]
        self.group, self.device = self._slices[0].group, self._slices[0].device
        self.watched: Named = {}
        if modifier is None:  # names are the module's, which is not known here
            self.watched = {f"parameter {i}, of shape {tuple(p.shape)}": p for i, p in enumerate(parameters)}

    def start(self) -> None:
        for place, parameter in zip(self._slices, self._parameters, strict=True):
            place.hold(parameter)

    def adopt(self, modifier: int) -> None:
        for place, parameter in zip(self._slices, self._parameters, strict=True):
            place.adopt(parameter, modifier)

    def end(self) -> None:
        for place, parameter in zip(self._slices, self._parameters, strict=True):
            place.let_go(parameter)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """``module``'s forward uses ``parameter``, which is another module's: it is whole there, and in its backward.

    Call it on every rank, before or after `megazero.initialize`.
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        kinds = f"{type(module).__name__} and {type(parameter).__name__}"
        raise MegazeroError(f"register_external_parameter: takes a torch.nn.Module and a parameter, not {kinds}")
    known = module.__dict__.setdefault(EXTERNAL, [])
    if not any(other is parameter for other in known):
        known.append(parameter)
    home = home_of(parameter)
    if isinstance(home, InEngine):
        use_in(home.sharded, home.sharded.unit_of(home.index), module)
