"""How a value of a ds_config is read: what JSON may hold, and what comes out of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Kind:
    """``name``: as the documentation calls it. ``read``: the value, or ValueError that says what it must be."""

    name: str
    read: Callable[[Any], Any]


_NO_NUMBER = 10**300
"""Beyond what a float holds Python's integers go on, but nothing that counts or measures here."""


def _as_number(value: Any) -> float | int:
    """A finite number, also one that a template or a shell has left as a string; never a boolean."""
    if isinstance(value, str):
        for parse in (int, float):
            try:
                value = parse(value)
            except ValueError:
                continue
            break
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _NO_NUMBER:
        raise ValueError(f"{value!r} must be a number")
    return value


def integer(least: int | None = None, most: int | None = None) -> Kind:
    """An integer; 5e8, a float to JSON, is one."""

    def read(value: Any) -> int:
        number = _as_number(value)
        if number != int(number):
            raise ValueError(f"{value!r} must be a whole number")
        _check_range(number, least, most)
        return int(number)

    return Kind("integer", read)


def number(least: float | None = None, most: float | None = None, above: float | None = None) -> Kind:
    """A number between two bounds, both included, and above a third."""

    def read(value: Any) -> float:
        result = float(_as_number(value))
        _check_range(result, least, most)
        if above is not None and result <= above:
            raise ValueError(f"{result:g} must be above {above:g}")
        return result

    return Kind("number", read)


def _check_range(value: float, least: float | None, most: float | None) -> None:
    if least is not None and value < least:
        raise ValueError(f"{value:g} must be at least {least:g}")
    if most is not None and value > most:
        raise ValueError(f"{value:g} must be at most {most:g}")


def _read_period(value: Any) -> int | None:
    # What Accelerate writes for "never"; to JSON it is Infinity.
    return None if value == math.inf else integer(1).read(value)


def _read_boolean(value: Any) -> bool:
    known = {"true": True, "false": False, "1": True, "0": False}
    text = str(value).lower()
    if text not in known or isinstance(value, float):
        raise ValueError(f"{value!r} must be true or false")
    return known[text]


def _read_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} must be a string")
    return value


def choice(*names: str) -> Kind:
    """One of these, in either case of letters; comes out in the case given here."""
    known = {name.lower(): name for name in names}

    def read(value: Any) -> str:
        if not isinstance(value, str) or value.lower() not in known:
            raise ValueError(f"{value!r} must be one of {', '.join(names)}")
        return known[value.lower()]

    return Kind(" or ".join(names), read)


DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
    "torch.float32": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "torch.float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "torch.bfloat16": torch.bfloat16,
}


def _read_dtype(value: Any) -> torch.dtype:
    if isinstance(value, torch.dtype) and value in DTYPES.values():
        return value
    if not isinstance(value, str) or value.lower() not in DTYPES:
        raise ValueError(f"{value!r} must be one of fp32, fp16, bf16")
    return DTYPES[value.lower()]


def _read_texts(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{value!r} must be a list of strings")
    return tuple(texts)


def _read_rates(value: Any) -> float | tuple[float, ...]:
    if isinstance(value, list | tuple):
        return tuple(float(_as_number(part)) for part in value)
    return float(_as_number(value))


def read_argument(value: Any, default: Any, several: bool = False) -> Any:
    """An argument of one of torch's classes, which look at few of theirs before they use them: of the kind that its
    default is of (``inspect.Parameter.empty``: it has none, and is a number), or ValueError. ``several``: in place of a
    number there may be a list of them."""
    if isinstance(default, bool):
        return _read_boolean(value)
    if isinstance(default, str):
        return _read_text(value)
    if isinstance(default, tuple):
        if not isinstance(value, list | tuple) or len(value) != len(default):
            raise ValueError(f"{value!r} must be {len(default)} numbers")
        return tuple(part if part is None else _as_number(part) for part in value)
    if several and isinstance(value, list | tuple):
        return [read_argument(part, default) for part in value]
    if default is None:
        return _as_number(value) if isinstance(value, str) and _is_number(value) else value
    result = _as_number(value)
    is_count = not isinstance(default, float) and isinstance(result, float) and result.is_integer()
    return int(result) if is_count else result


def _is_number(text: str) -> bool:
    try:
        return bool(abs(float(text)) < _NO_NUMBER)
    except ValueError:
        return False


PERIOD = Kind("integer", _read_period)
BOOLEAN = Kind("true or false", _read_boolean)
TEXT = Kind("string", _read_text)
TEXTS = Kind("list of strings", _read_texts)
DTYPE = Kind("fp32, fp16 or bf16", _read_dtype)
RATES = Kind("number, or one per parameter group", _read_rates)
ANYTHING = Kind("any", lambda value: value)
