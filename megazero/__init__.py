"""megazero: pretraining of GPT models over tensor, pipeline and ZeRO data parallelism.

Importing this loads nothing heavy; each public name is loaded from its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megazero.config import Config, load_config
    from megazero.engine import Engine
    from megazero.errors import ConfigError, MegazeroError
    from megazero.foreign.engine import ZeroEngine
    from megazero.foreign.initialize import initialize
    from megazero.models.config import ModelConfig

__version__ = "0.1.0"
__all__ = [
    "Config",
    "ConfigError",
    "Engine",
    "MegazeroError",
    "ModelConfig",
    "ZeroEngine",
    "__version__",
    "initialize",
    "load_config",
]

_HOMES = {
    "Config": "megazero.config",
    "ConfigError": "megazero.errors",
    "Engine": "megazero.engine",
    "MegazeroError": "megazero.errors",
    "ModelConfig": "megazero.models.config",
    "ZeroEngine": "megazero.foreign.engine",
    "initialize": "megazero.foreign.initialize",
    "load_config": "megazero.config",
}


def __getattr__(name: str) -> Any:
    if name == "zero":
        return importlib.import_module("megazero.zero")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
