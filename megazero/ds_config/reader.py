"""A ds_config, from a file or a dict, as DeepSpeed reads it; every problem in one error."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from megazero.ds_config import batch, optimizers, schedulers
from megazero.ds_config.table import ALIASES, KEYS, SECTIONS, Fate, Key
from megazero.ds_config.tree import (
    Checkpoint,
    CommsLogger,
    DsConfig,
    FileMonitor,
    OffloadOptimizer,
    OffloadParam,
    OptimizerChoice,
    Pipeline,
    Precision,
    SchedulerChoice,
    WandbMonitor,
    Zero,
)
from megazero.errors import ConfigError, near
from megazero.small_files import read_small, without_duplicates

AUTO = "auto"
_MOMENTS, _MASTERS = "bf16.bf16_optimizer_states", "bf16.bf16_master_weights_and_grads"
_STATE, _PARAM = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"


def read_ds_config(
    source: str | Path | Mapping[str, Any], world_size: int, trainer_values: Mapping[str, Any] | None = None
) -> DsConfig:
    """The settings in a JSON file, or in a mapping of the same form, which stays as it is.

    ``world_size``: processes that see different samples (data-parallel ones). ``trainer_values``: what "auto" stands
    for, by path, as in ``{"optimizer.params.lr": 1e-4}``; one that it does not hold gets the default. Raises
    ConfigError with every problem there is.
    """
    reading = _Reading(dict(trainer_values or {}))
    reading.walk("", load_ds_config(source))
    return _build(reading, world_size)


def load_ds_config(source: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """The settings as they are written, a copy. Raises ConfigError where the file cannot be read as such."""
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    if not isinstance(source, str | Path):
        raise ConfigError.single("ds_config", f"is a {type(source).__name__}; give a dict or the path of a JSON file")
    where = str(source)
    try:
        value = json.loads(read_small(source), object_pairs_hook=without_duplicates)
    except OSError as error:
        raise ConfigError.single(where, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError.single(where, "is not a text file") from None
    except RecursionError:
        raise ConfigError.single(where, "is nested too deeply") from None
    except json.JSONDecodeError as error:
        message = f"line {error.lineno}, column {error.colno}: {error.msg}; it must be JSON, without comments"
        raise ConfigError.single(where, message) from None
    except ValueError as error:  # a name given twice, a number of thousands of digits, a path with a zero byte
        raise ConfigError.single(where, f"cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError.single(where, f"holds a {type(value).__name__}, not an object of settings")
    return value


@dataclass
class _Reading:
    """What has been read so far, by path. ``values``: of used keys that were given. ``autos``: each "auto" that is left
    to the default, with that default where it is not the table's.
    """

    trainer_values: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    not_needed: list[str] = field(default_factory=list)
    autos: dict[str, Any] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)

    def get(self, path: str) -> Any:
        """As given, else its default."""
        if path in self.values:
            return self.values[path]
        key = KEYS[path]
        return None if key.default is None else key.kind.read(key.default)

    def walk(self, section: str, settings: Mapping[str, Any]) -> None:
        for name, value in settings.items():
            path = f"{section}.{name}" if section else str(name)
            path = ALIASES.get(path, path)
            if path == "zero_optimization" and isinstance(value, bool):
                value = {"stage": int(value)}  # an old way to ask for stage 1
            if path not in KEYS and path not in SECTIONS:
                self.problems.append((path, _unknown(path)))
                continue
            value = self._resolved(path, value)
            if value is None:
                continue
            if path in KEYS:
                self._take(KEYS[path], value)
            elif isinstance(value, Mapping):
                self.walk(path, value)
            else:
                self.problems.append((path, f"{value!r} must be an object of settings"))

    def _resolved(self, path: str, value: Any) -> Any:
        """The value of an "auto", None where it is left to the default."""
        if not isinstance(value, str) or value.lower() != AUTO:
            return value
        value = self.trainer_values.get(path)
        if value is None and path in KEYS and KEYS[path].fate is Fate.USED:
            self.autos[path] = self.get(path)
        return value

    def arguments(self, path: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of an optimizer or scheduler at ``path``, each "auto" resolved or left out.

        ``defaults``: of every argument there is, None where it has none.
        """
        given = self.get(path) or {}
        if not isinstance(given, Mapping):
            self.problems.append((path, f"{given!r} must be an object of arguments"))
            return {}
        result = {}
        for name, value in ((str(name), value) for name, value in given.items()):
            resolved = self._resolved(f"{path}.{name}", value)
            if resolved is not None or name not in defaults:
                result[name] = resolved
            elif value is not None:
                self.autos[f"{path}.{name}"] = defaults[name]
        return result

    def _take(self, key: Key, value: Any) -> None:
        path = key.path
        if path in self.given:
            self.problems.append((path, "is given twice, once by another name; leave out one"))
            return
        self.given.add(path)
        if key.fate is Fate.LACKING and key.kind.name == "any":
            if _asks(value, key.switch):
                self.problems.append((path, f"megazero does not have {key.here}; leave it out"))
            return
        try:
            value = key.kind.read(value)
        except ValueError as error:
            self.problems.append((path, str(error)))
            return
        if key.fate is Fate.NOT_NEEDED:
            self.not_needed.append(path)
        elif key.fate is Fate.USED:
            self.values[path] = value
        elif value != key.default:
            told = f"{_written(value)} asks for what megazero does not have: {key.here}"
            self.problems.append((path, f"{told}; leave it out, or set it to {_written(key.default)}"))


def _asks(section: Any, switch: str | None) -> bool:
    """Whether a section turns on what it stands for."""
    if isinstance(section, Mapping):
        if switch is None:
            return bool(section)
        section = section.get(switch)
    if isinstance(section, str):
        return section.lower() not in (AUTO, "false", "")
    # A size of 1 is as good as none.
    return bool(section) and not (switch == "autotp_size" and section == 1)


def _unknown(path: str) -> str:
    """That there is no such key, and which is meant: the same name elsewhere, else the nearest beside it."""
    section, _, name = path.rpartition(".")
    elsewhere = [known for known in (*KEYS, *SECTIONS) if known.rpartition(".")[2] == name]
    beside = [known for known in (*KEYS, *SECTIONS) if known.rpartition(".")[0] == section]
    names = [known.rpartition(".")[2] for known in beside]
    # Many keys differ in a long prefix only.
    close = near(name, names, n=1, cutoff=0.7) or [known for known in names if name and known.endswith(name)]
    if close:
        return f"DeepSpeed has no such key; did you mean {section + '.' if section else ''}{close[0]}?"
    if elsewhere:
        return f"DeepSpeed has no such key here; did you mean {elsewhere[0]}?"
    every = {known.rpartition(".")[2]: known for known in (*SECTIONS, *KEYS)}
    far = near(name, list(every), n=1, cutoff=0.75)
    return f"DeepSpeed has no such key; {f'did you mean {every[far[0]]}?' if far else 'leave it out'}"


def _written(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return _short(value)
    return json.dumps(value) if isinstance(value, bool | int | float | str) or value is None else str(value)


def _build(reading: _Reading, world_size: int) -> DsConfig:
    """The typed tree; ConfigError with what was wrong in reading, and with the rules between settings."""
    sizes = {name: reading.get(name) for name in (batch.TOTAL, batch.MICRO, batch.STEPS)}
    settled, wrong = batch.settle(sizes, world_size)
    precision = _precision(reading)
    optimizer = _optimizer(reading)
    scheduler = _scheduler(reading)
    # What only follows from a mistake that is reported already would be noise.
    text = "\n".join(f"{path}: {message}" for path, message in reading.problems)
    names = [path for path, _ in reading.problems]
    wrong = [] if set(sizes) & set(names) else wrong
    for path, message in (*wrong, *_rules(reading, precision, optimizer, world_size)):
        if path not in text and not any(name in message for name in names):
            reading.problems.append((path, message))
    if reading.problems:
        raise ConfigError(reading.problems)

    def section(kind: type[Any], path: str, **more: Any) -> Any:
        names = [part.name for part in fields(kind) if part.name not in more and f"{path}.{part.name}" in KEYS]
        return kind(**{name: reading.get(f"{path}.{name}") for name in names}, **more)

    if _parameters_tier(reading) != _tier(reading, _PARAM, "cpu_offload_param"):
        reading.not_needed.append(f"{_PARAM}.device")
    batches = dict(zip(sizes, settled))
    plain = {part.name for part in fields(DsConfig)} & KEYS.keys()
    deferred = [f"{path} = {_written(batches.get(path, default))}" for path, default in reading.autos.items()]
    return DsConfig(
        **{path: reading.get(path) for path in plain} | batches,
        zero=section(
            Zero,
            "zero_optimization",
            offload_optimizer=section(
                OffloadOptimizer,
                _STATE,
                device=_tier(reading, _STATE, "cpu_offload"),
                moments="bf16" if reading.get(_MOMENTS) else "fp32",
                masters="bf16" if reading.get(_MASTERS) else "fp32",
            ),
            offload_param=section(OffloadParam, _PARAM, device=_parameters_tier(reading)),
        ),
        precision=precision,
        optimizer=optimizer,
        scheduler=scheduler,
        comms_logger=section(CommsLogger, "comms_logger"),
        tensorboard=section(FileMonitor, "tensorboard"),
        wandb=section(WandbMonitor, "wandb"),
        csv_monitor=section(FileMonitor, "csv_monitor"),
        checkpoint=section(Checkpoint, "checkpoint"),
        pipeline=section(Pipeline, "pipeline"),
        not_needed=tuple(reading.not_needed),
        deferred=tuple(deferred),
    )


def _precision(reading: _Reading) -> Precision:
    get = reading.get
    half, brain = get("fp16.enabled"), get("bf16.enabled")
    return Precision(
        dtype=torch.float16 if half else torch.bfloat16 if brain else torch.float32,
        grad_dtype=torch.bfloat16 if get(_MASTERS) else get("data_types.grad_accum_dtype"),
        buffer_dtype=get("data_types.buffer_dtype"),
        auto_cast=half and get("fp16.auto_cast"),
        loss_scale=get("fp16.loss_scale") or None,
        initial_loss_scale=float(2 ** get("fp16.initial_scale_power")),
        loss_scale_window=get("fp16.loss_scale_window"),
        hysteresis=get("fp16.hysteresis"),
        consecutive_hysteresis=get("fp16.consecutive_hysteresis"),
        min_loss_scale=get("fp16.min_loss_scale"),
    )


def _optimizer(reading: _Reading) -> OptimizerChoice | None:
    name = reading.get("optimizer.type")
    arguments = reading.arguments("optimizer.params", {} if name is None else optimizers.defaults(name))
    if name is None:
        if arguments:
            reading.problems.append(("optimizer.type", "is missing; name the optimizer that optimizer.params is for"))
        return None
    choice, found = optimizers.choose(name, arguments)
    reading.problems.extend(found)
    return choice


def _scheduler(reading: _Reading) -> SchedulerChoice | None:
    name = reading.get("scheduler.type")
    arguments = reading.arguments("scheduler.params", {} if name is None else schedulers.defaults(name))
    if name is None:
        if arguments:
            reading.problems.append(("scheduler.type", "is missing; name the schedule that scheduler.params is for"))
        return None
    choice, found = schedulers.choose(name, arguments)
    reading.problems.extend(found)
    return choice


def _rules(
    reading: _Reading, precision: Precision, optimizer: OptimizerChoice | None, world_size: int
) -> Iterator[tuple[str, str]]:
    """(path, what is wrong and the fix) for every rule broken. A message names each path it rests on."""
    get = reading.get
    if not {batch.TOTAL, batch.MICRO} & (reading.values.keys() | reading.autos.keys()):
        yield batch.MICRO, f"is missing, and so is {batch.TOTAL}; give one of them"
    if get("fp16.enabled") and get("bf16.enabled"):
        yield "bf16.enabled", "true, and so is fp16.enabled; choose one"
    if get("data_types.param_dtype") not in (None, precision.dtype):
        told = (
            f"{_short(get('data_types.param_dtype'))}, and fp16.enabled and bf16.enabled say {_short(precision.dtype)}"
        )
        yield "data_types.param_dtype", f"{told}; leave it out"
    if precision.grad_dtype is torch.float16:
        yield "data_types.grad_accum_dtype", "fp16 is too narrow to accumulate in; use fp32 or bf16"
    if get("communication_data_type") not in (None, precision.grad_dtype):
        asked, grad = _short(get("communication_data_type")), _short(precision.grad_dtype)
        told = f"{asked}, and data_types.grad_accum_dtype is {grad}"
        fix = "gradients are reduced as they are accumulated: leave it out, or set both to the same"
        yield "communication_data_type", f"{told}; {fix}"
    if get("fp16.enabled") and not precision.loss_scale and precision.min_loss_scale > precision.initial_loss_scale:
        yield (
            "fp16.min_loss_scale",
            f"{precision.min_loss_scale:g} is above the first one, 2 to fp16.initial_scale_power = "
            f"{precision.initial_loss_scale:g}; use at most that",
        )
    stage = get("zero_optimization.stage")
    if stage and optimizer is not None and optimizer.whole_tensors:
        told = f"{optimizer.type} needs whole tensors, and zero_optimization.stage {stage} gives it slices"
        yield "optimizer.type", f"{told}; use stage 0, or an element-wise optimizer such as AdamW"
    yield from _offload(reading)
    yield from _groups(reading, world_size)


def _tier(reading: _Reading, path: str, older: str) -> str:
    """The device at ``path``, or what the boolean key of older files says."""
    return "cpu" if reading.get(f"zero_optimization.{older}") else reading.get(f"{path}.device")


def _parameters_tier(reading: _Reading) -> str:
    """Below stage 3 parameters are whole, and stay where they are: accelerate names a device whatever the stage."""
    return _tier(reading, _PARAM, "cpu_offload_param") if reading.get("zero_optimization.stage") == 3 else "none"


def _offload(reading: _Reading) -> Iterator[tuple[str, str]]:
    """Rules of what is kept off the device."""
    get, stage = reading.get, reading.get("zero_optimization.stage")
    for path, older in ((_STATE, "zero_optimization.cpu_offload"), (_PARAM, "zero_optimization.cpu_offload_param")):
        if get(older) and (device := reading.values.get(f"{path}.device", "cpu")) != "cpu":
            yield older, f"true is an older name of {path}.device cpu, and that is {device}; leave out one of the two"
    state, parameters = _tier(reading, _STATE, "cpu_offload"), _parameters_tier(reading)
    if state != "none" and stage < 1:
        yield f"{_STATE}.device", f"{state} needs zero_optimization.stage 1, 2 or 3; on one process they cut nothing"
    if state == "nvme" and not get(f"{_STATE}.nvme_path"):
        yield f"{_STATE}.nvme_path", f"is missing, and {_STATE}.device is nvme; give a directory on a fast local disk"
    if state == "nvme" and get("checkpoint.async_save"):
        told = f"would copy to host memory what {_STATE}.device nvme keeps out of it"
        yield "checkpoint.async_save", f"{told}; leave out one of the two"
    for path in (_MOMENTS, _MASTERS):
        if get(path) and (state == "none" or not get("bf16.enabled")):
            yield path, f"goes with {_STATE}.device cpu or nvme and bf16.enabled: on the device the state is float32"
    if parameters == "nvme" and not get(f"{_PARAM}.nvme_path"):
        yield f"{_PARAM}.nvme_path", f"is missing, and {_PARAM}.device is nvme; give a directory on a fast local disk"
    if parameters == "nvme" and get(_MASTERS):
        yield _MASTERS, f"are made of parameters in host memory, and {_PARAM}.device is nvme; leave out one of the two"
    if parameters != "none" and get("zero_optimization.zero_hpz_partition_size") > 1:
        yield (
            "zero_optimization.zero_hpz_partition_size",
            f"keeps a second copy on the devices of what {_PARAM}.device keeps off them; leave out one",
        )


def _groups(reading: _Reading, world_size: int) -> Iterator[tuple[str, str]]:
    """Rules of the groups that shard."""
    mics, hpz = "zero_optimization.mics_shard_size", "zero_optimization.zero_hpz_partition_size"
    for path, none in ((mics, -1), (hpz, 1)):
        size = reading.get(path)
        if size != none and (size < 1 or world_size % size):
            fitting = [divisor for divisor in range(1, world_size + 1) if world_size % divisor == 0]
            yield path, f"{size} does not divide the {world_size} processes; use one of {', '.join(map(str, fitting))}"
    if reading.get(mics) != -1 and reading.get(hpz) > 1:
        yield hpz, f"has no meaning with {mics}, whose shards stay in one group already; leave out one"


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
