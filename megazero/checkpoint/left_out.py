"""Samples that a run has left out since its newest checkpoint, in a file beside that: whoever goes on from there must
leave them out as well. Later checkpoints have them in their manifests.

root/left_out.json    {"run_id": …, "left_out": [[first, last], …]}, replaced as a whole
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from megazero.checkpoint import files
from megazero.errors import CheckpointError
from megazero.small_files import read_small

NAME = "left_out.json"


def encode(ranges: Iterable[range]) -> list[list[int]]:
    """As JSON: first and last of each."""
    return [[samples.start, samples.stop - 1] for samples in ranges]


def decode(pairs: list[list[int]]) -> list[range]:
    """The reverse; ValueError or TypeError for what is none."""
    ranges = [range(first, last + 1) for first, last in pairs]
    if not all(0 <= samples.start < samples.stop for samples in ranges):
        raise ValueError("first and last are no positions")
    return ranges


def write(root: Path, run_id: str | None, ranges: Iterable[range]) -> None:
    """Durably. Raises OSError."""
    files.replace_file(root / NAME, json.dumps({"run_id": run_id, "left_out": encode(ranges)}).encode() + b"\n")


def read(root: Path, run_id: str | None) -> list[range]:
    """What that run has written there; nothing where another run has, or none. Raises CheckpointError."""
    path = root / NAME
    try:
        content = json.loads(read_small(path))
        return decode(content["left_out"]) if content["run_id"] == run_id else []
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error!r}); restore it, or remove it: samples that were left out are then read"
        ) from error
