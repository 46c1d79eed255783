"""P7: damage is detected, named, and never loaded in part."""

from __future__ import annotations

import json
import os
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero.checkpoint import newest, newest_or_none, open_checkpoint, save
from megazero.checkpoint.locate import latest_tagged, leftovers, step_directories, tagged
from megazero.convert import open_weights
from megazero.errors import CheckpointError
from tests.checkpoint import states
from tests.checkpoint.thread_group import run_ranks


def save_state(root: Path, step: int) -> Path:
    state = states.make_state(step)

    def work(group):
        chunks = states.chunks_of(state, group.rank, 2, 2, 1)
        return save(root, step, chunks, {"rng": torch.get_rng_state()}, states.META, group)

    return run_ranks(4, work)[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return save_state(tmp_path_factory.mktemp("whole"), 3)


@pytest.fixture
def broken(whole, tmp_path):
    """A copy to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "root" / whole.name))


def flip(path: Path, position: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def test_a_flipped_bit_anywhere_is_found_and_its_file_named(broken):
    generator = random.Random(0)
    for path in sorted(broken.iterdir()):
        size = path.stat().st_size
        places = [0, 7, 8, 9, size - 1, *(generator.randrange(size) for _ in range(12))]
        for position in places:
            bit = generator.randrange(8)
            flip(path, position, bit)
            with pytest.raises(CheckpointError, match=path.name):
                open_checkpoint(broken).verify()
            flip(path, position, bit)
    open_checkpoint(broken).verify()


def test_the_tensor_is_named_and_the_others_still_read(broken):
    checkpoint = open_checkpoint(broken)
    chunk = next(c for c in checkpoint._chunks["exp_avg", "layers.2.mlp.up.weight"])
    flip(broken / chunk.file, chunk.start + 5, 3)
    with pytest.raises(CheckpointError, match=rf"{chunk.file}: damaged: .* exp_avg of layers\.2\.mlp\.up\.weight"):
        checkpoint.read("exp_avg", "layers.2.mlp.up.weight")
    assert torch.equal(
        checkpoint.read("weight", "layers.2.mlp.up.weight"), states.make_state(3)["weight", "layers.2.mlp.up.weight"]
    )


def test_verify_sees_the_damage_before_anything_is_read(broken):
    checkpoint = open_checkpoint(broken)
    boxes = list(states.boxes_of(0, 1, 2, 1))
    last = checkpoint._chunks[boxes[-1][:2]][0]
    flip(broken / last.file, last.start, 0)
    with pytest.raises(CheckpointError, match=last.file):
        checkpoint.verify(boxes)
    # A rank that needs none of it is not concerned.
    checkpoint.verify(states.boxes_of(1, 1, 2, 1))


@pytest.mark.parametrize("cut", [1, 4, 1000])
def test_truncated_file(broken, cut):
    path = broken / "rank_00002.safetensors"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match=r"rank_00002\.safetensors: \d+ bytes, \d+ were written"):
        open_checkpoint(broken)


def test_file_cut_after_it_was_opened(broken):
    checkpoint = open_checkpoint(broken)
    path = broken / "rank_00003.safetensors"
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match="rank_00003"):
        checkpoint.verify()


def remove_rank(directory: Path) -> None:
    (directory / "rank_00001.safetensors").unlink()


def cut_manifest(directory: Path) -> None:
    path = directory / "manifest.json"
    path.write_bytes(path.read_bytes()[:500])


def empty_manifest(directory: Path) -> None:
    (directory / "manifest.json").write_bytes(b"")


def other_manifest(directory: Path) -> None:
    (directory / "manifest.json").write_text('{"checksum": "00000000",\n"step": 1}')


def pipe_for_rank(directory: Path) -> None:
    remove_rank(directory)
    os.mkfifo(directory / "rank_00001.safetensors")


def pipe_for_manifest(directory: Path) -> None:
    no_manifest(directory)
    os.mkfifo(directory / "manifest.json")


def no_manifest(directory: Path) -> None:
    (directory / "manifest.json").unlink()


DAMAGE = [
    (remove_rank, r"rank_00001\.safetensors: missing"),
    (cut_manifest, r"manifest\.json: damaged \(500 bytes"),
    (empty_manifest, r"manifest\.json: damaged \(0 bytes"),
    (other_manifest, r"manifest\.json: damaged"),
    (no_manifest, r"holds no manifest\.json"),
    (pipe_for_rank, r"rank_00001\.safetensors: is no file"),
    (pipe_for_manifest, r"manifest\.json: is no file"),
]


@pytest.mark.parametrize("damage, message", DAMAGE)
def test_what_is_not_whole_is_refused_by_name(broken, damage, message):
    damage(broken)
    for path in (broken, broken.parent):
        with pytest.raises(CheckpointError, match=message):
            newest(path)
    with pytest.raises(CheckpointError, match=message):
        newest_or_none(broken.parent)


@pytest.mark.parametrize("damage, message", DAMAGE)
def test_the_newest_whole_one_is_found_and_the_damage_told(broken, damage, message):
    before = save_state(broken.parent / "other", 2)
    before = Path(shutil.move(before, broken.parent))
    damage(broken)
    with pytest.warns(UserWarning, match=message):
        assert newest(broken.parent) == before


def test_no_checkpoint_at_all(tmp_path, monkeypatch):
    assert newest_or_none(tmp_path) is None and newest_or_none(tmp_path / "missing") is None
    with pytest.raises(CheckpointError, match="no such checkpoint directory"):
        newest(tmp_path / "missing")
    with pytest.raises(CheckpointError, match="holds no megazero checkpoint"):
        newest(tmp_path)
    monkeypatch.setattr(os, "listdir", lambda path: os.open(path, os.O_WRONLY))
    with pytest.raises(CheckpointError, match=f"{tmp_path}: cannot be read: Is a directory"):
        newest(tmp_path)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)  # paths without a last name
    for path in ("", ".", "/"):
        with pytest.raises(CheckpointError, match="holds no megazero checkpoint"):
            newest(path)
    with pytest.raises(CheckpointError, match="manifest"):
        tagged(".", "")
    with pytest.raises(CheckpointError, match="no such checkpoint directory"):
        newest(tmp_path / "step_00000001")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"Hugging Face directory: give it as model\.init_from"):
        newest(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="a file; a checkpoint is a directory"):
        newest(tmp_path / "file")


def edit_chunk(**changes: Any) -> Callable[[dict], object]:
    return lambda body: body["files"][0]["chunks"][0].update(changes)


def edit_file(**changes: Any) -> Callable[[dict], object]:
    return lambda body: body["files"][0].update(changes)


def state_of_a_terabyte(body: dict) -> None:
    body["files"][0]["state"][0]["shape"] = [2**40]


def state_without_a_name(body: dict) -> None:
    body["files"][0]["state"][0]["key"] = [0]


def shapeless(body: dict) -> None:
    body["parameters"]["embedding.word.weight"] = {}


def no_files(body: dict) -> None:
    del body["files"]


@pytest.mark.parametrize(
    "edit, message",
    [
        (edit_file(name="../elsewhere/rank_00000.safetensors"), "is not the name of a file beside it"),
        (edit_file(name="/etc/passwd"), "is not the name of a file beside it"),
        (edit_file(name=".."), "is not the name of a file beside it"),
        (edit_file(name=""), "is not the name of a file beside it"),
        (edit_file(name="a\0b"), "is not the name of a file beside it"),
        (edit_file(name="\ud800"), "is not the name of a file beside it"),
        (edit_file(name="x" * 300), "is not the name of a file beside it"),
        (edit_file(name=7), "is not the name of a file beside it"),
        (edit_file(size=-1), "not sizes"),
        (edit_chunk(start=-8), "not sizes"),
        (edit_chunk(start=10**15), "is not inside the .* bytes of rank_00000.safetensors"),
        (edit_chunk(start="8"), "not sizes"),
        (edit_chunk(shape=[2**31, 2**31], offsets=[0, 0]), "is not inside embedding.word.weight"),
        (edit_chunk(shape=[1]), "ValueError"),
        (edit_chunk(offsets=[-1, 0]), "not sizes"),
        (edit_chunk(dtype="F4"), "F4"),
        (edit_chunk(name="layers.9.nothing"), "layers.9.nothing"),
        (state_of_a_terabyte, "is not inside the .* bytes of rank_00000.safetensors"),
        (state_without_a_name, r"\[0\] is not the name of a tensor"),
        (shapeless, "shape"),
        (no_files, "files"),
        (lambda body: body.update(meta=[]), "meta is no object"),
        (lambda body: body.update(step="3"), "not sizes"),
        (lambda body: body.update(version="2"), "TypeError"),
    ],
)
def test_a_manifest_edited_by_hand_leads_nowhere(broken, edit, message):
    """Its checksum is right again: what it says is judged, before a byte is read or a buffer is made for it."""
    body = json.loads((broken / "manifest.json").read_bytes())
    del body["checksum"]
    edit(body)
    rest = json.dumps(body)[1:].encode()
    (broken / "manifest.json").write_bytes(b'{"checksum": "%08x",\n' % zlib.crc32(rest) + rest)
    with pytest.raises(CheckpointError, match=rf"manifest\.json: not as it was written.*{message}"):
        open_checkpoint(broken)


def test_latest_leads_nowhere_else(broken):
    """A name in a file: it is the name of a directory beside it, or none."""
    root = broken.parent / "root"
    root.mkdir()
    shutil.copytree(broken, root / "tag")
    shutil.copy(broken / "manifest.json", root.parent / "manifest.json")
    for name in ("loop", "step_00000009", ".step_00000009.saving"):  # a link to itself is no directory
        (root / name).symlink_to(name)
    assert step_directories(root) == leftovers(root) == [] and newest_or_none(root) is None
    for name in ("..", "../" + broken.name, "a\0b", "", "x" * 300):
        (root / "latest").write_text(name)
        with pytest.warns(UserWarning, match="latest: names no checkpoint; using"):
            assert latest_tagged(root) == root / "tag"
    (root / "latest").write_text("tag")
    assert open_weights(root).parameters == states.SHAPES, "DeepSpeed has such a file too"


def test_one_that_is_removed_while_it_is_read_is_not_called_damaged(broken):
    checkpoint = open_checkpoint(broken)
    shutil.rmtree(broken)
    with pytest.raises(CheckpointError, match="was removed while it was read, as a run with checkpoint.keep does"):
        checkpoint.verify()
