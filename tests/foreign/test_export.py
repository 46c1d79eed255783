"""Weights out of an engine: one file, a state dict, a converted checkpoint; and never an empty file (case 43)."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist

import megazero
from tests.foreign.models import ADAMW, Odd, batch, build, config, whole_weights

ROOT = Path(__file__).resolve().parents[2]
GATHER = {"stage3_gather_16bit_weights_on_model_save": True}


def stepped(stage: int, gather: bool = True, **sections: Any) -> Any:
    zero = {**(GATHER if gather else {}), **sections.pop("zero", {})}
    settings = config(stage, 1, 0.0, optimizer=ADAMW, zero_optimization=zero, **sections)
    engine, *_ = megazero.initialize(model=build(Odd, 3 + dist.get_rank()), config=settings)
    engine.backward(engine(batch(0, 0, dist.get_rank())))
    engine.step()
    return engine


def most_gathered(engine: Any) -> int:
    """Elements of parameters that come and go and are whole now."""
    blocks = [block for block in engine.sharded.blocks if block.sharding.parameters]
    return sum(block.flat.numel() for block in blocks if block.flat.untyped_storage().nbytes())


def saved(stage: int, directory: str, sections: dict[str, Any]) -> dict[str, Any]:
    engine, target = stepped(stage, **sections), Path(directory)
    assert engine.save_16bit_model(target / "new", "pytorch_model.bin") is True
    assert engine.save_16bit_model(target, "model.safetensors")
    engine.save_16bit_model(target, "trained.bin", exclude_frozen_parameters=True)
    largest, most, values = max(block.flat.numel() for block in engine.sharded.blocks), 0, []
    original = type(engine.sharded).let_go

    def let_go(sharded: Any, indices: Any) -> None:
        nonlocal most
        most = max(most, most_gathered(engine))
        original(sharded, indices)

    type(engine.sharded).let_go = let_go
    try:
        state = engine.module_state_dict()
        values = list(engine._zero3_consolidated_16bit_state_dict() or {})
    finally:
        type(engine.sharded).let_go = original
    assert most <= largest and most_gathered(engine) == 0
    return {"weights": whole_weights(engine), "state": state, "values": values, "buffer": engine.module.inverse}


def same(found: dict[str, torch.Tensor], result: dict[str, Any], without: tuple[str, ...] = ()) -> None:
    wanted = {**result["weights"], "inverse": result["buffer"], "head.weight": result["weights"]["embed.weight"]}
    assert found.keys() == {name for name in wanted if not name.startswith(without or ("nothing",))}
    for name, value in found.items():
        assert value.dtype == wanted[name].dtype and torch.equal(value, wanted[name]), name


@pytest.mark.parametrize(
    ("stage", "world", "sections"), [(1, 2, {}), (3, 2, {}), (3, 3, {"bf16": {"enabled": True}})], ids=str
)
def test_whole_weights_in_one_file(ranks: Callable, tmp_path: Path, stage: int, world: int, sections: dict) -> None:
    first, *others = ranks(world, saved, stage, str(tmp_path), sections)
    same(torch.load(tmp_path / "new/pytorch_model.bin"), first)
    same(torch.load(tmp_path / "trained.bin"), first, without=("frozen",))
    same(load_file(tmp_path / "model.safetensors"), first, without=("head",))
    same(first["state"], first)
    assert first["values"] == list(build(Odd).state_dict())
    assert all(result["values"] == [] and (stage < 3 or result["state"] == {}) for result in others)
    model = build(Odd)
    loaded = torch.load(tmp_path / "new/pytorch_model.bin")
    assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()  # tied
    model.load_state_dict(loaded)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "new", "trained.bin"]


def refused(directory: str) -> list[str]:
    said = []
    for engine, name in (
        (stepped(3, gather=False), "a.bin"),
        (stepped(3), "file/b.bin"),
        (stepped(3), "file/b.safetensors"),
    ):
        with pytest.raises(megazero.MegazeroError) as caught:
            engine.save_16bit_model(directory, name)
        said.append(str(caught.value))
    dist.barrier()
    return [*said, *map(str, Path(directory).iterdir())]


def test_what_cannot_be_saved_is_an_error_everywhere(ranks: Callable, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for said in ranks(2, refused, str(tmp_path)):
        assert "stage3_gather_16bit_weights_on_model_save" in said[0] and "consolidate_checkpoint" in said[0]
        assert "file" in said[1] and "file" in said[2]
        assert said[3:] == [str(tmp_path / "file")]


def tiny_llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=31, max_position_embeddings=16, tie_word_embeddings=True, **sizes))


def save_pretrained(stage: int, directory: str) -> str:
    rank, target = dist.get_rank(), Path(directory)
    zero = {"stage3_param_persistence_threshold": 20, **GATHER}
    settings = config(stage, 1, 0.0, optimizer=ADAMW, zero_optimization=zero)
    engine, *_ = megazero.initialize(model=build(tiny_llama, 3 + rank), config=settings)
    tokens = batch(0, 0, rank, vocabulary=31)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    said = "nothing"
    for who in ("all", "one"):
        if who == "all" or rank == 0:
            try:
                engine.module.save_pretrained(target / f"{who}-{rank}")
            except megazero.MegazeroError as error:
                said = str(error)
    state = engine.module_state_dict()
    if rank == 0:
        engine.module.save_pretrained(target / "given", state_dict=state)
    torch.save(whole_weights(engine), target / f"weights-{rank}.pt")
    dist.barrier()
    return said


@pytest.mark.parametrize("stage", [2, 3])
def test_case_43_save_pretrained_writes_all_or_says_how(ranks: Callable, tmp_path: Path, stage: int) -> None:
    transformers = pytest.importorskip("transformers")
    said = ranks(2, save_pretrained, stage, str(tmp_path))
    wanted = torch.load(tmp_path / "weights-0.pt")
    written = {path.parent.name for path in tmp_path.rglob("*.safetensors")}
    if stage == 3:
        assert all("module_state_dict" in message for message in said)
        assert written == {"given"} and not list(tmp_path.rglob("*.bin"))
    else:
        assert said == ["nothing"] * 2 and written == {"given", "all-0", "one-0"}  # transformers: the first rank's
    for name in written:
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / name)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert all(torch.equal(value, wanted[own]) for own, value in model.named_parameters())


def checkpointed(stage: int, directory: str) -> dict[str, torch.Tensor]:
    engine = stepped(stage)
    engine.save_checkpoint(directory)
    weights = whole_weights(engine)
    return {**weights, "inverse": engine.module.inverse}


def consolidate(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "tools/consolidate_checkpoint.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_checkpoint_becomes_safetensors(ranks: Callable, tmp_path: Path) -> None:
    wanted = ranks(3, checkpointed, 3, str(tmp_path / "run"))[0]
    done = consolidate("--from", tmp_path / "run", "--to", tmp_path / "whole", "--max-shard-size", "1KB")
    assert done.returncode == 0, done.stderr
    index = json.loads((tmp_path / "whole/model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in (tmp_path / "whole").glob("*.safetensors")}
    assert len(files) > 2 and set(index["weight_map"].values()) == files.keys()
    assert max(sum(x.nbytes for x in shard.values()) for shard in files.values() if len(shard) > 1) <= 1000
    found = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in wanted.values())


def test_in_16_bits_and_mistakes(
    ranks: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megazero.foreign.consolidate import consolidate as converted

    wanted = ranks(2, checkpointed, 1, str(tmp_path / "run"))[0]
    converted(tmp_path / "run", tmp_path / "half", dtype="bfloat16")
    for name, value in load_file(tmp_path / "half/model.safetensors").items():
        dtype = torch.float32 if name == "inverse" else torch.bfloat16
        assert value.dtype == dtype and torch.equal(value, wanted[name].to(dtype)), name
    for arguments, message in (
        ((tmp_path / "run", tmp_path / "half"), "not empty"),
        ((tmp_path / "none", tmp_path / "new"), "no such checkpoint"),
        ((tmp_path / "run", tmp_path / "new", "int8"), "int8"),
        ((tmp_path / "run", tmp_path / "new", "float32", "much"), "much"),
    ):
        with pytest.raises(megazero.MegazeroError, match=message):
            converted(*arguments)
    script = tmp_path / "run" / "zero_to_fp32.py"  # DeepSpeed's name for what does the same
    assert os.access(script, os.X_OK) and script.read_text().startswith("#!/usr/bin/env python3\n")
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "run"), str(tmp_path / "by the script")])
    runpy.run_path(str(script), run_name="__main__")
    found = load_file(tmp_path / "by the script/model.safetensors")
    assert found.keys() == wanted.keys() and all(torch.equal(value, wanted[name]) for name, value in found.items())
    with pytest.raises(SystemExit) as ending:
        runpy.run_path(str(script), run_name="__main__")
    assert ending.value.code == 2 and "not empty" in capsys.readouterr().err
    damaged = next((tmp_path / "run").rglob("rank_00001.safetensors"))
    data = bytearray(damaged.read_bytes())
    data[8 + int.from_bytes(data[:8], "little") + 5] ^= 1  # in the first tensor
    damaged.write_bytes(data)
    with pytest.raises(megazero.MegazeroError, match="rank_00001"):
        converted(tmp_path / "run", tmp_path / "new")
    assert not (tmp_path / "new").exists()
