"""Python values in a checkpoint's manifest, which is JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megazero.errors import CheckpointError

_TUPLE, _PAIRS = "__tuple__", "__pairs__"


def check_json(value: Any, where: str) -> Any:
    """A copy of what JSON can hold and give back as it was; CheckpointError naming the key of anything else."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [check_json(part, f"{where}[{index}]") for index, part in enumerate(value)]
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: check_json(part, f"{where}[{key!r}]") for key, part in value.items()}
    kind = type(value).__name__ if type(value) is not dict else "dict with keys that are no str"
    raise CheckpointError(
        f"{where} is a {kind}; a checkpoint holds JSON values: None, bool, int, float, str, and lists and dicts of them"
    )


def encode(value: Any, where: str) -> Any:
    """As ``check_json``, for what torch's own objects keep: tuples, scalar tensors and dicts with other keys come back
    as well, a tensor as its number."""
    if type(value) is tuple:
        return {_TUPLE: encode(list(value), where)}
    if type(value) is list:
        return [encode(part, f"{where}[{index}]") for index, part in enumerate(value)]
    if isinstance(value, Mapping):
        parts = {key: encode(part, f"{where}[{key!r}]") for key, part in value.items()}
        if all(type(key) is str for key in parts):
            return parts
        return {_PAIRS: [[check_json(key, where), part] for key, part in parts.items()]}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    return check_json(value, where)


def decode(value: Any) -> Any:
    """The reverse of ``encode``."""
    if isinstance(value, list):
        return [decode(part) for part in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TUPLE}:
        return tuple(decode(value[_TUPLE]))
    if value.keys() == {_PAIRS}:
        return {key: decode(part) for key, part in value[_PAIRS]}
    return {key: decode(part) for key, part in value.items()}
