"""A small model's training state, cut as tensor parallelism, a pipeline and ZeRO cut it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megazero.models.config import ModelConfig
from megazero.models.parameters import parameter_shapes
from megazero.sharding import Piece, Rectangle, flat_range_boxes

KINDS = ("weight", "exp_avg", "exp_avg_sq")
CONFIG = ModelConfig(num_layers=3, hidden_size=24, num_attention_heads=6, vocab_size=53, max_position_embeddings=20)
SHAPES = parameter_shapes(CONFIG)
META = {"model": CONFIG.model_dump()}

State = dict[tuple[str, str], torch.Tensor]
Boxes = Iterator[tuple[str, str, Rectangle]]


def make_state(seed: int) -> State:
    """(kind, global name) → float32 values."""
    generator = torch.Generator().manual_seed(seed)
    return {(kind, name): torch.randn(shape, generator=generator) for kind in KINDS for name, shape in SHAPES.items()}


def stage_of(name: str, pp: int) -> int:
    if name.startswith("layers."):
        return int(name.split(".")[1]) * pp // CONFIG.num_layers
    return 0 if name.startswith("embedding") else pp - 1


def tp_box(name: str, shape: tuple[int, ...], tp: int, rank: int) -> Rectangle:
    """Rows of what is column-parallel, columns of what is row-parallel, all of the rest; sizes need not divide."""
    row_parallel = name.endswith(("out.weight", "down.weight"))
    dim = 1 if row_parallel else 0
    if "norm" in name or "position" in name or (name.endswith("bias") and ("out" in name or "down" in name)):
        return Rectangle((0,) * len(shape), shape)
    low, high = shape[dim] * rank // tp, shape[dim] * (rank + 1) // tp
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim], sizes[dim] = low, high - low
    return Rectangle(tuple(offsets), tuple(sizes))


def boxes_of(rank: int, tp: int, pp: int, dp: int) -> Boxes:
    """What a rank owns: of its stage, its tensor-parallel box, the dp-th slice of that flattened."""
    tp_rank, dp_rank, pp_rank = rank % tp, rank // tp % dp, rank // tp // dp
    for kind in KINDS:
        for name, shape in SHAPES.items():
            if stage_of(name, pp) != pp_rank:
                continue
            box = tp_box(name, shape, tp, tp_rank)
            numel = box.numel
            for _, part in flat_range_boxes(
                Piece(name, shape, box), numel * dp_rank // dp, numel * (dp_rank + 1) // dp
            ):
                yield kind, name, part


def part_of(state: State, kind: str, name: str, box: Rectangle) -> torch.Tensor:
    shape = SHAPES[name]
    return state[kind, name][box.within(Rectangle((0,) * len(shape), shape))]


def chunks_of(state: State, rank: int, tp: int, pp: int, dp: int) -> list[tuple]:
    return [
        (kind, name, box, SHAPES[name], part_of(state, kind, name, box))
        for kind, name, box in boxes_of(rank, tp, pp, dp)
    ]
