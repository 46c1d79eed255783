"""What a torch optimizer keeps of the parts that a rank owns, to and from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megazero.checkpoint import Checkpoint, ChunkData
from megazero.checkpoint.writer import row_runs
from megazero.errors import CheckpointError
from megazero.foreign.optimizer import Part, ShardOptimizer
from megazero.foreign.plain_values import decode, encode
from megazero.foreign.shared_state import OPTIMIZER
from megazero.sharding import Piece, Rectangle, is_counted
from megazero.zero.offload.store import MOMENTS

# Of a group: what it holds, and how torch is to compute the update here.
_NOT_SAVED = ("params", "param_names", "fused", "foreach", "capturable", "differentiable")
_RATE = ("lr", "initial_lr")
# Classes that keep the same state.
_SAME = {"AdamW": "Adam", "FusedAdam": "Adam", "DeepSpeedCPUAdam": "Adam"}


def chunk_parts(
    kind: str, piece: Piece, box: Rectangle, values: torch.Tensor | Callable[[], torch.Tensor]
) -> Iterator[ChunkData]:
    """Values of the box, of any dtype, or what reads float32 ones, as chunks. Those that float32 cannot hold:
    CheckpointError."""
    if not isinstance(values, torch.Tensor) or values.dtype == torch.float32:
        yield ChunkData(kind, piece.name, box, piece.global_shape, values)
        return
    for run in row_runs(box):
        part = values[run.within(box)]
        yield ChunkData(kind, piece.name, run, piece.global_shape, lambda part=part: _widened(part, kind, piece.name))


def _widened(values: torch.Tensor, kind: str, name: str) -> torch.Tensor:
    wide = values.real.float() if values.is_complex() else values.float()
    if not (values.is_floating_point() and values.itemsize < 4) and not torch.equal(wide.to(values.dtype), values):
        raise CheckpointError(
            f"{kind} of {name}: {values.dtype} with values that float32, which checkpoints hold, cannot; "
            "make it a buffer of the module, which is saved in its own dtype"
        )
    return wide


def optimizer_chunks(optimizer: ShardOptimizer, coordinates: Mapping[str, int]) -> Iterator[ChunkData]:
    """State with an element for each of a parameter's, this rank's slice of it, where it is the one that counts."""
    for part in optimizer.all:
        shard = part.block.shard
        low, high = max(part.start(), shard[0]), min(_end(part), shard[1])
        if part.block.store is not None:  # read chunk by chunk as they are written
            for name in MOMENTS if optimizer.optimizer.state.get(part.parameter) else ():
                for piece, box, values in part.block.chunks(name, low, high):
                    if is_counted(piece, coordinates):
                        yield ChunkData(name, piece.name, box, piece.global_shape, values)
            continue
        for name, value in _state_of(optimizer, part).items():
            if _is_elementwise(value, part):
                flat, base = value.reshape(-1), part.start()
                for at, piece, box in part.block.layout.boxes(low, high):
                    if is_counted(piece, coordinates):
                        own = flat[at - base : at - base + box.numel].view(box.shape)
                        yield from chunk_parts(name, piece, box, own)


def optimizer_tensors(optimizer: ShardOptimizer) -> dict[str, torch.Tensor]:
    """State of other shapes, by a name among a rank's own state. Only whole parameters have any, alike on all ranks."""
    found = {}
    for part in optimizer.all:
        for name, value in _state_of(optimizer, part).items():
            if not isinstance(value, torch.Tensor) or not value.dim() or _is_elementwise(value, part):
                continue
            if optimizer.sharded.sharding.state:
                raise CheckpointError(
                    f"{_type(optimizer)} keeps {name} of shape {list(value.shape)} for a slice of shape "
                    f"{list(part.shape)}: no other layout could load that; use stage 0 with this optimizer"
                )
            found[f"{OPTIMIZER}{name}/{_name(part)}"] = value
    return found


def optimizer_meta(optimizer: ShardOptimizer) -> dict[str, Any]:
    """The rest: kind of optimizer, options and parameters of each group, the state that all parts have in common."""
    common: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    for part in optimizer.all:
        for name, value in _state_of(optimizer, part).items():
            if isinstance(value, torch.Tensor) and value.dim():
                dtypes[name] = _dtype_name(value)
                continue
            where = f"{_type(optimizer)}'s state {name}"
            saved = encode(value, where)
            if isinstance(value, torch.Tensor):
                saved = {"dtype": _dtype_name(value), "value": saved}
            if common.setdefault(name, saved) != saved:
                raise CheckpointError(f"{where} differs from parameter to parameter, which a checkpoint cannot hold")
    groups = optimizer.optimizer.param_groups
    return {
        "type": _type(optimizer),
        "groups": [
            {k: encode(v, f"optimizer group {i}, {k}") for k, v in group.items() if k not in _NOT_SAVED}
            for i, group in enumerate(groups)
        ],
        "group_of": group_of(optimizer),
        "common": common,
        "dtypes": dtypes,
    }


def joined_meta(metas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """``optimizer_meta`` of stages that each hold other parameters, as of one process that holds them all."""
    for key in ("common", "dtypes"):
        known = [meta[key] for meta in metas if meta[key]]
        if any(other != known[0] for other in known):
            raise CheckpointError(
                f"{metas[0]['type']}'s state differs from stage to stage, which a checkpoint cannot hold"
            )
    joined = {key: {k: v for meta in metas for k, v in meta[key].items()} for key in ("group_of", "common", "dtypes")}
    return {**metas[0], **joined}


def check_optimizer(
    saved: Mapping[str, Any] | None, optimizer: ShardOptimizer | None, here: Mapping[str, int] | None = None
) -> str | None:
    """Why this optimizer cannot go on from what was saved, if so. ``here``: of all stages, parameter → its group."""
    if saved is None or optimizer is None:
        if saved is optimizer is None:
            return None
        return (
            "was saved without an optimizer"
            if saved is None
            else "has an optimizer's state, and nothing is trained here"
        )
    before, now = saved["type"], _type(optimizer)
    if _SAME.get(before, before) != _SAME.get(now, now):
        return f"has the state of {before}, and this run uses {now}"
    if len(saved["groups"]) != len(optimizer.optimizer.param_groups):
        return f"has {len(saved['groups'])} parameter groups, and this run {len(optimizer.optimizer.param_groups)}"
    here = group_of(optimizer) if here is None else here
    for name in (*here, *saved["group_of"]):
        was, is_ = saved["group_of"].get(name), here.get(name)
        if was != is_:
            spelled = [f"in parameter group {index}" if index is not None else "not trained" for index in (was, is_)]
            return f"has {name} {spelled[0]}, and here it is {spelled[1]}"
    return None


def load_optimizer(
    optimizer: ShardOptimizer,
    checkpoint: Checkpoint,
    saved: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    keep_rates: bool,
) -> None:
    """``tensors``: those of ``optimizer_tensors``, by their names. ``keep_rates``: learning rates stay as they are."""
    for group, options in zip(optimizer.optimizer.param_groups, saved["groups"], strict=True):
        for name, value in options.items():
            if keep_rates and name in _RATE:
                continue
            if isinstance(group.get(name), torch.Tensor):
                group[name].fill_(decode(value))
            else:
                group[name] = decode(value)
    if not saved["common"] and not checkpoint.kinds - {"weight"}:
        optimizer.forget_state()
        return  # saved before the first step
    for group, parts in zip(optimizer.optimizer.param_groups, optimizer.parts, strict=True):
        for part in parts:
            device = part.parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
            state = {name: _common(value, device) for name, value in saved["common"].items()}
            for kind in sorted(checkpoint.kinds - {"weight"}):
                dtype = getattr(torch, saved["dtypes"].get(kind, "float32"))
                if (value := _read(checkpoint, kind, part, dtype)) is not None:
                    state[kind] = value
            for key, value in tensors.items():
                if key.startswith(OPTIMIZER) and not optimizer.sharded.sharding.state:
                    kind, _, name = key.removeprefix(OPTIMIZER).partition("/")
                    if name == _name(part):
                        state[kind] = value.to(part.parameter.device)
            optimizer.set_state(part, state)


def _read(checkpoint: Checkpoint, kind: str, part: Part, dtype: torch.dtype) -> torch.Tensor | None:
    """A part's share of one kind of state; zero in padding. None where the checkpoint has nothing of it."""
    boxes = list(part.block.layout.boxes(part.start(), _end(part)))
    held = [(at, piece, box) for at, piece, box in boxes if checkpoint.has(kind, piece.name)]
    if boxes and not held:
        return None
    values = torch.zeros(_end(part) - part.start(), dtype=dtype, device=part.parameter.device)
    for at, piece, box in held:
        first = at - part.start()
        values[first : first + box.numel].copy_(checkpoint.read(kind, piece.name, box).reshape(-1))
    return values.view(part.shape)


def optimizer_boxes(optimizer: ShardOptimizer, checkpoint: Checkpoint) -> Iterator[tuple[str, str, Rectangle]]:
    """What ``load_optimizer`` will read."""
    for part in optimizer.all:
        for _, piece, box in part.block.layout.boxes(part.start(), _end(part)):
            for kind in checkpoint.kinds - {"weight"}:
                if checkpoint.has(kind, piece.name):
                    yield kind, piece.name, box


def _common(saved: Any, device: torch.device) -> Any:
    if isinstance(saved, dict) and saved.keys() == {"dtype", "value"}:
        return torch.tensor(saved["value"], dtype=getattr(torch, saved["dtype"]), device=device)
    return decode(saved)


def _state_of(optimizer: ShardOptimizer, part: Part) -> Mapping[str, Any]:
    return optimizer.state_of(part)


def _end(part: Part) -> int:
    return part.start() + part.parameter.numel()


def _name(part: Part) -> str:
    """Of the one parameter that the part is."""
    return next(entry.name for entry in part.block.layout.entries if entry.spec.numel and entry.start == part.start())


def _is_elementwise(value: Any, part: Part) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and tuple(value.shape) == part.shape


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _type(optimizer: ShardOptimizer) -> str:
    return type(optimizer.optimizer).__name__


def group_of(optimizer: ShardOptimizer) -> dict[str, int]:
    """Every trained parameter that has elements → the index of its group."""
    return {
        entry.name: int(group)
        for block in optimizer.sharded.trained
        for group, (low, high) in block.layout.groups.items()
        for entry in block.layout.entries
        if entry.spec.numel and low <= entry.start < high
    }
