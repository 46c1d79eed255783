"""A Hugging Face directory into a megazero checkpoint: weights only, step 0."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from megazero.checkpoint import save
from megazero.checkpoint.writer import ChunkData, row_runs
from megazero.convert.hf_reader import HFWeights
from megazero.errors import ConvertError
from megazero.sharding import Rectangle


def import_checkpoint(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> Path:
    """Writes the checkpoint under ``target`` and returns its directory; one chunk is in memory at a time.

    Raises ConvertError where the source cannot be taken, or the target holds anything.
    """
    refuse_non_empty(Path(target))
    weights = HFWeights(source)
    meta = {
        "model": weights.config.model_dump(),
        "layout": {"tp": 1, "pp": 1, "dp": 1},
        "consumed_samples": 0,
        "eod_id": weights.end_of_text,
    }
    return save(target, 0, _chunks(weights), meta=meta)


def _chunks(weights: HFWeights) -> Iterator[ChunkData]:
    for name, shape in weights.parameters.items():
        for box in row_runs(Rectangle((0,) * len(shape), shape)):
            yield ChunkData("weight", name, box, shape, partial(weights.read, name, box))


def refuse_non_empty(path: Path) -> None:
    """ConvertError unless there is nothing at the path, or an empty directory."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConvertError(f"{path}: is there already and not empty; remove it or choose another")
