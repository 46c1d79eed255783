"""Saved in one layout, loaded in another: every element comes back, moments included."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
import safetensors.torch
import torch

from megazero.checkpoint import CheckpointWriter, OneProcess, newest, open_checkpoint, save, writer
from megazero.errors import CheckpointError
from megazero.sharding import Rectangle
from tests.checkpoint import states
from tests.checkpoint.thread_group import run_ranks


def save_by(root: Path, step: int, state: states.State, tp: int, pp: int, dp: int, **options) -> list:
    def work(group):
        rank_state = {
            "rng": torch.full((7,), group.rank, dtype=torch.uint8),
            "count": torch.tensor(group.rank + 10**12),
        }
        chunks = states.chunks_of(state, group.rank, tp, pp, dp)
        meta = {**states.META, "layout": [tp, pp, dp]}
        return CheckpointWriter(root, group, **options).save(step, chunks, rank_state, meta)

    return run_ranks(tp * pp * dp, work)


def assert_loads(path: Path, state: states.State, tp: int, pp: int, dp: int) -> None:
    """Each rank's boxes hold the state's values, bitwise."""
    with open_checkpoint(path) as checkpoint:
        checkpoint.check_matches(states.SHAPES)
        for rank in range(tp * pp * dp):
            boxes = list(states.boxes_of(rank, tp, pp, dp))
            checkpoint.verify(boxes)
            for kind, name, box in boxes:
                assert torch.equal(checkpoint.read(kind, name, box), states.part_of(state, kind, name, box)), name


# (tp, pp, dp); from 16 ranks to 24 among them
SAVED = [(1, 1, 1), (4, 2, 2), (3, 1, 5)]
LOADED = [(1, 1, 1), (2, 3, 4), (4, 1, 1), (1, 1, 7)]


@pytest.mark.parametrize("saved", SAVED)
def test_any_layout_loads_any_other(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "MAX_CHUNK_BYTES", 600)
    state = states.make_state(1)
    results = save_by(tmp_path, 5, state, *saved)
    assert results == [tmp_path / "step_00000005"] * len(results)
    for loaded in LOADED:
        assert_loads(tmp_path, state, *loaded)
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.verify()
        assert checkpoint.step == 5 and checkpoint.meta["layout"] == list(saved)
        assert checkpoint.parameters == states.SHAPES
        for rank in range(checkpoint.world_size):
            own = checkpoint.rank_state(rank)
            assert own["rng"].tolist() == [rank] * 7 and int(own["count"]) == rank + 10**12
        assert torch.equal(
            checkpoint.read("exp_avg", "layers.2.mlp.down.weight"), state["exp_avg", "layers.2.mlp.down.weight"]
        )


def test_files_are_plain_safetensors(tmp_path):
    state = states.make_state(2)
    save_by(tmp_path, 1, state, 2, 1, 1)
    directory = newest(tmp_path)
    manifest = json.loads((directory / "manifest.json").read_text())
    halves = [safetensors.torch.load_file(directory / file["name"]) for file in manifest["files"]]
    name = "weight/layers.0.attention.q.weight"
    whole = torch.cat([halves[0][f"{name}@0,0"], halves[1][f"{name}@12,0"]])
    assert torch.equal(whole, state["weight", "layers.0.attention.q.weight"])
    assert manifest["parameters"]["embedding.word.weight"] == {"shape": [53, 24]}


def test_a_manifest_of_version_1_is_read(tmp_path):
    """There all chunks are float32, and none says so."""
    state = states.make_state(2)
    save_by(tmp_path, 1, state, 2, 1, 1)
    path = newest(tmp_path) / "manifest.json"
    body = json.loads(path.read_text())
    body["version"] = 1
    for file in body["files"]:
        for chunk in file["chunks"]:
            assert chunk.pop("dtype") == "F32"
    del body["checksum"]
    rest = json.dumps(body)[1:].encode() + b"\n"
    path.write_bytes(b'{"checksum": "%08x",\n' % zlib.crc32(rest) + rest)
    assert_loads(tmp_path, state, 1, 2, 1)


def test_replicas_may_be_saved_more_than_once(tmp_path):
    state = states.make_state(3)

    def work(group):
        return save(tmp_path, 1, states.chunks_of(state, 0, 1, 1, 1), group=group)

    run_ranks(3, work)
    assert_loads(tmp_path, state, 2, 1, 2)


def test_odd_shapes(tmp_path):
    """A scalar, one element, no element, three dims, one element with the strides of the matrix it is from."""
    corner = torch.arange(6.0).view(2, 3)[1:, 2:].t()
    assert corner.is_contiguous() and corner.reshape(-1).stride() != (1,)
    tensors = {
        "corner": corner,
        "scalar": torch.tensor(3.5),
        "one": torch.tensor([2.0]),
        "none": torch.empty(0),
        "no_rows": torch.empty(0, 4),
        "no_columns": torch.empty(4, 0),
        "cube": torch.arange(60.0).view(3, 4, 5),
    }
    chunks = [("weight", n, Rectangle((0,) * t.dim(), tuple(t.shape)), tuple(t.shape), t) for n, t in tensors.items()]
    state = {
        "corner": corner,
        "empty": torch.empty(0, 3),
        "flag": torch.tensor(True),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }
    save(tmp_path, 0, chunks, state)
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.verify()
        for name, tensor in tensors.items():
            assert torch.equal(checkpoint.read("weight", name), tensor), name
        box = Rectangle((1, 0, 2), (2, 3, 2))
        assert torch.equal(checkpoint.read("weight", "cube", box), tensors["cube"][1:3, 0:3, 2:4])
        own = checkpoint.rank_state(0)
        assert own.keys() == state.keys()
        assert all(torch.equal(own[key], state[key]) and own[key].dtype == state[key].dtype for key in state)


def test_chunks_may_be_made_when_their_turn_comes(tmp_path):
    live = []

    def make(value: float) -> torch.Tensor:
        live.append(value)
        return torch.full((4,), value)

    def chunks():
        for index in range(3):
            yield "weight", f"p{index}", Rectangle((0,), (4,)), (4,), lambda index=index: make(float(index))

    save(tmp_path, 0, chunks())
    assert live == [0.0, 1.0, 2.0]
    assert open_checkpoint(tmp_path).read("weight", "p2").tolist() == [2.0] * 4


def test_a_gap_is_never_saved(tmp_path):
    """Case 43: neither empty nor partial weights."""
    half = ("weight", "w", Rectangle((0, 0), (2, 3)), (4, 3), torch.zeros(2, 3))
    with pytest.raises(CheckpointError, match="weight of w: nobody saves"):
        save(tmp_path, 1, [half])
    moments = ("exp_avg", "w", Rectangle((0,), (4,)), (4,), torch.zeros(4))
    with pytest.raises(CheckpointError, match="weight of w: nobody saves"):
        save(tmp_path, 1, [moments])
    assert [entry.name for entry in tmp_path.iterdir()] == [".lock"]


def test_a_checkpoint_of_another_model_is_told_apart(tmp_path):
    save_by(tmp_path, 1, states.make_state(4), 1, 1, 1)
    checkpoint = open_checkpoint(tmp_path)
    deeper = {**states.SHAPES, "layers.3.mlp_norm.weight": (24,)}
    with pytest.raises(CheckpointError, match=r"of another model: it lacks layers\.3\.mlp_norm\.weight\. Give"):
        checkpoint.check_matches(deeper)
    untied = {**states.SHAPES, "embedding.word.weight": (64, 24)}
    del untied["final_norm.bias"]
    with pytest.raises(
        CheckpointError, match=r"excess final_norm\.bias; it has in another shape .* \[53, 24\], not \[64"
    ):
        checkpoint.check_matches(untied)
    with pytest.raises(CheckpointError, match=r"lacks a, b, c and 2 more"):
        checkpoint.check_matches({**states.SHAPES, **{letter: (1,) for letter in "abcde"}})
    with pytest.raises(CheckpointError, match="holds no parameter head.weight"):
        checkpoint.read("weight", "head.weight")
    with pytest.raises(CheckpointError, match=r"final_norm\.bias has shape \[24\], which does not hold"):
        checkpoint.read("weight", "final_norm.bias", Rectangle((20,), (5,)))


def test_weights_only_has_no_moments(tmp_path):
    save(tmp_path, 0, [("weight", "w", Rectangle((0,), (4,)), (4,), torch.zeros(4))])
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.has("weight", "w") and not checkpoint.has("exp_avg", "w")
    with pytest.raises(CheckpointError, match="no exp_avg of w: it holds weights only"):
        checkpoint.read("exp_avg", "w", Rectangle((0,), (4,)))


def test_one_process_is_a_group():
    assert OneProcess().all_gather(3) == [3] and OneProcess().gather(3) == [3]
