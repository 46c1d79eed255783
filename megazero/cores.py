"""The processor's cores that a process may use."""

from __future__ import annotations

import os


def own_cores() -> int:
    """Those that the machine's processes share, by each of them."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
