"""docs/from-deepspeed.md's tables, as the tables of keys say they must be."""

from __future__ import annotations

from typing import Any

import torch

from megazero.ds_config.schedulers import PARAMETERS, REQUIRED
from megazero.ds_config.table import TITLES, Fate, Key


def value(default: Any) -> str:
    if default is REQUIRED:
        return "required"
    if default is None or isinstance(default, torch.dtype):
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int):
        return f"{default:,}" if default < 2**62 else "no limit"
    if isinstance(default, float):
        return f"{default:g}"
    return ", ".join(default) if isinstance(default, tuple) else str(default)


def key_row(key: Key) -> str:
    here = key.here if key.fate is Fate.USED else f"{key.fate.value}: {key.here}"
    if key.fate is Fate.LACKING and key.kind.name != "any":
        here = f"only {value(key.default) or 'absent'}; not here: {key.here}"
    return f"| `{key.path}` | {key.kind.name} | {value(key.default)} | {here} |"


def key_tables() -> dict[str, list[str]]:
    """Title → rows."""
    tables = {title: [key_row(key) for key in keys] for title, keys in TITLES.items()}
    for schedule, parameters in PARAMETERS.items():
        tables[schedule] = [
            f"| `{each.name}` | {each.kind.name} | {value(each.default)} | {each.here} |" for each in parameters
        ]
    return tables
