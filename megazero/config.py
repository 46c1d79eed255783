"""One typed tree of settings, from a file and flags, with every rule checked before anything starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from megazero import config_rules
from megazero.config_cli import describe_errors, help_text, parse_flags, read_file
from megazero.config_tree import (
    CheckpointSection,
    DataSection,
    LogSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    Section,
    TrainSection,
    WatchSection,
    ZeroSection,
    merged,
)
from megazero.errors import ConfigError, WorldSizeError
from megazero.layout import Layout
from megazero.models.config import ModelConfig
from megazero.pipeline.schedules import ScheduleName


class Config(Section):
    """Every setting of a run. Building one checks each field by itself; ``problems`` checks them together."""

    model: ModelSection = Field(default_factory=ModelSection)
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    zero: ZeroSection = Field(default_factory=ZeroSection)
    data: DataSection = Field(default_factory=DataSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    train: TrainSection = Field(default_factory=TrainSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    log: LogSection = Field(default_factory=LogSection)
    watch: WatchSection = Field(default_factory=WatchSection)

    @classmethod
    def from_dict(
        cls,
        tree: Mapping[str, Any],
        *,
        world_size: int | None = None,
        needs_data: bool = False,
        found: Sequence[tuple[str, str]] = (),
    ) -> Config:
        """The checked config of plain values, as read from a file.

        ``world_size``: number of processes, where known. ``needs_data``: data files must be named. ``found``:
        problems met before, to be reported with the rest. Raises ConfigError with every problem.
        """
        # Rules still run on what is right, so that one report holds everything. A rule's message names all
        # fields it rests on; what rests on a field that is reported already would only be noise.
        config, wrong = _read(tree)
        reported = [*found, *wrong]
        text = "\n".join(f"{field}: {message}" for field, message in reported)
        for field, message in config_rules.problems(config, world_size, needs_data):
            if field not in text and not any(name in message for name, _ in wrong):
                reported.append((field, message))
        if reported:
            raise _error(reported, config, world_size)
        return config

    def problems(self, world_size: int | None = None) -> list[tuple[str, str]]:
        """(field, what is wrong and the fix) for every rule broken; layout rules only with a world size."""
        return list(config_rules.problems(self, world_size))

    def validate_world(self, world_size: int) -> None:
        """Raises ConfigError with everything that cannot work, on this number of processes included."""
        if found := self.problems(world_size):
            raise _error(found, self, world_size)

    def layout(self, world_size: int) -> Layout:
        """What each axis is on ``world_size`` processes. Raises WorldSizeError where they do not fit."""
        if found := list(config_rules.world_problems(self, world_size)):
            raise WorldSizeError(found)
        tp, pp = self.parallel.tp, self.parallel.pp
        return Layout(tp, pp, world_size // (tp * pp))

    def micro_batches(self, dp: int) -> int:
        """Forward passes per step on each process, where ``dp`` copies of the model share the global batch."""
        return self.train.global_batch_size // (self.train.micro_batch_size * dp)

    @property
    def schedule(self) -> ScheduleName:
        """``parallel.schedule``, where 1f1b of several stages per rank is interleaved."""
        chosen, virtual_pp = self.parallel.schedule, self.parallel.virtual_pp
        return "interleaved" if chosen == "1f1b" and virtual_pp > 1 else chosen

    @property
    def sequence_parallel(self) -> bool:
        """``parallel.sequence_parallel`` with auto resolved."""
        chosen, tp = self.parallel.sequence_parallel, self.parallel.tp
        return tp > 1 and self.data.seq_length % tp == 0 if chosen == "auto" else chosen


def with_model(config: Config, architecture: ModelConfig, *, world_size: int | None = None) -> Config:
    """``config`` with the architecture found at ``model.init_from`` (or in a checkpoint that is resumed).

    Dropout may be set over it, since it changes no weight; any other field given must agree. The rules are
    checked again. Raises ConfigError.
    """
    given = config.model.model_fields_set & set(ModelConfig.model_fields)
    sizes = {name: getattr(architecture, name) for name in ModelConfig.model_fields}
    source = config.model.init_from or config.checkpoint.dir or "the checkpoint"
    found = []
    for name in sorted(given):
        value = getattr(config.model, name)
        if name in ("dropout", "attention_dropout"):
            sizes[name] = value
        elif value != sizes[name]:
            found.append((f"model.{name}", f"{value!r} contradicts {sizes[name]!r} at {source}; leave it out"))
    if found:
        raise ConfigError(found)
    model = ModelSection(**sizes, preset=config.model.preset, init_from=config.model.init_from)
    config = config.model_copy(update={"model": model})
    if found := config.problems(world_size):
        raise _error(found, config, world_size)
    return config


def load_config(argv: Sequence[str], *, world_size: int | None = None, needs_data: bool = True) -> Config:
    """The config that ``--config FILE --section.field value …`` asks for; flags win over the file.

    ``argv``: without the program's name. ``--help`` prints every field, on one process, and exits.
    Raises ConfigError with every problem found.
    """
    if "--help" in argv or "-h" in argv:
        if os.environ.get("RANK", "0") == "0":
            print(help_text(Config, Path(sys.argv[0]).name))
        raise SystemExit(0)
    path, flags, found = parse_flags(argv, Config)
    tree = read_file(path) if path is not None else {}
    return Config.from_dict(merged(tree, flags), world_size=world_size, needs_data=needs_data, found=found)


def _error(found: Sequence[tuple[str, str]], config: Config, world_size: int | None) -> ConfigError:
    """What to raise for these problems, some of which may be the number of processes' alone."""
    of_size = list(config_rules.world_problems(config, world_size)) if world_size is not None else []
    return WorldSizeError(found) if list(found) == of_size else ConfigError(found)


def _read(tree: Mapping[str, Any]) -> tuple[Config, list[tuple[str, str]]]:
    """(config without the fields that are wrong by themselves, what is wrong with those)."""
    try:
        return Config.model_validate(tree), []
    except ValidationError as error:
        found = describe_errors(error, Config)
        reduced = dict(tree)
        for field, _ in found:
            reduced = _without(reduced, field.split("."))
        return _read(reduced)[0], found


def _without(tree: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """A copy of the tree without a field; where its absence is what is wrong, without the section that lacks it."""
    first, *rest = path
    if first not in tree:  # the name has dots of its own
        return {name: value for name, value in tree.items() if not name.startswith(f"{first}.")}
    inner = tree[first]
    if isinstance(inner, Mapping) and rest and not (len(rest) == 1 and rest[0] not in inner):
        return {**tree, first: _without(inner, rest)}
    return {name: value for name, value in tree.items() if name != first}
