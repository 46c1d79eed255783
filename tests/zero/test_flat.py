"""Flat layouts: every element in one shard, and the boxes of all ranks are the model, once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.build import describe_stage
from megazero.config import Config
from megazero.layout import Layout
from megazero.models.parameters import parameter_shapes
from megazero.sharding import ShardSpec, is_counted, whole
from megazero.tensor_parallel.mappings import TensorParallel
from megazero.zero.blocks import decoder_units
from megazero.zero.flat import ALIGNMENT, FlatLayout, buckets

shapes = st.one_of(
    st.tuples(st.integers(0, 400)),
    st.tuples(st.integers(1, 30), st.integers(0, 40)),
)
quick = settings(derandomize=True, deadline=None, max_examples=100)


def specs_of(drawn: list[tuple[int, ...]]) -> dict[str, ShardSpec]:
    return {f"p{i}": whole(f"p{i}", shape) for i, shape in enumerate(drawn)}


@quick
@given(st.lists(shapes, min_size=1, max_size=8), st.integers(1, 9))
def test_every_element_lies_once_and_in_one_shard(drawn: list[tuple[int, ...]], shards: int) -> None:
    layout = FlatLayout.build("block", specs_of(drawn), shards)
    owners = np.zeros(layout.numel, np.int64)
    for rank in range(shards):
        start, end = layout.shard(rank)
        assert end - start == layout.numel // shards and start % ALIGNMENT == 0
        owners[start:end] += 1
    assert (owners == 1).all()
    held = np.zeros(layout.numel, np.int64)
    for entry in layout.entries:
        assert entry.start % ALIGNMENT == 0 or entry.spec.numel == 0
        held[entry.start : entry.end] += 1
    for start, end in layout.gaps():
        assert start < end
        held[start:end] += 1
    assert (held == 1).all()
    assert [e.name for e in layout.entries if e.spec.numel] != [] or layout.numel == 0
    assert sum(e.spec.numel for e in layout.entries) == sum(spec.numel for spec in specs_of(drawn).values())


@quick
@given(st.lists(shapes, min_size=1, max_size=8), st.integers(1, 9))
def test_an_optimizer_group_is_one_range_of_a_shard(drawn: list[tuple[int, ...]], shards: int) -> None:
    specs = specs_of(drawn)
    layout = FlatLayout.build("block", specs, shards)
    for rank in range(shards):
        start, end = layout.shard(rank)
        ranges = layout.group_ranges(start, end)
        for entry in layout.entries:
            first, last = max(entry.start, start), min(entry.end, end)
            if first < last:
                low, high = ranges["decay" if len(entry.spec.local_shape) > 1 else "no_decay"]
                assert low <= first and last <= high
        assert sum(high - low for low, high in ranges.values()) <= end - start


@quick
@given(st.lists(shapes, min_size=1, max_size=8), st.integers(1, 9), st.data())
def test_boxes_of_a_range_are_its_elements(drawn: list[tuple[int, ...]], shards: int, data: st.DataObject) -> None:
    specs = specs_of(drawn)
    layout = FlatLayout.build("block", specs, shards)
    start = data.draw(st.integers(0, layout.numel))
    end = data.draw(st.integers(start, layout.numel))
    # Numbers of the buffer's elements, seen through the parameters.
    tensors = {e.name: np.arange(e.start, e.end).reshape(e.spec.local_shape) for e in layout.entries}
    found = []
    for at, piece, box in layout.boxes(start, end):
        values = tensors[piece.name][tuple(slice(o, o + n) for o, n in zip(box.offsets, box.shape))].reshape(-1)
        assert np.array_equal(values, np.arange(at, at + box.numel))
        found += values.tolist()
    assert found == [i for e in layout.entries for i in range(e.start, e.end) if start <= i < end]


def test_sizes_of_a_block_worked_by_hand() -> None:
    """A (8, 24) matrix, a bias of 24, one of 0: 192, then 64 of which 24 are used; 256 in all, 384 for 6 ranks."""
    specs = {"bias": whole("bias", (24,)), "weight": whole("weight", (8, 24)), "none": whole("none", (0,))}
    layout = FlatLayout.build("block", specs, 2)
    assert [(e.name, e.start) for e in layout.entries] == [("weight", 0), ("bias", 192), ("none", 256)]
    assert dict(layout.groups) == {"decay": (0, 192), "no_decay": (192, 256)}
    assert layout.numel == 256 and layout.shard(1) == (128, 256)
    assert list(layout.gaps()) == [(216, 256)]
    assert FlatLayout.build("block", specs, 6).numel == 384
    assert FlatLayout.build("block", {"none": specs["none"]}, 3).numel == 0


MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"num_layers": 3, "hidden_size": 16, "num_attention_heads": 8, "vocab_size": 37},
    "one_kv_head": {
        "num_layers": 3,
        "hidden_size": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "position": "rotary",
        "qk_norm": True,
        "head_dim": 4,
        "vocab_size": 5,
        "tie_word_embeddings": False,
    },
    "two_kv_heads": {
        "num_layers": 4,
        "hidden_size": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "activation": "swiglu",
        "position": "rotary",
        "vocab_size": 101,
    },
}


@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "whole"])
@pytest.mark.parametrize("grid", [(1, 3, 2), (2, 2, 3), (4, 1, 2), (8, 2, 3)], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_all_ranks_together_hold_the_model_once(model: str, grid: tuple[int, int, int], sequence: bool) -> None:
    """Of each element one copy counts, and all that hold it, and only they, are named as its replicas."""
    tp, pp, dp = grid
    tree = {"model": MODELS[model], "parallel": {"tp": tp, "pp": pp, "vocab_multiple": 4}, "data": {"seq_length": 16}}
    config = Config.from_dict(tree)
    ranks = Layout(tp, pp, dp)
    global_shapes = parameter_shapes(config.model.architecture)
    counted = {name: np.zeros(shape, np.int64) for name, shape in global_shapes.items()}
    held = {name: np.zeros(shape, np.int64) for name, shape in global_shapes.items()}
    promised = {name: np.zeros(shape, np.int64) for name, shape in global_shapes.items()}
    for rank in range(ranks.world_size):
        coordinates = ranks.coordinates(rank)
        place = TensorParallel(tp, coordinates["tp"], sequence and tp > 1)
        decoder, specs = describe_stage(config, config.model.architecture, coordinates, place)
        for plan in decoder_units(decoder, specs):
            layout = FlatLayout.build(plan.name, plan.specs, dp)
            for _, piece, box in layout.boxes(*layout.shard(coordinates["dp"])):
                index = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.shape))
                assert piece.global_shape == global_shapes[piece.name]
                held[piece.name][index] += 1
                counted[piece.name][index] += is_counted(piece, coordinates)
                replicas = 1
                for replication in piece.replication:
                    assert coordinates[replication.axis] in replication.members
                    replicas *= len(replication.members)
                promised[piece.name][index] += replicas
    for name in global_shapes:
        assert (counted[name] == 1).all(), name
        # Each of n holders promises n.
        assert np.array_equal(promised[name], held[name] ** 2), name


@quick
@given(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 2000))
def test_buckets_are_whole_consecutive_blocks_within_the_limit(rows: list[int], limit: int) -> None:
    found = buckets([n * 16 for n in rows], limit)
    assert [i for bucket in found for i in bucket] == list(range(len(rows)))
    sizes = [[rows[i] * 16 for i in bucket] for bucket in found]
    assert all(bucket for bucket in found)
    assert all(sum(bucket) <= limit or len(bucket) == 1 for bucket in sizes)
    for bucket, following in zip(sizes, sizes[1:]):
        assert sum(bucket) + following[0] > limit
