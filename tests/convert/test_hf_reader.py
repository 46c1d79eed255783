"""The many forms in which Hugging Face weights come, and the ways they are wrong."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from megazero.convert import HFWeights, import_checkpoint
from megazero.convert.configs import read_config
from megazero.convert.families import FAMILIES
from megazero.errors import ConvertError
from megazero.sharding import Rectangle

ORACLE = Path(__file__).parent.parent / "fixtures" / "oracle"
GPT2, LLAMA = ORACLE / "gpt2-tied" / "hf_init", ORACLE / "llama-gqa" / "hf_init"


def copy(source: Path, target: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    shutil.copytree(source, target)
    return target, safetensors.torch.load_file(target / "model.safetensors")


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def assert_same(first: HFWeights, second: HFWeights) -> None:
    assert first.config == second.config
    for name in first.parameters:
        assert torch.equal(first.read(name), second.read(name)), name


def test_gpt2_tensors_are_split_and_transposed():
    stored = safetensors.torch.load_file(GPT2 / "model.safetensors")
    weights = HFWeights(GPT2)
    fused, bias = (stored[f"transformer.h.2.attn.c_attn.{kind}"] for kind in ("weight", "bias"))
    for part, letter in enumerate("qkv"):
        columns = slice(64 * part, 64 * part + 64)
        assert torch.equal(weights.read(f"layers.2.attention.{letter}.weight"), fused[:, columns].T)
        assert torch.equal(weights.read(f"layers.2.attention.{letter}.bias"), bias[columns])
    assert torch.equal(weights.read("layers.1.mlp.up.weight"), stored["transformer.h.1.mlp.c_fc.weight"].T)
    assert torch.equal(weights.read("embedding.word.weight"), stored["transformer.wte.weight"])


@pytest.mark.parametrize("source", [GPT2, LLAMA])
def test_a_box_is_the_same_part_of_the_whole(source):
    weights = HFWeights(source)
    generator = torch.Generator().manual_seed(3)
    for name, shape in weights.parameters.items():
        whole = weights.read(name)
        assert whole.shape == shape and whole.dtype == torch.float32 and whole.is_contiguous()
        low = [int(torch.randint(0, size, (), generator=generator)) for size in shape]
        count = [int(torch.randint(1, s - lo + 1, (), generator=generator)) for lo, s in zip(low, shape, strict=True)]
        box = Rectangle(tuple(low), tuple(count))
        assert torch.equal(weights.read(name, box), whole[box.within(Rectangle((0,) * len(shape), shape))])


def test_what_is_read_may_be_changed():
    weights = HFWeights(LLAMA)
    before = weights.read("final_norm.weight").clone()
    weights.read("final_norm.weight").zero_()
    assert torch.equal(weights.read("final_norm.weight"), before)


def test_hub_files_without_prefix_and_with_buffers(tmp_path):
    directory, tensors = copy(GPT2, tmp_path / "hf")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    for layer in range(4):
        bare[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
        bare[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    safetensors.torch.save_file(bare, directory / "model.safetensors")
    assert_same(HFWeights(directory), HFWeights(GPT2))


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path):
    directory, tensors = copy(GPT2, tmp_path / "hf")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    safetensors.torch.save_file(tensors, directory / "model.safetensors")
    assert_same(HFWeights(directory), HFWeights(GPT2))
    for name in ("lm_head.weight", "transformer.wte.weight"):
        tensors[name][3, 5] = float("nan")  # a model that has diverged is tied all the same
    safetensors.torch.save_file(tensors, directory / "model.safetensors")
    assert HFWeights(directory).read("embedding.word.weight").isnan().sum() == 1
    tensors["lm_head.weight"][514, 63] += 1
    safetensors.torch.save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ConvertError, match="lm_head.weight differs from the word embedding, but config.json"):
        HFWeights(directory)


@pytest.mark.parametrize("form", ["bin", "legacy bin", "sharded bin", "sharded safetensors"])
def test_other_file_forms(form, tmp_path):
    directory, tensors = copy(LLAMA, tmp_path / "hf")
    (directory / "model.safetensors").unlink()
    if "sharded" not in form:
        torch.save(tensors, directory / "pytorch_model.bin", _use_new_zipfile_serialization=form == "bin")
    else:
        names = sorted(tensors)
        weight_map = {name: f"part-{number % 3}" for number, name in enumerate(names)}
        for file in set(weight_map.values()):
            part = {name: tensors[name] for name in names if weight_map[name] == file}
            torch.save(part, directory / file) if "bin" in form else safetensors.torch.save_file(part, directory / file)
        index = ("pytorch_model.bin" if "bin" in form else "model.safetensors") + ".index.json"
        (directory / index).write_text(json.dumps({"weight_map": weight_map}))
    assert_same(HFWeights(directory), HFWeights(LLAMA))


def test_half_precision_is_widened(tmp_path):
    directory, tensors = copy(LLAMA, tmp_path / "hf")
    half = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    safetensors.torch.save_file(half, directory / "model.safetensors")
    read = HFWeights(directory).read("layers.3.mlp.gate.weight")
    assert torch.equal(read, half["model.layers.3.mlp.gate_proj.weight"].float())


def drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.2.self_attn.k_proj.weight"]


def drop_head(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["lm_head.weight"]


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.4.mlp.up_proj.weight"] = torch.zeros(172, 64)


def reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.embed_tokens.weight"] = torch.zeros(1024, 64)


def quantise(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)


@pytest.mark.parametrize(
    "change, message",
    [
        (drop, r"tensors missing .*model\.layers\.2\.self_attn\.k_proj\.weight"),
        (drop_head, r"lm_head\.weight; if its head is its word embedding, config\.json must say"),
        (add, r"tensors unexpected .*model\.layers\.4\.mlp\.up_proj\.weight"),
        (reshape, r"embed_tokens\.weight has shape \[1024, 64\], \[1003, 64\] follows"),
        (quantise, r"model\.norm\.weight is of dtype I8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, message, tmp_path):
    directory, tensors = copy(LLAMA, tmp_path / "hf")
    change(tensors)
    safetensors.torch.save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ConvertError, match=message):
        HFWeights(directory)


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def empty(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"")


def pointer(directory: Path) -> None:
    (directory / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def remove(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def twin(directory: Path) -> None:
    tensors = safetensors.torch.load_file(directory / "model.safetensors")
    tensors["norm.weight"] = 2 * tensors["model.norm.weight"]
    safetensors.torch.save_file(tensors, directory / "model.safetensors")


def dangling(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").symlink_to("../../blobs/0123")


def a_directory(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").mkdir()


def pipe(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    os.mkfifo(directory / "model.safetensors")


def pipe_for_config(directory: Path) -> None:
    (directory / "config.json").unlink()
    os.mkfifo(directory / "config.json")


def sparse_bin(directory: Path) -> None:
    tensors = safetensors.torch.load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to_sparse()
    torch.save(tensors, directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


def meta_bin(directory: Path) -> None:
    tensors = safetensors.torch.load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to("meta")
    torch.save(tensors, directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


def hub_cache(directory: Path) -> None:
    (directory / "config.json").unlink()
    (directory / "snapshots").mkdir()


def a_file(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.write_text("{}")


def lost_shard(directory: Path) -> None:
    remove(directory)
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')


def bad_bin(directory: Path) -> None:
    remove(directory)
    (directory / "pytorch_model.bin").write_bytes(b"PK no archive")


def tar_bin(directory: Path) -> None:
    remove(directory)
    (directory / "pytorch_model.bin").write_bytes(b"\0" * 10240)  # an empty tar archive


def list_bin(directory: Path) -> None:
    remove(directory)
    torch.save([torch.zeros(2)], directory / "pytorch_model.bin")


def code_bin(directory: Path) -> None:
    remove(directory)
    torch.save({"a": shutil.rmtree}, directory / "pytorch_model.bin")


def flip_header(directory: Path) -> None:
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[data.index(b"data_offsets")] ^= 1
    path.write_bytes(data)


def shards(directory: Path, weight_map: object, **parts: list[str]) -> None:
    """Each part's tensors in a file of its name, and an index."""
    tensors = safetensors.torch.load_file(directory / "model.safetensors")
    remove(directory)
    for part, names in parts.items():
        chosen = {name: tensors[name] for name in tensors if name in names or "rest" in names}
        safetensors.torch.save_file(chosen, directory / f"{part}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


NORM = "model.norm.weight"


def twice(directory: Path) -> None:
    shards(directory, {NORM: "a.safetensors", "b": "b.safetensors"}, a=["rest"], b=[NORM])


def not_where_it_should_be(directory: Path) -> None:
    shards(directory, {NORM: "a.safetensors", "model.gone": "a.safetensors"}, a=["rest"])


def no_names(directory: Path) -> None:
    shards(directory, [NORM], a=["rest"])


def elsewhere(directory: Path) -> None:
    shards(directory, {NORM: "../a.safetensors"}, a=["rest"])


def endless_name(directory: Path) -> None:
    shards(directory, {NORM: "a" * 300}, a=["rest"])


def no_index(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "model-00001-of-00001.safetensors")


def deep_json(directory: Path) -> None:
    (directory / "config.json").write_text('{"a": ' * 100_000)


def list_json(directory: Path) -> None:
    (directory / "config.json").write_text("[1]")


def binary_json(directory: Path) -> None:
    (directory / "config.json").write_bytes(b"\xff\xfe\x00")


def deep_index(directory: Path) -> None:
    remove(directory)
    (directory / "model.safetensors.index.json").write_text("[" * 100_000)


def broken_json(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": ')


def no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


@pytest.mark.parametrize(
    "damage, message",
    [
        (truncate, "model.safetensors: damaged or cut short"),
        (empty, "model.safetensors: damaged or cut short"),
        (pointer, "Git LFS pointer"),
        (remove, "holds neither model.safetensors nor pytorch_model.bin"),
        (lost_shard, "model-00001-of-00002.safetensors, missing"),
        (bad_bin, "pytorch_model.bin: damaged"),
        (tar_bin, r"pytorch_model.bin: damaged or cut short$"),
        (list_bin, "pytorch_model.bin: holds a list, not a dict of tensors"),
        (code_bin, "pytorch_model.bin: damaged or cut short .or it holds more than tensors"),
        (flip_header, "model.safetensors: damaged or cut short"),
        (twice, r"b.safetensors: model.norm.weight is in a.safetensors as well"),
        (not_where_it_should_be, r"a.safetensors: has no tensor model.gone, which model.safetensors.index.json says"),
        (no_names, r"index.json: its weight_map must give the name of a file beside it"),
        (elsewhere, r"index.json: its weight_map must give the name of a file beside it"),
        (endless_name, r"index.json: its weight_map must give the name of a file beside it"),
        (no_index, "nor pytorch_model.bin, whole or in shards with their index; it holds model-00001-of-00001"),
        (deep_json, "config.json: cannot be read: nested too deeply"),
        (list_json, "config.json: not a JSON object"),
        (binary_json, "config.json: cannot be read"),
        (deep_index, "index.json: cannot be read: nested too deeply"),
        (broken_json, "config.json: cannot be read"),
        (no_config, "holds no config.json"),
        (twin, "model.safetensors: norm.weight and model.norm.weight are the same tensor|model.norm.weight and norm.w"),
        (dangling, "model.safetensors: a link to ../../blobs/0123, which is missing"),
        (a_directory, "model.safetensors: a directory, not a file"),
        (pipe, "model.safetensors: a pipe or device, not a file"),
        (pipe_for_config, "config.json: cannot be read: .*not a regular file"),
        (sparse_bin, "pytorch_model.bin: model.norm.weight is a tensor sparse"),
        (meta_bin, "pytorch_model.bin: model.norm.weight is a tensor without values"),
        (hub_cache, "the models of this cache are in snapshots/"),
        (a_file, "hf: is a file; give the directory it is in"),
        (shutil.rmtree, "no such directory"),
    ],
)
def test_damage_is_named(damage, message, tmp_path):
    directory, _ = copy(LLAMA, tmp_path / "hf")
    damage(directory)
    with pytest.raises(ConvertError, match=message):
        import_checkpoint(directory, tmp_path / "ours")
    assert not [path for path in tmp_path.iterdir() if path != directory]


@pytest.mark.parametrize(
    "source, changes, message",
    [
        (GPT2, {"model_type": "bloom"}, "model_type 'bloom' is not supported; choose one of gpt2, llama"),
        (GPT2, {"model_type": None}, "model_type None"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        (GPT2, {"scale_attn_weights": False}, "scale_attn_weights = False"),
        (GPT2, {"activation_function": "gelu_fast"}, "activation_function = 'gelu_fast'"),
        (GPT2, {"embd_pdrop": 0.1}, "embd_pdrop = 0.1 differs from resid_pdrop"),
        (GPT2, {"n_layer": 0}, "n_layer: .*greater than or equal to 1"),
        (GPT2, {"vocab_size": "many"}, "vocab_size: .*'many'"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
        (LLAMA, {"rope_scaling": {"type": "longrope"}}, "rope_type 'longrope' is not supported"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "rope_type 'linear' needs factor"),
        (
            LLAMA,
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope_type .llama3. needs low_freq_factor, high_freq_factor",
        ),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}}, "truncate = False"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (
            LLAMA,
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
            "sliding attention in layers 2 and later but not in all",
        ),
        (GPT2, {"num_attention_heads": 2}, "n_head = 4 and num_attention_heads = 2 are one setting"),
        (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta: .*greater than 0"),
        (
            LLAMA,
            {"model_type": "mistral", "layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
            "sliding attention in layer 3 but not in all",
        ),
        (LLAMA, {"model_type": "mistral", "layer_types": ["full_attention"]}, "layer_types = .* for each layer"),
        (LLAMA, {"num_hidden_layers": 10**9}, "1000000000 layers, but the files hold 39 tensors"),
    ],
)
def test_config_that_cannot_be_expressed_is_refused_by_name(source, changes, message, tmp_path):
    directory, _ = copy(source, tmp_path / "hf")
    edit_config(directory, **changes)
    with pytest.raises(ConvertError, match=rf"config\.json: {message}"):
        HFWeights(directory)


@pytest.mark.parametrize(
    "fields, window",
    [
        ({"use_sliding_window": False, "sliding_window": 131072}, None),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 4}, None),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, 9),
        ({"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention"] * 4}, 9),
        ({"use_sliding_window": False, "sliding_window": None, "layer_types": ["full_attention"] * 4}, None),
    ],
)
def test_sliding_window_of_qwen2_counts_only_where_it_is_used(fields, window):
    raw = {"model_type": "qwen2", "num_hidden_layers": 4, **fields}
    assert read_config(raw, "config.json")[1].sliding_window == window


WRONG = ("many", -1, 0, 1e400, None, [], {}, [None], True, 10**30)


@pytest.mark.parametrize("source", [GPT2, LLAMA])
def test_no_value_of_any_field_is_a_traceback(source):
    """A wrong value is an error that names the file, or means the same as leaving the field out."""
    raw = json.loads((source / "config.json").read_text())
    rope = ("rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor", "layer_types", "eos_token_id")
    for model_type in (raw["model_type"],) if source == GPT2 else ("llama", "mistral", "qwen2", "qwen3"):
        fields = {*raw, *FAMILIES[model_type].defaults, *rope}
        for field, value in itertools.product(sorted(fields), WRONG):
            for also in ({}, {"use_sliding_window": True}):
                try:
                    read_config({**raw, "model_type": model_type, **also, field: value}, "config.json")
                except ConvertError as error:
                    assert str(error).startswith("config.json: "), (field, value)
    scalings = ({"type": kind, key: value} for kind in ("linear", "llama3", "yarn") for key in ROPE for value in WRONG)
    for scaling in scalings:
        try:
            read_config({**raw, "model_type": "llama", "rope_scaling": {**ROPE, **scaling}}, "config.json")
        except ConvertError as error:
            assert str(error).startswith("config.json: "), scaling


ROPE = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
