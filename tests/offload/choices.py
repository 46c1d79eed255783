"""Ways to keep model state off the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CPU = {"device": "cpu", "buffer_size": 1024}
PARAMETERS = {"offload_param": {"device": "cpu"}}


FILES = {"offload_param": {"device": "nvme"}}
"""Needs a directory: see ``in_files``."""


def in_files(tier: dict[str, Any], directory: Path) -> dict[str, Any]:
    """``tier``, with a directory where it has FILES."""
    chosen = tier.get("offload_param") == FILES["offload_param"]
    return tier | ({"offload_param": {"device": "nvme", "nvme_path": str(directory)}} if chosen else {})


def nvme(directory: Path, **more: Any) -> dict[str, Any]:
    return {"offload_optimizer": {"device": "nvme", "nvme_path": str(directory), "buffer_size": 1024, **more}}
