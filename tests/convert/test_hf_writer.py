"""Exports: from many ranks, in shards, in other dtypes, of models with no exact counterpart, and refusals."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from pathlib import Path

import pytest
import safetensors.torch
import torch

from megazero.checkpoint import save
from megazero.convert import HFWeights, export, hf_writer, import_checkpoint, open_weights
from megazero.convert.configs import choose_family
from megazero.convert.hf_writer import parse_size
from megazero.errors import CheckpointError, ConvertError
from megazero.models.config import ModelConfig
from megazero.models.parameters import parameter_shapes
from megazero.presets import PRESETS
from megazero.sharding import Rectangle

ROOT = Path(__file__).parent.parent.parent
ORACLE = ROOT / "tests" / "fixtures" / "oracle"
GPT2, LLAMA = ORACLE / "gpt2-tied" / "hf_init", ORACLE / "llama-gqa" / "hf_init"
TINY = dict(num_layers=2, hidden_size=16, num_attention_heads=4, vocab_size=37, max_position_embeddings=32)
ROTARY = dict(norm="rmsnorm", position="rotary", activation="swiglu", ffn_hidden_size=24)
NO_BIAS = dict(qkv_bias=False, out_bias=False, mlp_bias=False)


def write_checkpoint(root: Path, config: ModelConfig, /, **meta: object) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in parameter_shapes(config).items()}
    chunks = [("weight", n, Rectangle((0,) * t.dim(), tuple(t.shape)), tuple(t.shape), t) for n, t in tensors.items()]
    save(root, 3, chunks, meta={"model": config.model_dump()} | meta)
    return tensors


@pytest.mark.parametrize("source", [GPT2, LLAMA])
def test_reference_models_come_out_as_they_went_in(source, tmp_path):
    import_checkpoint(source, tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "hf")
    before, after = (safetensors.torch.load_file(d / "model.safetensors") for d in (source, tmp_path / "hf"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    old, new = (json.loads((d / "config.json").read_text()) for d in (source, tmp_path / "hf"))
    for field in ("model_type", "architectures", "vocab_size", "tie_word_embeddings", "eos_token_id", "dtype"):
        assert new[field] == old[field], field


def test_shards_and_their_index(tmp_path):
    transformers = pytest.importorskip("transformers")
    import_checkpoint(LLAMA, tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "hf", max_shard_size="300KB")
    files = sorted(tmp_path.glob("hf/*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(os.path.getsize(file) < 310_000 for file in files)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    original = safetensors.torch.load_file(LLAMA / "model.safetensors")
    assert all(torch.equal(loaded[name], original[name]) for name in original)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in original.values())


def test_a_tensor_larger_than_a_shard_has_one_to_itself(tmp_path):
    import_checkpoint(GPT2, tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "hf", max_shard_size=1)
    weights = HFWeights(tmp_path / "hf")
    assert all(torch.equal(weights.read(n), HFWeights(GPT2).read(n)) for n in weights.parameters)


def test_other_dtypes_are_rounded_once(tmp_path):
    import_checkpoint(LLAMA, tmp_path / "ours")
    original = safetensors.torch.load_file(LLAMA / "model.safetensors")
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        export(tmp_path / "ours", tmp_path / name, dtype=name)
        stored = safetensors.torch.load_file(tmp_path / name / "model.safetensors")
        assert all(torch.equal(stored[key], tensor.to(dtype)) for key, tensor in original.items())
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == name


def test_an_import_keeps_the_dtypes_of_its_source(tmp_path):
    """Nothing is gained by widening: a bfloat16 model's checkpoint takes the bytes of the model."""
    dtypes = {"norm": torch.float32, "mlp": torch.float16, "o_proj": torch.float64}
    original = {
        name: tensor.to(next((dtype for part, dtype in dtypes.items() if part in name), torch.bfloat16))
        for name, tensor in safetensors.torch.load_file(LLAMA / "model.safetensors").items()
    }
    shutil.copytree(LLAMA, tmp_path / "mixed")
    safetensors.torch.save_file(original, tmp_path / "mixed" / "model.safetensors")
    directory = import_checkpoint(tmp_path / "mixed", tmp_path / "ours")
    weights = open_weights(tmp_path / "ours")
    layer = "layers.1.{}.weight"
    kept = [weights.dtype_of(layer.format(part)) for part in ("attention.q", "mlp_norm", "mlp.up", "attention.out")]
    assert kept == [torch.bfloat16, torch.float32, torch.float16, torch.float32]
    held = sum(min(tensor.itemsize, 4) * tensor.numel() for tensor in original.values())
    assert held < (directory / "rank_00000.safetensors").stat().st_size < held + 20_000
    export(tmp_path / "ours", tmp_path / "wide")
    wide = safetensors.torch.load_file(tmp_path / "wide" / "model.safetensors")
    assert all(torch.equal(wide[name], tensor.float()) for name, tensor in original.items())
    export(tmp_path / "ours", tmp_path / "half", dtype="bfloat16")
    half = safetensors.torch.load_file(tmp_path / "half" / "model.safetensors")
    assert all(torch.equal(half[name], tensor.float().bfloat16()) for name, tensor in original.items())


def test_a_value_too_large_for_float16_is_refused(tmp_path):
    config = ModelConfig(**TINY)
    tensors = write_checkpoint(tmp_path / "ours", config)
    tensors["final_norm.weight"][3] = 70000.0
    chunks = [("weight", n, Rectangle((0,) * t.dim(), tuple(t.shape)), tuple(t.shape), t) for n, t in tensors.items()]
    save(tmp_path / "ours", 4, chunks, meta={"model": config.model_dump()})
    with pytest.raises(ConvertError, match=r"transformer\.ln_f\.weight has values up to 7e\+04"):
        export(tmp_path / "ours", tmp_path / "hf", dtype="float16")
    assert not (tmp_path / "hf").exists() and not list(tmp_path.glob(".hf*"))
    export(tmp_path / "ours", tmp_path / "hf", dtype="bfloat16")


@pytest.mark.parametrize(
    "fields, model_type",
    [
        (NO_BIAS, "gpt2"),
        (ROTARY | NO_BIAS | dict(qkv_bias=True), "qwen2"),
        (ROTARY | NO_BIAS | dict(qkv_bias=True, mlp_bias=True), "llama"),
        (ROTARY | NO_BIAS | dict(out_bias=True), "llama"),
        (ROTARY | NO_BIAS | dict(sliding_window=4), "mistral"),
        (ROTARY | NO_BIAS | dict(qkv_bias=True, sliding_window=4), "qwen2"),
        (ROTARY | NO_BIAS | dict(qk_norm=True, qkv_bias=True), "qwen3"),
        (ROTARY | NO_BIAS | dict(head_dim=6, num_attention_heads=3), "mistral"),
        (ROTARY | NO_BIAS | dict(head_dim=6, qkv_bias=True), "qwen2"),
    ],
)
def test_biases_the_model_lacks_are_zeros(fields, model_type, tmp_path):
    transformers = pytest.importorskip("transformers")
    tensors = write_checkpoint(tmp_path / "ours", ModelConfig(**(TINY | fields)), eod_id=11)
    export(tmp_path / "ours", tmp_path / "hf")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values()), report
    assert model.config.model_type == model_type
    assert model.config.eos_token_id == 11
    weights = HFWeights(tmp_path / "hf")
    for name in weights.parameters:
        assert torch.equal(
            weights.read(name), tensors[name] if name in tensors else torch.zeros_like(weights.read(name))
        )
    assert tensors.keys() <= weights.parameters.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_family(name):
    family, full = choose_family(ModelConfig(**PRESETS[name]))
    expected = {
        "gpt2": "gpt2",
        "gpt3": "gpt2",
        "llama": "llama",
        "qwen2": "qwen2",
        "qwen3": "qwen3",
        "mistral": "llama",
    }
    prefix = next(key for key in expected if name.lower().replace(".", "").replace("-", "").startswith(key))
    assert family.model_type in (expected[prefix], prefix)
    assert full.num_layers == PRESETS[name]["num_layers"]


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(norm="rmsnorm"), r"nearest is gpt2.*model\.norm = 'rmsnorm'"),
        (dict(num_key_value_heads=2), r"model\.num_key_value_heads = 2"),
        (dict(activation="swiglu"), r"model\.activation = 'swiglu'"),
        (ROTARY | NO_BIAS | dict(qk_norm=True, mlp_bias=True), r"model\.(mlp_bias|qk_norm) = True"),
        (NO_BIAS | dict(attention="linear"), r"model\.attention = 'linear'"),
    ],
)
def test_what_no_family_expresses_is_named(fields, message):
    with pytest.raises(ConvertError, match=message):
        choose_family(ModelConfig(**(TINY | fields)))


def test_tokenizer_files_go_along(tmp_path):
    import_checkpoint(GPT2, tmp_path / "ours")
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    for name in ("vocab.json", "merges.txt", "unrelated.bin"):
        (directory / name).write_text(name)
    export(tmp_path / "ours", tmp_path / "hf", tokenizer=directory)
    assert (tmp_path / "hf" / "merges.txt").read_text() == "merges.txt"
    assert not (tmp_path / "hf" / "unrelated.bin").exists()
    (tmp_path / "austen.model").write_bytes(b"pieces")
    export(tmp_path / "ours", tmp_path / "hf2", tokenizer=tmp_path / "austen.model")
    assert (tmp_path / "hf2" / "tokenizer.model").read_bytes() == b"pieces"
    # Generation settings came with the import and stay; the import's tokenizer would have gone.
    assert (tmp_path / "hf2" / "generation_config.json").read_bytes() == (GPT2 / "generation_config.json").read_bytes()
    with pytest.raises(ConvertError, match="no tokenizer there"):
        export(tmp_path / "ours", tmp_path / "hf3", tokenizer=tmp_path / "ours")
    with pytest.raises(ConvertError, match="config.json: is no tokenizer by its name"):
        export(tmp_path / "ours", tmp_path / "hf3", tokenizer=GPT2 / "config.json")


def test_targets(tmp_path, monkeypatch):
    import_checkpoint(GPT2, tmp_path / "ours")
    (tmp_path / "empty").mkdir()
    export(tmp_path / "ours", tmp_path / "empty")
    assert stat.S_IMODE((tmp_path / "empty").stat().st_mode) == 0o755
    for action in (
        lambda: export(tmp_path / "ours", tmp_path / "empty"),
        lambda: import_checkpoint(GPT2, tmp_path / "ours"),
    ):
        with pytest.raises(ConvertError, match="is there already and not empty"):
            action()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConvertError, match="is the directory you are in, which the result would replace"):
        export(tmp_path / "ours", ".")
    with pytest.raises(ConvertError, match="/proc/hf: cannot be written"):
        export(tmp_path / "ours", "/proc/hf")


def test_a_place_that_the_system_keeps_closed_is_named(monkeypatch, tmp_path):
    def refused(self: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "exists", refused)
    with pytest.raises(ConvertError, match="hf: cannot be written: Permission denied"):
        export(tmp_path / "ours", tmp_path / "hf")
    with pytest.raises(ConvertError, match="ours: cannot be read: Permission denied"):
        open_weights(tmp_path / "ours")


def test_sizes():
    assert parse_size("5GB") == 5 * 10**9 and parse_size("1.5 MiB") == 3 * 2**19 and parse_size(7) == 7
    for bad in ("", "big", "0", "-3MB", "5 parsecs"):
        with pytest.raises(ConvertError, match="not a size"):
            parse_size(bad)


def test_a_checkpoint_that_is_replaced_meanwhile_is_never_mixed_with_its_successor(tmp_path):
    config = ModelConfig(**TINY)
    write_checkpoint(tmp_path / "run", config)
    reader = hf_writer._Reader(open_weights(tmp_path / "run"))
    save(
        tmp_path / "run",
        3,
        [("weight", n, Rectangle((0,) * len(s), s), s, torch.ones(s)) for n, s in parameter_shapes(config).items()],
        meta={"model": config.model_dump()},
    )
    with pytest.raises(CheckpointError, match="rank_00000.safetensors: damaged: the checksum of"):
        reader.read("final_norm.weight", Rectangle((0,), (16,)), torch.float32)


def test_an_architecture_that_is_not_the_checkpoints(tmp_path):
    """As a manifest edited by hand has it: told before as many names are made up."""
    for number, (model, message) in enumerate(
        [
            ({"num_layers": 10**9}, "num_layers: 1000000000, but it holds 36 tensors"),
            ({"vocab_size": 10**12}, "is of another model"),
            ([], "the architecture, is not in it"),
        ]
    ):
        config = ModelConfig(**TINY)
        model = {**config.model_dump(), **model} if isinstance(model, dict) else model
        write_checkpoint(tmp_path / str(number), config, model=model, config=None, huggingface=[])
        with pytest.raises(CheckpointError, match=message):
            open_weights(tmp_path / str(number))
    write_checkpoint(tmp_path / "odd", config, config=None, huggingface=[], layout=3)
    export(tmp_path / "odd", tmp_path / "hf")
    assert HFWeights(tmp_path / "hf").tokens == dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
