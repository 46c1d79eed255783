"""Ways to keep model state off the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CPU = {"device": "cpu", "buffer_size": 1024}
PARAMETERS = {"offload_param": {"device": "cpu"}}


def nvme(directory: Path, **more: Any) -> dict[str, Any]:
    return {"offload_optimizer": {"device": "nvme", "nvme_path": str(directory), "buffer_size": 1024, **more}}
