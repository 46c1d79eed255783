"""A Hugging Face config.json ↔ ModelConfig, both ways, for every family in families/.

Reads what transformers 4 and 5 write: ``rope_parameters`` or ``rope_theta`` with ``rope_scaling``. A field that
a file leaves out has the default that transformers gives it. What ModelConfig cannot express is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pydantic

from megazero.convert.families import FAMILIES, Family, family_of
from megazero.convert.families.base import Json
from megazero.errors import ConvertError
from megazero.models.config import ModelConfig
from megazero.models.parameters import parameter_shapes

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_config(raw: Json, where: str) -> tuple[Family, ModelConfig]:
    """The family and architecture of a parsed config.json. ``where`` names the file in errors (ConvertError)."""
    family = family_of(raw.get("model_type"), where)
    if raw.get("quantization_config"):
        raise ConvertError(f"{where}: quantization_config: quantised weights are not supported; use the original model")
    values = {**family.defaults, **_without_aliases(family, raw, where)}
    fields = {ours: values[theirs] for theirs, ours in family.fields.items()}
    names = {ours: theirs for theirs, ours in family.fields.items()}
    try:
        config = ModelConfig(**fields, **family.read(values, where))
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        field = str(problem["loc"][0]) if problem["loc"] else "?"
        raise ConvertError(f"{where}: {names.get(field, field)}: {problem['msg']}, got {problem['input']!r}") from None
    for field in ("num_key_value_heads", "head_dim", "ffn_hidden_size", "sliding_window"):
        if (size := getattr(config, field)) is not None and size < 1:
            raise ConvertError(f"{where}: {names.get(field, field)} = {size} is not a size")
    heads, groups = config.num_attention_heads, config.kv_heads
    if heads % groups or config.head_size < 1:
        raise ConvertError(
            f"{where}: {heads} heads of queries do not fit {groups} of keys and values at a width of "
            f"{config.hidden_size}: the first must be a multiple of the second and at most the width"
        )
    # Sizes that the file left to follow from others are spelled out, so that equal models have equal configs.
    sizes = {"num_key_value_heads": groups, "head_dim": config.head_size, "ffn_hidden_size": config.ffn_size}
    return family, config.model_copy(update=sizes)


def _without_aliases(family: Family, raw: Json, where: str) -> dict[str, Any]:
    named = dict(raw)
    for alias, name in family.aliases.items():
        if alias in raw:
            if raw.get(name, raw[alias]) != raw[alias]:
                raise ConvertError(
                    f"{where}: {name} = {raw[name]!r} and {alias} = {raw[alias]!r} are one setting; remove one"
                )
            named[name] = raw[alias]
    return named


def shapes_of(config: ModelConfig, held: int, where: str) -> dict[str, tuple[int, ...]]:
    """Global name → global shape. ``held``: tensors in the files; ConvertError where there are more layers than that,
    before a mistaken number of them is spelled out."""
    if config.num_layers > held:
        raise ConvertError(f"{where}: {config.num_layers} layers, but the files hold {held} tensors")
    return parameter_shapes(config)


def read_tokens(raw: Json) -> dict[str, Any]:
    """The special tokens that a config.json names: a number, a list of some, or null."""

    def is_token(value: object) -> bool:
        return value is None or (isinstance(value, int) and not isinstance(value, bool))

    given = {name: raw[name] for name in TOKENS if isinstance(raw, Mapping) and name in raw}
    return {
        name: value
        for name, value in given.items()
        if is_token(value) or (isinstance(value, list) and value and all(map(is_token, value)))
    }


def choose_family(config: ModelConfig, preferred: object = None) -> tuple[Family, ModelConfig]:
    """The family that a model can be exported as, and its config there, which may have biases (zeros) more.

    A family that has exactly the model's parameters goes before one that needs zeros; of such, ``preferred`` (a
    model_type) before others. Raises ConvertError naming the fields in the way.
    """
    refusals = {name: family.refusals(config) for name, family in FAMILIES.items()}
    fitting = [(FAMILIES[name], FAMILIES[name].completed(config)) for name, found in refusals.items() if not found]
    fitting.sort(key=lambda fit: (fit[1] != config, fit[0].model_type != preferred))
    if fitting:
        return fitting[0]
    nearest = min(refusals, key=lambda name: len(refusals[name]))
    raise ConvertError(
        f"this model is of no Hugging Face family that megazero writes; the nearest is {nearest}, "
        f"which has no place for {'; '.join('model.' + problem for problem in refusals[nearest])}"
    )


def write_config(family: Family, config: ModelConfig, dtype: str, tokens: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model exported as that family, for transformers 4 and 5. ``tokens``: see read_tokens."""
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
        # Written out, null if need be, because the family's defaults are tokens of another vocabulary.
        **dict.fromkeys(TOKENS),
        **tokens,
        **{theirs: getattr(config, ours) for theirs, ours in family.fields.items()},
        **family.write(config),
    }
