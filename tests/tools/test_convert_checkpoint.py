"""convert_checkpoint.py: its command line, what it prints, how it ends."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
import safetensors.torch
import torch

from megazero.checkpoint import open_checkpoint
from megazero.convert import HFWeights, open_weights
from megazero.errors import ConvertError, MegazeroError
from tests.data.helpers import run_script
from tools import benchmark_convert, convert_checkpoint

ORACLE = Path(__file__).resolve().parents[1] / "fixtures" / "oracle"
FIXTURES = Path(__file__).resolve().parents[1] / "convert" / "fixtures"
GPT2, LLAMA = ORACLE / "gpt2-tied" / "hf_init", ORACLE / "llama-gqa" / "hf_init"


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs the tool in a directory of its own; returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object):
        monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", *map(str, arguments)])
        convert_checkpoint.main()
        return capsys.readouterr()

    return call


def test_as_a_program_from_another_directory(tmp_path):
    done = run_script("tools/convert_checkpoint.py", "import", "--from", GPT2, "--to", "a b/ours", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a b/ours/step_00000000\n", "")
    failed = run_script("tools/convert_checkpoint.py", "export", "--from", "nowhere", "--to", "hf", cwd=tmp_path)
    assert failed.returncode == 2 and failed.stderr == "error: nowhere: no such checkpoint directory\n"


def test_export_in_another_dtype_and_in_shards(run):
    run("import", "--from", GPT2, "--to", "ours")
    printed = run("export", "--from", "ours", "--to", "hf", "--dtype", "bfloat16", "--max-shard-size", "100KB")
    assert printed.out == "hf\n" and printed.err == ""
    assert len(list(Path("hf").glob("model-*.safetensors"))) > 2
    name = "layers.0.attention.k.weight"
    assert torch.equal(HFWeights("hf").read(name), HFWeights(GPT2).read(name).bfloat16().float())


def test_several_inputs(run):
    for source, name in ((GPT2, "a"), (LLAMA, "b")):
        shutil.copytree(source, name)
    assert run("import", "--from", "a", "b", "--to", "ours").out.splitlines() == [
        "ours/a/step_00000000",
        "ours/b/step_00000000",
    ]
    run("export", "--from", "ours/a", "--from", "ours/b", "--to", "hf")
    for name in ("a", "b"):
        before, after = HFWeights(name), HFWeights(f"hf/{name}")
        assert all(torch.equal(before.read(key), after.read(key)) for key in before.parameters)


def test_a_rerun_of_several_goes_on_where_one_stopped(run):
    for source, name in ((GPT2, "a"), (LLAMA, "b")):
        shutil.copytree(source, name)
    run("import", "--from", "a", "--to", "ours/a")
    again = ("import", "--from", "a", "b", "--to", "ours")
    with pytest.raises(ConvertError, match="ours/a: is there already and not empty"):
        run(*again)
    assert not Path("ours/b").exists()
    printed = run(*again, "--skip-existing")
    assert printed.err == "ours/a: there already\n" and printed.out == "ours/b/step_00000000\n"


def test_skip_existing_takes_only_what_is_whole(run):
    run("import", "--from", LLAMA, "--to", "ours")
    (Path("ours/step_00000000/rank_00000.safetensors")).write_bytes(b"")
    with pytest.raises(MegazeroError, match="rank_00000.safetensors: 0 bytes"):
        run("import", "--from", LLAMA, "--to", "ours", "--skip-existing")


def test_skip_existing_does_not_take_another_model_for_it(run):
    shutil.copytree(LLAMA, "small")
    tensors = safetensors.torch.load_file("small/model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:900].clone()
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:900].clone()
    safetensors.torch.save_file(tensors, "small/model.safetensors")
    config = json.loads(Path("small/config.json").read_text())
    Path("small/config.json").write_text(json.dumps({**config, "vocab_size": 900}))
    run("import", "--from", LLAMA, "--to", "ours")
    with pytest.raises(ConvertError, match="ours: holds another model than small"):
        run("import", "--from", "small", "--to", "ours", "--skip-existing")


def test_every_input_is_looked_at_before_the_first_is_converted(run):
    shutil.copytree(LLAMA, "good")
    shutil.copytree(LLAMA, "bad")
    Path("bad/config.json").write_text(json.dumps({"model_type": "bloom"}))
    with pytest.raises(ConvertError, match="bad/config.json: model_type 'bloom' is not supported"):
        run("import", "--from", "good", "bad", "--to", "ours")
    with pytest.raises(ConvertError, match="two inputs are called good"):
        run("import", "--from", "good", "bad/../good", "--to", "ours")
    assert not Path("ours").exists()


def test_verify(run):
    pytest.importorskip("transformers")
    assert "logits differ from transformers' by" in run("import", "--from", GPT2, "--to", "ours", "--verify").err
    run("export", "--from", "ours", "--to", "hf", "--verify", "--dtype", "bfloat16")
    file = Path("hf/model.safetensors")
    tensors = safetensors.torch.load_file(file)
    tensors["transformer.h.1.mlp.c_fc.bias"][3] += 0.01
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    difference = convert_checkpoint.largest_difference(open_weights("ours"), "hf", torch.bfloat16)
    assert 1e-5 < difference < 1


def test_verify_fails_where_the_logits_differ(run, monkeypatch):
    monkeypatch.setattr(convert_checkpoint, "largest_difference", lambda *_: 2e-5)
    with pytest.raises(ConvertError, match="ours/step_00000000: is written, but its logits differ by more than 1e-05"):
        run("import", "--from", GPT2, "--to", "ours", "--verify")
    monkeypatch.setattr(convert_checkpoint, "largest_difference", lambda *_: float("nan"))
    with pytest.raises(ConvertError, match="logits differ"):
        run("import", "--from", GPT2, "--to", "again", "--verify")


def test_what_transformers_cannot_run_is_no_traceback(run):
    pytest.importorskip("transformers")
    shutil.copytree(LLAMA, "hf")
    config = json.loads(Path("hf/config.json").read_text())
    Path("hf/config.json").write_text(json.dumps({**config, "rms_norm_eps": "1e-5"}))
    with pytest.raises(ConvertError, match="hf: cannot be verified, since transformers cannot run it: .*rms_norm_eps"):
        run("import", "--from", "hf", "--to", "ours", "--verify")


def test_verify_without_transformers_is_an_error_before_work(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConvertError, match="to verify needs transformers"):
        run("import", "--from", GPT2, "--to", "ours", "--verify")
    assert os.listdir() == []


def test_progress_is_in_lines_where_there_is_no_terminal(run, monkeypatch):
    monkeypatch.setattr(convert_checkpoint, "_LINE_EVERY", 0.0)
    lines = run("import", "--from", LLAMA, "--to", "ours").err.splitlines()
    assert len(lines) == 39 and lines[-1] == "ours: 0.0 of 0.0 GB"


def test_config_is_for_other_programs_checkpoints(run):
    with pytest.raises(ConvertError, match="only these need a config.json elsewhere"):
        run("import", "--from", GPT2, "--to", "ours", "--config", GPT2 / "config.json")


@pytest.mark.whole
def test_the_benchmark_at_a_small_size(monkeypatch, tmp_path, capsys):
    """Its model, its two conversions in processes of their own, its check of every bit."""
    small = benchmark_convert.ModelConfig(
        **dict(num_layers=1, hidden_size=64, num_attention_heads=4, ffn_hidden_size=96, vocab_size=50),
        **dict(norm="rmsnorm", activation="swiglu", position="rotary", tie_word_embeddings=False),
        **dict(qkv_bias=False, out_bias=False, mlp_bias=False),
    )
    monkeypatch.setattr(benchmark_convert, "ModelConfig", lambda **_: small)
    monkeypatch.setattr(sys, "argv", ["benchmark_convert.py", str(tmp_path)])
    benchmark_convert.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "every tensor came back bit for bit" and "GB/s" in lines[1] and "peak" in lines[2]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("archive", "folder", "step"),
    [("megatron", "gpt2-optimizer/dist", 3), ("deepspeed", "gpt2-stage2", 2)],
)
def test_what_others_saved_comes_in_with_its_moments_and_goes_out(run, tmp_path, archive, folder, step):
    """Through the tool alone: their folder, our checkpoint, a Hugging Face directory with the same weights."""
    with tarfile.open(FIXTURES / f"{archive}.tar.xz") as fixtures:
        fixtures.extractall(tmp_path / "theirs", filter="data")
    run("import", "--from", tmp_path / "theirs" / folder, "--to", "ours")
    with open_checkpoint(tmp_path / "ours") as checkpoint:
        assert checkpoint.step == step
        assert all(checkpoint.has(kind, name) for kind in ("exp_avg", "exp_avg_sq") for name in checkpoint.parameters)
        assert float(checkpoint.read("exp_avg_sq", "layers.0.mlp.up.weight").min()) > 0
    run("export", "--from", "ours", "--to", "hf")
    theirs, out = open_weights(tmp_path / "theirs" / folder), HFWeights(tmp_path / "hf")
    assert theirs.parameters == out.parameters
    assert all(torch.equal(theirs.read(name), out.read(name)) for name in out.parameters)
