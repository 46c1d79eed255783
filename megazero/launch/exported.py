"""The variables that every machine of a job gets from where it is started."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from megazero.errors import LaunchError
from megazero.small_files import read_small

_PREFIXES = (
    "NCCL_",
    "PYTHON",
    "MEGAZERO_",
    "GLOO_",
    "TORCH_",
    "UCX_",
    "OMP_",
    "CUDA_LAUNCH",
    "CUBLAS_",
    "HF_",
    "WANDB_",
)
FILE = ".deepspeed_env"


def exported(environment: Mapping[str, str], given: Sequence[str], places: Sequence[Path]) -> dict[str, str]:
    """Those of this process that every rank should share, then those of a ``.deepspeed_env`` in one of ``places`` (the
    first that has one), then ``given`` ones of --env, each as NAME=VALUE. Raises LaunchError."""
    found = {name: value for name, value in environment.items() if name.startswith(_PREFIXES)}
    for place in places:
        if os.path.isfile(place / FILE):  # not so either in a home that this user may not enter, as in containers
            try:
                lines = read_small(place / FILE).decode().splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise LaunchError(f"{place / FILE}: cannot be read: {error}") from None
            for number, line in enumerate(lines, start=1):
                if line.strip() and not line.lstrip().startswith("#"):
                    found |= _pair(line.strip(), f"{place / FILE}, line {number}")
            break
    for text in given:
        found |= _pair(text, "--env")
    return found


def _pair(text: str, where: str) -> dict[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name) or "\0" in value:
        raise LaunchError(f"{where}: {text!r}; expected NAME=VALUE")
    return {name: value}


def default_places() -> list[Path]:
    """Where DeepSpeed looks: the working directory, then the home directory."""
    return [Path.cwd(), Path(os.path.expanduser("~"))]
