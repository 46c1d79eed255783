"""P6, errors before work: whatever is wrong with a command, one clear error, exit code 2, nothing written.

Each row runs pretrain/gpt.py in this process, as rank 0 of as many as it says and then as the last of them; whoever
gets as far as making a process group has not failed before work.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.engine.tiny import run_script, tiny


def without_sizes(changes: dict) -> dict:
    """Take out the architecture that ``tiny`` gives."""
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
    return {f"model.{name}": None for name in sizes} | changes


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def only_file(directory: Path, name: str) -> Path:
    (path,) = directory.rglob(name)
    return path


# name: (processes, what is done to the place, changed settings, words of the message)
# {here} is the place; a setting of None is left out
Row = tuple[int, Callable[[Path], object] | None, dict, tuple[str, ...]]

BAD: dict[str, Row] = {
    # divisibility and processes
    "heads over tp": (3, None, {"parallel.tp": 3}, ("parallel.tp: 3 does not divide", "num_attention_heads = 4")),
    "too few processes": (2, None, {"parallel.tp": 4}, ("parallel.tp:", "needs at least 4 processes and there are 2")),
    "processes left over": (6, None, {"parallel.tp": 2, "parallel.pp": 2}, ("does not divide the 6 processes",)),
    "batch over dp": (3, None, {}, ("train.global_batch_size: 8 is not a multiple", "4 x 3 = 12", "use 12")),
    "batch over micro-batch": (1, None, {"train.micro_batch_size": 3}, ("train.global_batch_size: 8", "3 x 1")),
    "layers under pp": (4, None, {"parallel.pp": 4}, ("parallel.pp: 4 stages are more than model.num_layers = 3",)),
    "partition": (2, None, {"parallel.pp": 2, "parallel.partition": (1, 1)}, ("parallel.partition:", "1 + 1 = 2")),
    "half an environment": (0, None, {}, ("WORLD_SIZE=None", "expected a whole number")),
    # names and values
    "field": (1, None, {"train.stepz": 3}, ("--train.stepz", "did you mean --train.steps?")),
    "section": (2, None, {"optimiser.lr": 1}, ("--optimiser.lr", "did you mean --optimizer.lr?")),
    "wrong section": (1, None, {"train.lr": 1}, ("--train.lr", "did you mean --optimizer.lr?")),
    "no number": (1, None, {"train.steps": "many"}, ("train.steps: 'many' is not a whole number",)),
    "out of range": (1, None, {"train.steps": 0}, ("train.steps: 0 must be at least 1",)),
    "nan": (1, None, {"optimizer.lr": "nan"}, ("optimizer.lr:", "is not a number")),
    "dropout": (1, None, {"model.dropout": 1.0}, ("model.dropout:", "below 1")),
    "preset": (1, None, {"model.preset": "gpt2-124"}, ("model.preset:", "did you mean gpt2-124m?")),
    "two at once": (4, None, {"parallel.tp": 3, "train.seed": -1}, ("parallel.tp:", "train.seed:")),
    "ZeRO stage": (2, None, {"zero.stage": 4}, ("zero.stage: 4 must be at most 3",)),
    "positions": (1, None, {"data.seq_length": 17}, ("data.seq_length: 17 tokens are more than", "raise that to 17")),
    # configuration files
    "no such file": (1, None, {"config": "{here}/none.yaml"}, ("--config", "none.yaml: No such file")),
    "broken YAML": (
        2,
        lambda here: (here / "a.yaml").write_text("train: [1, 2\n"),
        {"config": "{here}/a.yaml"},
        ("a.yaml", "line 2"),
    ),
    "binary YAML": (
        1,
        lambda here: (here / "a.yaml").write_bytes(bytes(range(256))),
        {"config": "{here}/a.yaml"},
        ("a.yaml",),
    ),
    "unknown field in a file": (
        1,
        lambda here: (here / "a.json").write_text(json.dumps({"train": {"step": 1}})),
        {"config": "{here}/a.json"},
        ("train.step:", "did you mean train.steps?"),
    ),
    # data
    "no data": (1, None, {"data.train": None}, ("data.train: nothing to train on", "data/preprocess.py")),
    "missing data": (2, None, {"data.train": "{here}/none"}, ("data.train:", "{here}/none")),
    "missing .bin": (1, lambda here: (here / "train.bin").unlink(), {}, ("data.train:", "{here}/train.bin")),
    "truncated .bin": (2, lambda here: cut_in_half(here / "train.bin"), {}, ("{here}/train.bin", "bytes")),
    "truncated .idx": (1, lambda here: cut_in_half(here / "train.idx"), {}, ("{here}/train.idx", "bytes")),
    "no .idx": (1, lambda here: flip(here / "train.idx", 3), {}, ("{here}/train.idx",)),
    "vocabulary": (
        4,
        None,
        {"parallel.tp": 4, "model.vocab_size": 256},
        ("{here}/train.json", "257", "model.vocab_size"),
    ),
    "token ids": (
        1,
        lambda here: (here / "train.json").unlink(),
        {"model.vocab_size": 100},
        ("{here}/train.bin", "model.vocab_size"),
    ),
    "too little data": (
        1,
        None,
        {"data.seq_length": 5000, "model.max_position_embeddings": 5000},
        ("data.train:", "a sample takes data.seq_length + 1 = 5001"),
    ),
    "missing evaluation data": (1, None, {"data.valid": "{here}/none"}, ("data.valid:", "{here}/none")),
    "nothing to evaluate on": (1, None, {"train.eval_interval": 1}, ("data.valid:", "data.split")),
    "split": (2, None, {"data.split": (100000, 1)}, ("data.split:", "has 0 tokens")),
    "tokenizer": (1, None, {"data.tokenizer": "sentencepiece:{here}/none.model"}, ("data.tokenizer:", "none.model")),
    # weights to begin with
    "init_from missing": (
        1,
        None,
        without_sizes({"model.init_from": "{here}/none"}),
        ("model.init_from: {here}/none",),
    ),
    "init_from no model": (1, None, without_sizes({"model.init_from": "{here}"}), ("{here}",)),
    "init_from no weights": (
        2,
        lambda here: (here / "hf" / "model.safetensors").unlink(),
        without_sizes({"model.init_from": "{here}/hf"}),
        ("{here}/hf", "safetensors"),
    ),
    "init_from truncated": (
        1,
        lambda here: cut_in_half(here / "hf" / "model.safetensors"),
        without_sizes({"model.init_from": "{here}/hf"}),
        ("{here}/hf/model.safetensors",),
    ),
    "init_from no JSON": (
        1,
        lambda here: cut_in_half(here / "hf" / "config.json"),
        without_sizes({"model.init_from": "{here}/hf"}),
        ("{here}/hf/config.json",),
    ),
    "init_from another architecture": (
        1,
        lambda here: (here / "hf" / "config.json").write_text(json.dumps({"model_type": "t5"})),
        without_sizes({"model.init_from": "{here}/hf"}),
        ("{here}/hf", "t5"),
    ),
    "init_from contradicted": (
        1,
        None,
        without_sizes({"model.init_from": "{here}/hf", "model.num_layers": 3}),
        ("model.num_layers: 3 contradicts 4",),
    ),
    # checkpoints
    "resume from nowhere": (2, None, {"checkpoint.resume": "{here}/none"}, ("{here}/none: no such checkpoint",)),
    "resume from Hugging Face": (1, None, {"checkpoint.resume": "{here}/hf"}, ("give it as model.init_from",)),
    "another model": (
        2,
        None,
        {"checkpoint.dir": "{here}/run", "model.hidden_size": 36},
        (
            "{here}/run/step_00000001: is of another model: model.hidden_size = 36 (was 32). Set it back, or choose "
            "another checkpoint.dir\n",
        ),
    ),
    "deeper model": (
        1,
        None,
        {"checkpoint.resume": "{here}/run", "model.num_layers": 4, "model.norm": "rmsnorm", "model.dropout": 0.1},
        (
            "{here}/run/step_00000001: is of another model: model.num_layers = 4 (was 3), model.norm = 'rmsnorm' (was "
            "'layernorm'). Set them back, or choose another checkpoint.resume\n",
        ),
    ),
    "manifest": (
        1,
        lambda here: flip(only_file(here, "manifest.json"), 300),
        {"checkpoint.dir": "{here}/run"},
        ("{here}/run/step_00000001/manifest.json: damaged",),
    ),
    "truncated checkpoint": (
        2,
        lambda here: cut_in_half(only_file(here, "rank_*")),
        {"checkpoint.dir": "{here}/run"},
        ("rank_00000.safetensors", "were written"),
    ),
    "incomplete checkpoint": (
        1,
        lambda here: only_file(here, "rank_*").unlink(),
        {"checkpoint.dir": "{here}/run"},
        ("rank_00000.safetensors: missing",),
    ),
    "flipped byte": (
        1,
        lambda here: flip(only_file(here, "rank_*"), -1000),
        {"checkpoint.dir": "{here}/run", "train.steps": 3},
        ("rank_00000.safetensors: damaged: the checksum of",),
    ),
    "directory of another run": (
        1,
        None,
        {"checkpoint.dir": "{here}/run", "checkpoint.resume": "never"},
        ("{here}/run: holds step 1 of another run", "checkpoint.resume auto"),
    ),
    "checkpoint.dir is a file": (
        1,
        None,
        {"checkpoint.dir": "{here}/train.bin"},
        ("{here}/train.bin", "checkpoint.dir must be a directory"),
    ),
    "keep without a directory": (1, None, {"checkpoint.keep": 2}, ("checkpoint.keep:", "checkpoint.dir")),
    # metrics
    "log below a file": (
        1,
        None,
        {"log.jsonl": "{here}/train.bin/metrics.jsonl", "checkpoint.dir": "{here}/new"},
        ("log.jsonl:", "{here}/train.bin"),
    ),
    "log is a directory": (1, None, {"log.jsonl": "{here}"}, ("log.jsonl:", "{here}")),
}


def listing(directory: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in directory.rglob("*")}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(
    name: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    world_size, damage, changes, words = BAD[name]
    here = tmp_path / "here"
    shutil.copytree(place, here)
    if damage is not None:
        damage(here)
    settings = tiny(here, {key: _filled(value, here) for key, value in changes.items()})
    settings = {key: value for key, value in settings.items() if value is not None}
    before = listing(here)
    monkeypatch.setattr(dist, "init_process_group", _too_late)
    monkeypatch.chdir(tmp_path)
    for rank in sorted({0, max(0, world_size - 1)}):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        if world_size:
            monkeypatch.setenv("WORLD_SIZE", str(world_size))
        with pytest.raises(SystemExit) as ending:
            run_script(settings)
        printed = capsys.readouterr()
        assert ending.value.code == 2, printed.err
        assert printed.out == ""
        if rank == 0:
            assert printed.err.startswith("error: ") and printed.err.count("error:") == 1
            assert "Traceback" not in printed.err
            for part in words:
                assert part.replace("{here}", str(here)) in printed.err
    assert listing(here) == before
    assert list(tmp_path.iterdir()) == [here]


def _filled(value: object, here: Path) -> object:
    return value.replace("{here}", str(here)) if isinstance(value, str) else value


def _too_late(*args: object, **kwargs: object) -> None:
    raise AssertionError("a process group was made before the error was found")
