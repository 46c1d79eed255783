"""Rotary settings of a config.json, as transformers 4 and 5 write them."""

from __future__ import annotations

import math
from typing import Any

import pydantic

from megazero.convert.families.base import Json
from megazero.errors import ConvertError
from megazero.models.config import ModelConfig, RopeScaling

_KINDS = ("default", "linear", "llama3", "yarn")


def read_rope(values: Json, where: str) -> tuple[float, RopeScaling | None]:
    """(base, scaling) from ``rope_parameters``, or ``rope_theta`` with ``rope_scaling``. Raises ConvertError."""
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise ConvertError(f"{where}: rope_scaling or rope_parameters = {given!r} is no JSON object")
    rope: dict[str, Any] = dict(given)
    try:
        named = (rope.get("rope_theta"), values.get("rope_theta"), 10000.0)
        theta = float(next(value for value in named if value is not None))
        partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
        if partial not in (None, 1):
            raise ConvertError(f"{where}: partial_rotary_factor = {partial} is not supported, only 1 is")
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in _KINDS:
            raise ConvertError(f"{where}: rope_type {kind!r} is not supported; choose one of {', '.join(_KINDS)}")
        return theta, None if kind == "default" else _scaling(kind, rope, values, where)
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        raise ConvertError(f"{where}: rope settings: {problem['loc'][0]}: {problem['msg']}") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConvertError(f"{where}: rope settings: {error}") from None


def _scaling(kind: str, rope: Json, values: Json, where: str) -> RopeScaling:
    longest = values["max_position_embeddings"]
    original = values.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or longest
    factor = rope.get("factor") or (longest / original if kind == "yarn" else None)
    fields: dict[str, Any] = {"type": kind, "factor": factor}
    if kind != "linear":
        fields["original_max_position_embeddings"] = original
    if kind == "llama3":
        fields |= {name: rope.get(name) for name in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        if rope.get("truncate", True) is not True:
            raise ConvertError(f"{where}: truncate = {rope['truncate']!r} in the rope settings is not supported")
        fields["beta_fast"], fields["beta_slow"] = rope.get("beta_fast") or 32.0, rope.get("beta_slow") or 1.0
        fields["attention_factor"] = _yarn_attention_factor(rope, factor)
    missing = [name for name, value in fields.items() if value is None and name != "attention_factor"]
    if missing:
        raise ConvertError(f"{where}: rope_type {kind!r} needs {', '.join(missing)}")
    return RopeScaling(**fields)


def _yarn_attention_factor(rope: Json, factor: float) -> float | None:
    """As DeepSeek's files give it: a ratio of two amplitudes 0.1 m ln(factor) + 1 (mscale, mscale_all_dim)."""
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        if factor <= 1:
            return 1.0
        above, below = (0.1 * rope[key] * math.log(factor) + 1.0 for key in ("mscale", "mscale_all_dim"))
        return above / below
    return None


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """The settings in both spellings."""
    scaling = config.rope_scaling
    new: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        new = {"rope_type": scaling.type, "factor": scaling.factor}
        if scaling.type != "linear":
            original = scaling.original_max_position_embeddings or config.max_position_embeddings
            new["original_max_position_embeddings"] = original
        if scaling.type == "llama3":
            new |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
        if scaling.type == "yarn":
            new |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
            if scaling.attention_factor is not None:
                new["attention_factor"] = scaling.attention_factor
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else new,
        "rope_parameters": {**new, "rope_theta": config.rope_theta},
    }
