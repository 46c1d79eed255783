"""Megatron's checkpoints of before: a folder mp_rank_TT[_PPP] per tensor and pipeline rank, each with one file.

A file's layers are numbered from 0 in each stage, and with interleaved stages in each of model0, model1, …; the order
of the model is model0 of every stage, then model1 of every stage. Stages need not have the same number of layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megazero.convert.foreign import Part, load_tensors
from megazero.convert.megatron_names import COLUMN_CUT, ROW_CUT, canonical, in_layer
from megazero.errors import ConvertError
from megazero.models.config import ModelConfig
from megazero.sharding import Rectangle

_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_CHUNK = re.compile(r"model(\d*)")


def rank_files(folder: Path) -> dict[tuple[int, int], Path]:
    """(tensor rank, pipeline rank) → file, of those that are there."""
    found: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.glob("mp_rank_*")):
        ranks = _FOLDER.fullmatch(path.name)
        file = next((path / name for name in _FILES if (path / name).is_file()), None)
        if ranks and file:
            if ranks[3]:
                raise ConvertError(f"{path}: a rank of expert parallelism: models of experts are not supported")
            found[int(ranks[1]), int(ranks[2] or 0)] = file
    return found


def read_common(folder: Path) -> dict[str, Any]:
    """The first rank's file, in which everything but its model is all ranks'."""
    return load_tensors(next(iter(rank_files(folder).values())))


class LegacyFiles:
    """``parts``: (kind, canonical name) → boxes, of the kind weight."""

    bucketed = False

    def __init__(self, folder: Path, args: Any, config: ModelConfig) -> None:
        """``args``: as saved, None where they are not."""
        files = rank_files(folder)
        tp, pp = (max(rank[axis] for rank in files) + 1 for axis in (0, 1))
        tp = max(tp, getattr(args, "tensor_model_parallel_size", None) or 1)
        pp = max(pp, getattr(args, "pipeline_model_parallel_size", None) or 1)
        lost = [(t, p) for p in range(pp) for t in range(tp) if (t, p) not in files]
        if lost:
            t, p = lost[0]
            name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "")
            raise ConvertError(
                f"{folder / name / _FILES[0]}: missing: it was saved by {tp} tensor and {pp} pipeline ranks; "
                "copy the whole checkpoint"
            )
        self._config = config
        self.parts: dict[tuple[str, str], list[Part]] = {}
        # By (chunk, stage), each a list over tensor ranks.
        stages: dict[tuple[int, int], list[dict[str, torch.Tensor]]] = {}
        for p in range(pp):
            for t in range(tp):
                state = load_tensors(files[t, p])
                version = float(state.get("checkpoint_version") or 0)
                chunks = {int(found[1] or 0): key for key in state if (found := _CHUNK.fullmatch(str(key)))}
                if not chunks:
                    raise ConvertError(f"{files[t, p]}: has no 'model'; it is no checkpoint of Megatron-LM")
                for chunk, key in chunks.items():
                    tensors = {name: self._ordered(name, value, version, tp) for name, value in _flat(state[key])}
                    stages.setdefault((chunk, p), []).append(tensors)
        first = 0
        for _, ranks in sorted(stages.items()):
            first += self._add_stage(ranks, first)

    def _add_stage(self, ranks: list[dict[str, torch.Tensor]], first: int) -> int:
        """Adds a stage whose first layer is the model's ``first``; returns how many layers it has."""
        count, gated = 0, self._config.activation == "swiglu"
        for name, tensor in ranks[0].items():
            layer, key = in_layer(name), name
            if layer:
                count = max(count, layer[0] + 1)
                key = f"decoder.layers.{first + layer[0]}.{layer[1]}"
            # A tied embedding is in the last stage once more.
            if ("weight", key) in self.parts:
                continue
            axis = 0 if COLUMN_CUT.fullmatch(name) else 1 if ROW_CUT.fullmatch(name) else None
            held = [tensor] if axis is None else [rank[name] for rank in ranks if name in rank]
            self.parts["weight", key] = _cut_parts(held, axis or 0, gated and ".linear_fc1." in name)
        return count

    def _ordered(self, name: str, tensor: torch.Tensor, version: float, tp: int) -> torch.Tensor:
        """Rows of a fused q, k, v as versions 2.0 and 3.0 have them: by head, not q of all heads first (0), nor
        feature by feature (1.0)."""
        if version >= 2 or ".linear_qkv." not in name or "layer_norm" in name:
            return tensor
        heads, size = self._config.num_attention_heads // tp, self._config.head_size
        shape = (3, heads, size) if version == 0 else (heads, size, 3)
        rows = tensor.view(*shape, *tensor.shape[1:])
        return (rows.transpose(0, 1) if version == 0 else rows.transpose(1, 2)).reshape(tensor.shape)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(canonical name, tensor) of a state dict of state dicts."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor) and (name := canonical(f"{prefix}{key}")):
            yield name, value


def _cut_parts(held: list[torch.Tensor], axis: int, gated: bool) -> list[Part]:
    """Parts of the tensor that the ranks' pieces make up side by side; of a gated one, the gates come first."""
    parts, start, half = [], 0, sum(piece.shape[0] for piece in held) // 2
    for piece in held:
        for number, rows in enumerate(piece.chunk(2) if gated else (piece,)):
            offsets = [0] * piece.dim()
            offsets[axis] = start + number * half
            parts.append(Part(Rectangle(tuple(offsets), tuple(rows.shape)), partial(_same, rows)))
        start += piece.shape[axis] // (2 if gated else 1)
    return parts


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
