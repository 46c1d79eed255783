"""How ``import deepspeed`` comes to mean megazero, in the processes that ask for it and nowhere else.

A finder at the head of ``sys.meta_path`` makes the modules of `surface.SURFACE` out of nothing, and answers for the
distribution as well, whose version libraries ask for. No file is installed under that name and no library is touched.
Nothing here imports torch: it runs at the start of every process under ``megazero launch --as-deepspeed``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterable, MutableMapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from megazero.errors import LaunchError
from megazero.integrations.surface import SURFACE

NAME = "deepspeed"
VERSION = "0.19.6+megazero"
"""The DeepSpeed whose names and settings are meant, and who answers to them."""

_STARTUP = Path(__file__).with_name("startup")
_LATE = ("accelerate", "transformers.integrations.deepspeed", "trl")
"""Modules that ask once, when they are imported, whether DeepSpeed is there."""


class StandInModule(ModuleType):
    """A module of deepspeed's whose names are looked up in the table, and loaded, when they are first used."""

    def __getattr__(self, name: str) -> Any:
        inner = f"{self.__name__}.{name}"
        if inner in SURFACE:
            return importlib.import_module(inner)
        names = SURFACE[self.__name__]
        home, _, attribute = names.get(name, names.get("*", "")).partition(":")
        found = importlib.import_module(home) if home else None
        if name not in names and (name.startswith("__") or not hasattr(found, name)):
            raise AttributeError(f"megazero stands in for {self.__name__} here, and has no {name} of it")
        value = getattr(found, attribute or name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        below = (name.rpartition(".") for name in SURFACE)
        return sorted(
            {*SURFACE[self.__name__], *(name for parent, _, name in below if parent == self.__name__)} - {"*"}
        )


class StandIn:
    """The finder and loader of those modules, and of their distribution's metadata."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != NAME:
            return None
        if name not in SURFACE:
            raise ModuleNotFoundError(f"megazero stands in for {NAME} here, and has no {name}", name=name)
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandInModule(spec.name, f"{spec.name}, as megazero does it")

    def exec_module(self, module: ModuleType) -> None:
        """Everything is there already."""

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        wanted = getattr(context, "name", None)
        if wanted is None or re.sub(r"[-_.]+", "-", wanted).lower() == NAME:
            yield _Distribution()

    def invalidate_caches(self) -> None:
        """There are none."""


class _Distribution(importlib.metadata.Distribution):
    def read_text(self, filename: str) -> str | None:
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\nSummary: megazero, standing in\n",
            "top_level.txt": f"{NAME}\n",
        }.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(path)


def install() -> None:
    """Let ``import deepspeed`` mean megazero in this process from here on. Safe to call twice.

    Raises LaunchError where the real one is imported, or a library has found already that there is none.
    """
    if any(isinstance(finder, StandIn) for finder in sys.meta_path):
        return
    if NAME in sys.modules:
        place = getattr(sys.modules[NAME], "__file__", None)
        raise LaunchError(
            f"this process has imported {NAME} itself, from {place}; megazero can stand in for it only in a process "
            "that has not. Start the script with `megazero launch --as-deepspeed`"
        )
    late = [name for name in _LATE if name in sys.modules]
    if late:
        raise LaunchError(
            f"{late[0]} is imported, and has found already whether {NAME} is there; import "
            "megazero.integrations.transformers before it, or start the script with `megazero launch --as-deepspeed`"
        )
    sys.meta_path.insert(0, StandIn())


def prepare(environment: MutableMapping[str, str]) -> None:
    """Have every Python process that is started with this environment do the same."""
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if str(_STARTUP) not in paths:
        environment["PYTHONPATH"] = os.pathsep.join([str(_STARTUP), *paths])
