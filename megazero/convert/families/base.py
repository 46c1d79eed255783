"""What a family of Hugging Face models is: names of tensors, fields of config.json, and what it cannot express."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megazero.errors import ConvertError
from megazero.models.config import ModelConfig
from megazero.models.parameters import parameter_shapes

Json = Mapping[str, Any]

HEAD = "lm_head.weight"
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class Source:
    """Where a global tensor is inside a Hugging Face tensor.

    ``transposed``: stored (in, out). ``part`` of ``parts``: equal runs of the output dimension.
    """

    name: str
    transposed: bool = False
    part: int = 0
    parts: int = 1

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the whole Hugging Face tensor, given the global tensor's."""
        full = (shape[0] * self.parts, *shape[1:])
        return full[::-1] if self.transposed else full


@dataclass(frozen=True)
class Row:
    """A module's place; ``{i}`` is the layer. ``conv1d``: the weight is transposed, as GPT-2's are."""

    module: str
    conv1d: bool = False
    part: int = 0
    parts: int = 1


# The (global name, source, global shape) that make up one Hugging Face tensor, by part.
Parts = list[tuple[str, Source, tuple[int, ...]]]


class Family:
    """One ``model_type``. A subclass fills in the tables, and the methods where a table does not do.

    ``prefix`` stands before every tensor but the head's; files of the bare model lack it. ``rows``: our module → its
    place. ``buffers``: what files may hold besides parameters, as a pattern of the name without the prefix.
    ``fields``: name in config.json → field of ModelConfig. ``aliases``: further names that transformers takes for
    some. ``defaults``: what transformers takes for a field that config.json leaves out. ``requires``: fields of
    ModelConfig that all models of the family have alike.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    prefix: ClassVar[str] = "model."
    rows: ClassVar[Mapping[str, Row]]
    buffers: ClassVar[re.Pattern[str]]
    fields: ClassVar[Mapping[str, str]]
    aliases: ClassVar[Mapping[str, str]] = {}
    defaults: ClassVar[Json]
    requires: ClassVar[Json]

    def read(self, values: Json, where: str) -> dict[str, Any]:
        """The fields of ModelConfig that ``fields`` does not give, from config.json with defaults filled in.

        Raises ConvertError, naming ``where`` and the field, for what ModelConfig cannot express.
        """
        raise NotImplementedError

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """The fields of config.json that ``fields`` does not give, and those of it that must not be null."""
        raise NotImplementedError

    def completed(self, config: ModelConfig) -> ModelConfig:
        """The config with every bias that the family has where it has any: zeros say the same as none."""
        return config

    def refusals(self, config: ModelConfig) -> list[str]:
        """What of a config the family cannot express."""
        return [
            f"{field} = {getattr(config, field)!r} (it has {value!r})"
            for field, value in {**self.requires, "attention": "softmax"}.items()
            if getattr(config, field) != value
        ]

    def source(self, name: str) -> Source:
        """Of a global tensor; the prefix is there."""
        if name == "head.weight":
            return Source(HEAD)
        layer = _LAYER.fullmatch(name)
        stem, _, kind = (layer[2] if layer else name).rpartition(".")
        row = self.rows[stem]
        module = row.module.format(i=layer[1]) if layer else row.module
        transposed = row.conv1d and kind == "weight"
        return Source(f"{self.prefix}{module}.{kind}", transposed, row.part, row.parts)

    def tensors(self, config: ModelConfig) -> dict[str, Parts]:
        """Hugging Face name → what makes it up, in our order."""
        found: dict[str, Parts] = {}
        for name, shape in parameter_shapes(config).items():
            source = self.source(name)
            found.setdefault(source.name, []).append((name, source, shape))
        for parts in found.values():
            parts.sort(key=lambda part: part[1].part)
        return found


def refuse(values: Json, where: str, required: Json) -> None:
    """ConvertError for the first field of config.json that has not the one value that is supported."""
    for field, value in required.items():
        if values[field] != value:
            raise ConvertError(f"{where}: {field} = {values[field]!r} is not supported, only {value!r} is")
