"""What users touch of parameters that are cut over ranks; each name is loaded from its module on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megazero.zero.access import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
    )
    from megazero.zero.gathered import GatheredParameters, register_external_parameter
    from megazero.zero.init import Init

__all__ = [
    "GatheredParameters",
    "Init",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_optimizer_state",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = {"Init": "init", "GatheredParameters": "gathered", "register_external_parameter": "gathered"}
    return getattr(importlib.import_module(f"{__name__}.{homes.get(name, 'access')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
