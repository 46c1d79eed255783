"""The families of Hugging Face models that convert/ knows: one file of this folder each, found by its ``FAMILY``."""

from __future__ import annotations

import importlib
import pkgutil

from megazero.convert.families.base import HEAD, Family, Parts, Source
from megazero.errors import ConvertError

# A model that several families fit is exported as the first of these.
_FIRST = ("gpt2", "llama", "mistral", "qwen2", "qwen3")


def _find() -> dict[str, Family]:
    modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    families = {module.FAMILY.model_type: module.FAMILY for module in modules if hasattr(module, "FAMILY")}
    return {name: families[name] for name in dict.fromkeys((*_FIRST, *sorted(families)))}


FAMILIES: dict[str, Family] = _find()


def family_of(model_type: object, where: str) -> Family:
    """The family of a config.json's ``model_type``; ConvertError for one that is not here."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConvertError(f"{where}: model_type {model_type!r} is not supported; choose one of {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


__all__ = ["FAMILIES", "HEAD", "Family", "Parts", "Source", "family_of"]
