"""Conversions that are killed, run out of disk or meet damage: whole or absent, and a rerun succeeds."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megazero.checkpoint import open_checkpoint, writer
from megazero.convert import HFWeights, export, import_checkpoint
from megazero.convert.importer import Progress
from megazero.errors import CheckpointError, ConvertError, MegazeroError

ORACLE = Path(__file__).parent.parent / "fixtures" / "oracle"
GPT2, LLAMA = ORACLE / "gpt2-tied" / "hf_init", ORACLE / "llama-gqa" / "hf_init"

Conversion = Callable[[Progress | None], Path]


@pytest.fixture(params=["import", "export"])
def conversion(request, tmp_path) -> tuple[Conversion, Path]:
    """One into a target beside nothing else, and that target."""
    target = tmp_path / "out" / "target"
    if request.param == "import":
        return lambda progress: import_checkpoint(LLAMA, target, progress), target
    import_checkpoint(LLAMA, tmp_path / "ours")
    return lambda progress: export(tmp_path / "ours", target, progress=progress), target


def assert_whole(target: Path) -> None:
    if (target / "config.json").exists():
        weights = HFWeights(target)
        assert all(torch.equal(weights.read(name), HFWeights(LLAMA).read(name)) for name in weights.parameters)
    else:
        with open_checkpoint(target) as checkpoint:
            checkpoint.verify()
    assert os.listdir(target.parent) == [target.name]


def in_child(work: Callable[[], object]) -> tuple[int, str]:
    """The exit code of a forked process that does the work, and the message of the error that ended it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except MegazeroError as error:
            os.write(writing, str(error).encode())
            os._exit(2)
        except BaseException as error:
            os.write(writing, repr(error).encode())
            os._exit(3)
    os.close(writing)
    with open(reading) as pipe:
        message = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), message


@pytest.mark.parametrize("calls", [1, 20, 39])
def test_killed_in_the_middle_and_run_again(conversion, calls):
    convert, target = conversion
    count = 0

    def die(done: int, total: int) -> None:
        nonlocal count
        count += 1
        if count == calls:
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(lambda: convert(die)) == (-signal.SIGKILL, "")
    assert os.listdir(target.parent) == [f".{target.name}.converting"]
    convert(None)
    assert_whole(target)


def test_a_live_conversion_into_the_same_place_is_left_alone(conversion):
    convert, target = conversion
    messages = []

    def interfere(done: int, total: int) -> None:
        if done == total:
            with pytest.raises(ConvertError) as caught:
                convert(None)
            messages.append(str(caught.value))

    convert(interfere)
    assert len(messages) == 1 and "another conversion into the same place is under way" in messages[0]
    assert_whole(target)


def test_a_disk_that_fills_up(conversion):
    convert, target = conversion

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
        convert(None)

    code, message = in_child(work)
    assert code == 2 and str(target) in message and "File too large" in message
    assert os.listdir(target.parent) == []
    convert(None)
    assert_whole(target)


def test_something_else_appears_at_the_target_meanwhile(conversion):
    convert, target = conversion

    def appear(done: int, total: int) -> None:
        target.mkdir(exist_ok=True)
        (target / "mine").touch()

    with pytest.raises(ConvertError, match="target: cannot be written: something else has been put there"):
        convert(appear)
    assert os.listdir(target.parent) == [target.name] and os.listdir(target) == ["mine"]


def test_a_flipped_byte_of_a_checkpoint_stops_its_export(tmp_path):
    file = import_checkpoint(LLAMA, tmp_path / "ours") / "rank_00000.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank_00000.safetensors: damaged: the checksum of weight of layers"):
        export(tmp_path / "ours", tmp_path / "hf")
    assert os.listdir(tmp_path) == ["ours"]


def test_a_file_cut_short_while_it_is_read_stops_its_import(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(ConvertError, match=r"model.safetensors: ends inside model.embed_tokens.weight: cut short"):
        import_checkpoint(LLAMA, tmp_path / "ours")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("source", [GPT2, LLAMA])
def test_tensors_in_many_pieces_come_back_bit_for_bit(source, tmp_path, monkeypatch):
    """As those of large models do: here a piece is a few rows."""
    monkeypatch.setattr(writer, "MAX_CHUNK_BYTES", 10_000)
    import_checkpoint(source, tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "hf", max_shard_size="200KB")
    before, after = HFWeights(source), HFWeights(tmp_path / "hf")
    assert all(torch.equal(before.read(name), after.read(name)) for name in before.parameters)
