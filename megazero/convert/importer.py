"""A Hugging Face directory, or another program's checkpoint, into a megazero checkpoint: step 0."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint import save
from megazero.checkpoint.writer import ChunkData, row_runs
from megazero.convert import carried
from megazero.convert.ahead import Job, ahead
from megazero.convert.hf_reader import HFWeights
from megazero.convert.target import new_directory, refuse_non_empty
from megazero.convert.weights import Weights, open_source
from megazero.errors import CheckpointError, ConvertError
from megazero.sharding import Rectangle

Progress = Callable[[int, int], None]
"""Called with (bytes of the target made, all of its bytes), from the calling thread."""

# Two chunks being made or written, besides the one just handed over.
_WORKERS, _IN_MEMORY = 1, 192 * 2**20


def import_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    progress: Progress | None = None,
    config_json: str | os.PathLike[str] | None = None,
) -> Path:
    """Writes the checkpoint under ``target`` and returns its directory; a few chunks are in memory at a time.

    Weights alone make a step 0, to start from as model.init_from; where another program's optimizer state is whole,
    the step is its own and a run resumes there. Tokenizer and generation files go into the folder carried.FOLDER.
    ``target`` must be missing or empty and appears at once, whole. ``config_json``: see open_weights. Raises
    ConvertError where the source cannot be taken or the target cannot be written.
    """
    refuse_non_empty(target)
    weights = open_source(source, config_json)
    step, meta, parts = _contents(weights)
    along = carried.files_of(Path(source))
    with new_directory(target) as scratch:
        if along:
            (scratch / carried.FOLDER).mkdir()
            carried.copy(along, scratch / carried.FOLDER)
        with _made_ahead(parts, progress) as chunks:
            try:
                saved = save(scratch, step, chunks, meta=meta)
            except CheckpointError as error:
                raise ConvertError(str(error).replace(str(scratch), str(target))) from error
    return Path(target) / saved.name


def _contents(weights: Weights) -> tuple[int, dict[str, Any], list[ChunkData]]:
    """Step, meta and chunks of the checkpoint."""
    training = getattr(weights, "training", None)
    if training is not None:
        return training.step, training.meta() | {"eod_id": weights.end_of_text}, list(training.chunks())
    meta: dict[str, Any] = {
        "model": weights.config.model_dump(),
        "layout": {"tp": 1, "pp": 1, "dp": 1},
        "consumed_samples": 0,
        "eod_id": weights.end_of_text,
    }
    if isinstance(weights, HFWeights):
        meta["huggingface"] = {"model_type": weights.family.model_type, "tokens": weights.tokens}
    parts = [
        ChunkData("weight", name, box, shape, partial(weights.read, name, box, dtype), dtype)
        for name, shape in weights.parameters.items()
        for dtype in [weights.dtype_of(name)]
        for box in row_runs(Rectangle((0,) * len(shape), shape))
    ]
    # In the order in which the writer asks for them.
    return 0, meta, sorted(parts, key=lambda part: -part.dtype.itemsize)


@contextlib.contextmanager
def _made_ahead(parts: list[ChunkData], progress: Progress | None) -> Iterator[Iterator[ChunkData]]:
    """The same chunks, each made ahead of its turn; the writer asks for their tensors in order."""
    total, done = sum(part.size for part in parts), 0

    def take(wanted: ChunkData) -> torch.Tensor:
        nonlocal done
        part, tensor = next(tensors)
        assert part is wanted, (part.key, wanted.key)
        done += part.size
        if progress is not None:
            progress(done, total)
        return tensor

    jobs = (Job(part.size, partial(_make, part)) for part in parts)
    with contextlib.closing(ahead(jobs, _WORKERS, _IN_MEMORY)) as tensors:
        yield (part._replace(tensor=partial(take, part)) for part in parts)


def _make(part: ChunkData) -> tuple[ChunkData, torch.Tensor]:
    assert not isinstance(part.tensor, torch.Tensor), part.key
    return part, part.tensor()
