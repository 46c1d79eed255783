"""The tensors of a DeepSpeed checkpoint: which elements of which rank's flat buffers each parameter is.

Stages 1 and 2 join the parameters of each optimizer group end to end and give each rank a run of that. Stage 3 cuts
every parameter by itself into equal parts, the last one padded, and joins a rank's parts. The order is that of
``param_shapes`` in the model's file. Moments lie as the float32 masters do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megazero.convert.foreign import MOMENTS, load_tensors
from megazero.errors import ConvertError

_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


class Piece(NamedTuple):
    """Elements [start, end) of the parameter are those from ``first`` on in a rank's flat buffer of a group."""

    start: int
    end: int
    rank: int
    group: int
    first: int


class ZeroFiles:
    """The files of one tag.

    ``state``: the model's file. ``shapes``: stored parameter → shape. ``stage``: of ZeRO, 0 where there are no
    optimizer files. ``steps``: Adam's count, None where its moments are not all there. Raises ConvertError.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state, self.model_file = self._open_model()
        ranks = self._open_optimizer()
        self.stage = _stage(ranks[0]) if ranks else 0
        self._module: dict[str, torch.Tensor] = {
            name: tensor
            for name, tensor in (self.state.get("module") or {}).items()
            if isinstance(tensor, torch.Tensor) and name not in set(self.state.get("buffer_names") or ())
        }
        # Kind → rank → flat buffers by group.
        self._flat: dict[str, list[list[torch.Tensor]]] = {}
        self._pieces: dict[str, list[Piece]] = {}
        self.steps: int | None = None
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._module.items()}
        if ranks:
            self._lay_out(ranks)
        elif any(tensor.numel() == 0 for tensor in self._module.values()):
            raise ConvertError(
                f"{folder}: no *_optim_states.pt files; ZeRO stage 3 keeps the weights in them alone: copy them too"
            )

    def elements(self, kind: str, name: str, start: int, end: int) -> torch.Tensor:
        """Elements [start, end) of a flattened parameter in row-major order, float32, the caller's own."""
        if name not in self._pieces:
            return self._module[name].reshape(-1)[start:end].to(torch.float32, copy=True)
        result = torch.empty(end - start, dtype=torch.float32)
        for piece in self._pieces[name]:
            low, high = max(start, piece.start), min(end, piece.end)
            if low < high:
                first = piece.first + low - piece.start
                result[low - start : high - start] = self._flat[kind][piece.rank][piece.group][
                    first : first + high - low
                ]
        return result

    def has_moments(self, name: str) -> bool:
        return self.steps is not None and name in self._pieces

    def _open_model(self) -> tuple[dict[str, Any], Path]:
        names = sorted(path.name for path in self.folder.iterdir())
        layers = [name for name in names if re.match(r"layer_\d+-", name)]
        if layers:
            raise ConvertError(
                f"{self.folder / layers[0]}: a pipeline module's checkpoint (or one of experts) is not supported; "
                "gather the weights into a Hugging Face directory with the program that wrote it"
            )
        found = [(match, name) for name in names if (match := _MODEL.fullmatch(name))]
        cut = [name for match, name in found if int(match[2])]
        if cut:
            raise ConvertError(
                f"{self.folder / cut[0]}: written by several model-parallel ranks, which is not supported; "
                "gather the weights into a Hugging Face directory with the program that wrote it"
            )
        first = [name for match, name in found if not int(match[1] or 0)]
        if not first:
            raise ConvertError(
                f"{self.folder}: no mp_rank_00_model_states.pt and no zero_pp_rank_0_mp_rank_00_model_states.pt"
            )
        path = self.folder / first[0]
        state = load_tensors(path)
        if not isinstance(state, dict) or "module" not in state:
            raise ConvertError(f"{path}: has no 'module'; it is not DeepSpeed's file of a model")
        if state.get("num_experts"):
            raise ConvertError(f"{path}: num_experts = {state['num_experts']}: models of experts are not supported")
        return state, path

    def _open_optimizer(self) -> list[Mapping[str, Any]]:
        """The optimizer's state of each data-parallel rank; empty where no file of it is there."""
        files = {int(match[1]): path for path in self.folder.iterdir() if (match := _OPTIMIZER.fullmatch(path.name))}
        if not files:
            return []
        some = next(iter(files.values()))
        count = self._optimizer_state(some).get("partition_count")
        world = max(count) if isinstance(count, list | tuple) else int(count or len(files))
        lost = sorted(set(range(world)) - files.keys())
        if lost:
            name = re.sub(r"pp_rank_\d+", f"pp_rank_{lost[0]}", some.name)
            raise ConvertError(f"{self.folder / name}: missing: {world} ranks saved; copy the whole folder")
        if len(files) > world:
            raise ConvertError(f"{files[max(files)]}: of another save: the others are of {world} ranks; remove it")
        return [self._optimizer_state(files[rank]) for rank in range(world)]

    def _optimizer_state(self, path: Path) -> Mapping[str, Any]:
        state = load_tensors(path)
        found = state.get("optimizer_state_dict") if isinstance(state, dict) else None
        if not isinstance(found, dict):
            raise ConvertError(f"{path}: has no 'optimizer_state_dict'; it is not DeepSpeed's file of an optimizer")
        return found

    def _lay_out(self, ranks: list[Mapping[str, Any]]) -> None:
        groups = self.state.get("param_shapes")
        if not groups:
            raise ConvertError(f"{self.model_file}: has no param_shapes; it was saved without ZeRO, or is too old")
        key = "fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"
        masters = [[flat.reshape(-1) for flat in state.get(key) or ()] for state in ranks]
        self._flat["weight"] = masters
        self.shapes.update({name: tuple(shape) for group in groups for name, shape in group.items()})
        try:
            self._pieces = _cut_each(groups, masters) if self.stage == 3 else _cut_groups(groups, masters, ranks[0])
        except IndexError:
            raise ConvertError(
                f"{self.folder}: the optimizer's files hold fewer elements than param_shapes in {self.model_file.name} "
                "has; they are of different saves"
            ) from None
        moments = [_moments(state, self.stage, len(masters[0])) for state in ranks]
        if all(found is not None for found in moments):
            for kind in MOMENTS:
                self._flat[kind] = [found[kind] for found in moments if found is not None]
            self.steps = next(found["step"] for found in moments if found is not None)


def _stage(state: Mapping[str, Any]) -> int:
    """An enum in the file; the optimizer of plain bf16 training has none and lies as stage 1 does."""
    stage = state.get("zero_stage", 1)
    return int(stage.arguments[0]) if hasattr(stage, "arguments") else int(stage)


def _cut_groups(
    groups: list[Mapping[str, Any]], flats: list[list[torch.Tensor]], state: Mapping[str, Any]
) -> dict[str, list[Piece]]:
    """Stages 1 and 2. Newer versions pad each parameter, and say by how much."""
    pieces: dict[str, list[Piece]] = {}
    paddings = state.get("param_alignment_paddings")
    for group, shapes in enumerate(groups):
        ends, end = [], 0
        for flat in flats:
            end += flat[group].numel()
            ends.append(end)
        offset = 0
        for number, (name, shape) in enumerate(shapes.items()):
            size = math.prod(shape)
            if offset + size > ends[-1]:
                raise IndexError(name)
            pieces[name] = []
            for rank, end in enumerate(ends):
                begin = end - flats[rank][group].numel()
                low, high = max(offset, begin), min(offset + size, end)
                if low < high:
                    pieces[name].append(Piece(low - offset, high - offset, rank, group, low - begin))
            offset += size + (int(paddings[group][number]) if paddings else 0)
    return pieces


def _cut_each(groups: list[Mapping[str, Any]], flats: list[list[torch.Tensor]]) -> dict[str, list[Piece]]:
    """Stage 3. A rank's buffers by sub-group are one after the other; no part of a parameter is in two of them."""
    pieces: dict[str, list[Piece]] = {}
    world, group, first = len(flats), 0, 0
    for name, shape in ((name, shape) for shapes in groups for name, shape in shapes.items()):
        size = math.prod(shape)
        part = -(-size // world)
        while first == flats[0][group].numel():
            group, first = group + 1, 0
        if first + part > flats[0][group].numel():
            raise IndexError(name)
        pieces[name] = [
            Piece(rank * part, min(size, (rank + 1) * part), rank, group, first)
            for rank in range(world)
            if rank * part < size
        ]
        first += part
    return pieces


def _moments(state: Mapping[str, Any], stage: int, groups: int) -> dict[str, Any] | None:
    """exp_avg and exp_avg_sq by group, and Adam's step; None where the optimizer has no such state."""
    base = state.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")
    if isinstance(base, list):
        # The elastic form: a state for each group, the step apart.
        by_group, steps = dict(enumerate(base)), [{"step": state.get("base_optimizer_state_step")}]
    elif isinstance(base, Mapping):
        by_group, steps = base.get("state") or {}, base.get("param_groups") or []
    else:
        return None
    if any(group not in by_group or any(kind not in by_group[group] for kind in MOMENTS) for group in range(groups)):
        return None
    step = next((each["step"] for each in (by_group[0], *steps) if each.get("step") is not None), None)
    if step is None:
        return None
    found: dict[str, Any] = {kind: [by_group[group][kind].reshape(-1) for group in range(groups)] for kind in MOMENTS}
    return {**found, "step": int(step)}
