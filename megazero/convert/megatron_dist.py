"""Megatron-Core's distributed checkpoints, format torch_dist: torch.distributed.checkpoint with its own names.

``.metadata`` lists every tensor with its chunks and where in which ``*.distcp`` file each lies, as torch.save wrote
it; ``common.pt`` holds what all ranks share. Layers of one kind are one tensor with a dimension for the layer. The
moments are ``optimizer.state.exp_avg.NAME`` and so on where they were saved parameter by parameter.
"""

from __future__ import annotations

import io
import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megazero.convert.foreign import Part, load_pickle, load_tensors
from megazero.convert.megatron_names import canonical
from megazero.convert.tensor_files import read_json
from megazero.errors import ConvertError
from megazero.sharding import Rectangle

_LAYERS = re.compile(r"(.*decoder\.layers)\.(?!\d)(.+)")
_STATE = re.compile(r"optimizer\.state\.(\w+)\.(.+)")
_KINDS = {"param": "master", "fp32_param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_OTHER = re.compile(r"optimizer\.|rng_state|rerun_state_machine|opt_param_scheduler|chained_")


def is_distributed(folder: Path) -> bool:
    return (folder / "metadata.json").is_file() or (folder / ".metadata").is_file()


def read_common(folder: Path) -> dict[str, Any]:
    """What all ranks share."""
    about = read_json(folder / "metadata.json", f"{folder / 'metadata.json'}: missing; copy the whole checkpoint")
    if about.get("sharded_backend") != "torch_dist":
        raise ConvertError(
            f"{folder / 'metadata.json'}: sharded_backend = {about.get('sharded_backend')!r} is not supported, "
            "only 'torch_dist' is; load it in Megatron-LM and save it again with --dist-ckpt-format torch_dist"
        )
    return load_tensors(folder / "common.pt")


class DistributedFiles:
    """``parts``: (kind, canonical name) → boxes, kind one of weight, master, exp_avg, exp_avg_sq.

    ``bucketed``: whether there are moments of another form, by buckets of the optimizer.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        metadata = load_pickle(folder / ".metadata")
        self.parts: dict[tuple[str, str], list[Part]] = {}
        self.bucketed = False
        self._read: dict[tuple[str, int], torch.Tensor] = {}
        self._of: str | None = None
        self._reading = threading.Lock()
        try:
            self._places = {
                (index.fqn, tuple(getattr(index, "offset", None) or ())): place
                for index, place in metadata.storage_data.items()
            }
            for name, tensor in metadata.state_dict_metadata.items():
                if hasattr(tensor, "chunks"):
                    self._add(name, tensor)
        except (AttributeError, KeyError, TypeError) as error:
            raise ConvertError(f"{folder / '.metadata'}: damaged, or of an unknown form: {error}") from error
        files = {place.relative_path for place in self._places.values()}
        lost = sorted(file for file in files if not (folder / file).is_file())
        if lost:
            raise ConvertError(f"{folder / lost[0]}: missing; copy the whole checkpoint")

    def _add(self, name: str, tensor: Any) -> None:
        kind, stem, state = "weight", name, _STATE.fullmatch(name)
        if state and state[1] in _KINDS:
            kind, stem = _KINDS[state[1]], state[2]
        elif _OTHER.match(name):
            self.bucketed |= ".bucket_idx_" in name
            return
        wanted = canonical(stem)
        if wanted is None:
            return
        stacked = _LAYERS.fullmatch(wanted)
        for chunk in tensor.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            read = partial(self._chunk, name, offsets)
            if not stacked:
                self.parts.setdefault((kind, wanted), []).append(Part(Rectangle(offsets, sizes), read))
                continue
            for layer in range(sizes[0]):
                key = f"{stacked[1]}.{offsets[0] + layer}.{stacked[2]}"
                part = Part(Rectangle(offsets[1:], sizes[1:]), partial(_row, read, layer))
                self.parts.setdefault((kind, key), []).append(part)

    def _chunk(self, name: str, offsets: tuple[int, ...]) -> torch.Tensor:
        """A chunk as it was saved; those of the tensor read last are kept, as q, k and v come from the same."""
        with self._reading:
            place, of = self._places[name, offsets], f"{name} {offsets[0]}"
            if self._of != of:
                self._read, self._of = {}, of
            key = place.relative_path, place.offset
            if key not in self._read:
                self._read[key] = self._load(name, place)
            return self._read[key]

    def _load(self, name: str, place: Any) -> torch.Tensor:
        path = self.folder / place.relative_path
        if getattr(place, "transform_descriptors", None):
            raise ConvertError(f"{path}: {name} is stored compressed, which is not supported; save it plain")
        try:
            with path.open("rb") as file:
                file.seek(place.offset)
                data = io.BytesIO(file.read(place.length))
            return torch.load(data, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ConvertError(f"{path}: damaged or cut short: {name} cannot be read; copy it again") from error


def _row(read: Any, row: int) -> torch.Tensor:
    return read()[row]
