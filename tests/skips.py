"""Which tests may be skipped."""

from __future__ import annotations

from pathlib import Path


def needs_gpu() -> set[str]:
    """Those that need a GPU, where there is none: the names in gpu/needs_gpu.txt."""
    return set(Path(__file__).with_name("gpu").joinpath("needs_gpu.txt").read_text().split())
