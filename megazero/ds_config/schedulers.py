"""Which schedule a ds_config's scheduler section names, with which arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from megazero.ds_config.kinds import BOOLEAN, RATES, Kind, choice, integer, number, read_argument
from megazero.ds_config.schedules import (
    LRRangeTest,
    OneCycle,
    Schedule,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from megazero.ds_config.tree import SchedulerChoice
from megazero.errors import ConfigError, near


def make_scheduler(choice: SchedulerChoice, optimizer: Any) -> Any:
    """The scheduler chosen, which sets the optimizer's rates for its first step at once.

    Raises ConfigError where the parameters do not fit the optimizer's groups.
    """
    own = SCHEDULES.get(choice.type)
    if own is not None:
        return own(optimizer, **choice.params)
    try:
        return getattr(torch.optim.lr_scheduler, choice.type)(optimizer, **choice.params)
    except (TypeError, ValueError) as error:
        raise ConfigError.single("scheduler.params", f"{choice.type} does not take them: {error}") from None


class Parameter(NamedTuple):
    """Of a schedule. ``here``: what it means."""

    name: str
    kind: Kind
    default: Any
    here: str


REQUIRED = object()
"""In place of a default."""

_LOW = Parameter("warmup_min_lr", RATES, 0.0, "rate at the first step")
_HIGH = Parameter("warmup_max_lr", RATES, None, "rate after warm-up; absent: the optimizer's (WarmupDecayLR too)")
_WARMUP = Parameter("warmup_num_steps", integer(0), 1000, "steps of warm-up; 0: none; 1 counts as 2")
_SHAPE = Parameter("warmup_type", choice("log", "linear"), "log", "how it climbs")
_TOTAL = Parameter("total_num_steps", integer(1), REQUIRED, "steps of the whole run")

SCHEDULES: dict[str, type[Schedule]] = {
    schedule.__name__: schedule for schedule in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
PARAMETERS: dict[str, tuple[Parameter, ...]] = {
    "WarmupLR": (_LOW, _HIGH, _WARMUP, _SHAPE),
    "WarmupDecayLR": (_TOTAL, _LOW, _HIGH, _WARMUP, _SHAPE),
    "WarmupCosineLR": (
        _TOTAL,
        Parameter("warmup_min_ratio", number(0), 0.0, "of the optimizer's rate, at the first step"),
        _WARMUP,
        Parameter("cos_min_ratio", number(0), 0.0001, "of the optimizer's rate, at the end"),
        _SHAPE,
    ),
    "OneCycle": (
        Parameter("cycle_min_lr", RATES, REQUIRED, "lowest rate"),
        Parameter("cycle_max_lr", RATES, REQUIRED, "highest rate"),
        Parameter(
            "decay_lr_rate", number(0), 0.0, "after the cycle: the rate is divided by 1 + this per decay_step_size"
        ),
        Parameter("cycle_first_step_size", number(above=0), 2000, "steps of the rise"),
        Parameter("cycle_second_step_size", number(0), None, "steps of the fall; absent: as the rise"),
        Parameter("cycle_first_stair_count", integer(0), 0, "stairs of the rise; 0: even"),
        Parameter("cycle_second_stair_count", integer(0), None, "stairs of the fall; absent: as the rise"),
        Parameter("decay_step_size", number(0), 0, "steps; 0: no decay"),
        Parameter(
            "cycle_momentum",
            BOOLEAN,
            None,
            "cycle the first of betas too, the second becomes 0.99; absent: where there are any",
        ),
        Parameter("cycle_min_mom", RATES, 0.8, "lowest momentum"),
        Parameter("cycle_max_mom", RATES, 0.9, "highest momentum"),
        Parameter(
            "decay_mom_rate", number(0), 0.0, "after the cycle: momentum is multiplied by 1 + this per decay_step_size"
        ),
    ),
    "LRRangeTest": (
        Parameter("lr_range_test_min_lr", RATES, None, "first rate; absent: the optimizer's"),
        Parameter("lr_range_test_step_size", integer(1), 2000, "steps per growth"),
        Parameter("lr_range_test_step_rate", number(0), 1.0, "growth, in first rates"),
        Parameter("lr_range_test_staircase", BOOLEAN, False, "grow in stairs"),
    ),
}

# Of torch.optim.lr_scheduler, what JSON cannot describe: functions, other schedulers, a measured loss.
_NOT_FROM_JSON = ("LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau", "SWALR")


def defaults(name: str) -> dict[str, Any]:
    """What each argument of a schedule is where it is not given; nothing for a name that is not known."""
    if name in PARAMETERS:
        return {key.name: None if key.default is REQUIRED else key.default for key in PARAMETERS[name]}
    if name not in _torch_schedulers():
        return {}
    parameters = list(inspect.signature(getattr(torch.optim.lr_scheduler, name)).parameters.values())[1:]
    return {part.name: None if part.default is part.empty else part.default for part in parameters}


def choose(name: str, params: Mapping[str, Any]) -> tuple[SchedulerChoice | None, list[tuple[str, str]]]:
    """What a ds_config's scheduler section means, and (field, what is wrong): the choice is None where anything is.

    ``params``: plain values, none of them "auto".
    """
    if name in PARAMETERS:
        return _choose_own(name, params)
    kind = getattr(torch.optim.lr_scheduler, name, None)
    known = [*PARAMETERS, *(each for each in _torch_schedulers() if each not in _NOT_FROM_JSON)]
    if name not in known:
        close = near(name.lower(), [each.lower() for each in known], n=1)
        meant = next((each for each in known if close and each.lower() == close[0]), None)
        hint = f"did you mean {meant}?" if meant else f"there are {', '.join(known)}"
        what = "cannot be described in JSON" if kind is not None else "is no schedule of DeepSpeed or torch"
        return None, [("scheduler.type", f"{name!r} {what}; {hint}")]
    return _choose_torchs(name, kind, params)


def _choose_torchs(
    name: str, kind: Callable[..., Any], params: Mapping[str, Any]
) -> tuple[SchedulerChoice | None, list[tuple[str, str]]]:
    known, arguments, found = dict(list(inspect.signature(kind).parameters.items())[1:]), {}, []
    for argument, value in params.items():
        if argument not in known:
            found.append(_unknown(name, argument, list(known)))
            continue
        try:
            arguments[argument] = read_argument(value, known[argument].default, several=True)
        except ValueError as error:
            found.append((f"scheduler.params.{argument}", str(error)))
    if found:
        return None, found
    message = f'{name} needs it, and it is missing or an "auto" that nobody resolves'
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in arguments:
            found.append((f"scheduler.params.{key}", message))
    if found:
        return None, found
    try:
        kind(torch.optim.SGD([torch.zeros(1)], lr=1.0, momentum=0.9), **arguments)
    except Exception as error:  # whatever a class does with what it does not expect
        return None, [("scheduler.params", f"{name} does not take them: {error}")]
    return SchedulerChoice(name, arguments), []


def _unknown(name: str, argument: str, known: list[str]) -> tuple[str, str]:
    close = near(argument, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
    return f"scheduler.params.{argument}", f"{name} has no such argument; {hint}"


def _torch_schedulers() -> list[str]:
    module = torch.optim.lr_scheduler
    found = [(name, kind) for name, kind in vars(module).items() if isinstance(kind, type)]
    return [name for name, kind in found if issubclass(kind, module.LRScheduler) and not name.startswith(("_", "LRS"))]


def _choose_own(name: str, params: Mapping[str, Any]) -> tuple[SchedulerChoice | None, list[tuple[str, str]]]:
    known, arguments, found = {key.name: key for key in PARAMETERS[name]}, {}, []
    for argument, value in params.items():
        if argument not in known:
            found.append(_unknown(name, argument, list(known)))
            continue
        try:
            arguments[argument] = known[argument].kind.read(value)
        except ValueError as error:
            found.append((f"scheduler.params.{argument}", str(error)))
    for key in known.values():
        if key.default is REQUIRED and key.name not in params:
            message = f'{name} needs it, and it is missing or an "auto" that nobody resolves; {key.here}'
            found.append((f"scheduler.params.{key.name}", message))
    return (None if found else SchedulerChoice(name, arguments)), found
