"""Checkpoints that megatron-core wrote (make_megatron.py) come in: its logits, its next losses; what is wrong is named.

fixtures/megatron.tar.xz holds them; --whole makes them anew.
"""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megazero.convert.megatron import MegatronWeights, is_megatron
from megazero.convert.megatron_args import read_args
from megazero.errors import ConvertError
from megazero.sharding import Rectangle
from tests.convert.make_model import logits, losses_after, unpack

LAYOUTS = [f"{kind}-tp{tp}-pp{pp}" for kind in ("gpt2", "llama") for tp in (1, 2) for pp in (1, 2)]
BOTH = [*LAYOUTS, "qwen-tp2-pp2", "llama-vp2"]
MORE = ["llama-distributed-optimizer", "gpt2-optimizer", "llama-bf16", "llama-buckets"]
ITERATION = "iter_0000003"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    target = tmp_path_factory.mktemp("megatron") / "made"
    if request.config.getoption("--whole"):
        command = [sys.executable, "-W", "ignore", "-m", "tests.convert.make_megatron", target]
        subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
        return target
    return unpack("megatron", target)


def assert_same_logits(weights: Any, expected: dict[str, torch.Tensor]) -> None:
    found, wanted = logits(weights, expected["tokens"]), expected["logits"]
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("form", ["dist", "legacy"])
@pytest.mark.parametrize("case", BOTH)
def test_logits_are_megatrons(made: Path, case: str, form: str) -> None:
    assert is_megatron(made / case / form) and is_megatron(made / case / form / ITERATION)
    weights = MegatronWeights(made / case / form)
    assert weights.training is None and "weights only" in weights.notes[0]
    assert_same_logits(weights, load_file(made / case / "expected.safetensors"))


@pytest.mark.parametrize("case", ["llama-distributed-optimizer", "gpt2-optimizer"])
def test_training_goes_on_with_megatrons_losses(made: Path, case: str, tmp_path: Path) -> None:
    weights, expected = MegatronWeights(made / case / "dist"), load_file(made / case / "expected.safetensors")
    assert_same_logits(weights, expected)
    training = weights.training
    assert training is not None and weights.notes == ()
    assert (training.step, training.consumed_samples, training.optimizer_steps) == (3, 6, 3)
    losses = losses_after(training, expected["batches"], tmp_path / "run")
    assert losses == pytest.approx(expected["losses"].tolist(), rel=5e-6)


def test_masters_are_taken_where_there_are_any(made: Path) -> None:
    weights = MegatronWeights(made / "llama-bf16" / "dist")
    assert weights.training is not None
    finer = 0
    for name, shape in weights.parameters.items():
        box = Rectangle((0,) * len(shape), shape)
        master, half = weights.read(name), weights.read_as("weight", name, box)
        assert torch.equal(master.bfloat16().float(), half), name
        finer += not torch.equal(master, half)
    assert finer == len(weights.parameters)


def test_moments_by_buckets_are_left_out_and_it_is_said(made: Path) -> None:
    weights = MegatronWeights(made / "llama-buckets" / "dist")
    assert weights.training is None and "--dist-ckpt-optim-fully-reshardable" in weights.notes[0]
    assert_same_logits(weights, load_file(made / "llama-buckets" / "expected.safetensors"))


def test_moments_in_flat_pieces_are_left_out_and_it_is_said(made: Path, tmp_path: Path) -> None:
    """As versions before 0.15 had them: tensors of one more dimension."""
    shutil.copytree(made / "llama-distributed-optimizer" / "dist", tmp_path / "flat")
    path = tmp_path / "flat" / ITERATION / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for name, tensor in metadata.state_dict_metadata.items():
        if name.startswith("optimizer.state."):
            for chunk in tensor.chunks:
                chunk.offsets, chunk.sizes = torch.Size((*chunk.offsets, 0)), torch.Size((*chunk.sizes, 1))
    path.write_bytes(pickle.dumps(metadata))
    weights = MegatronWeights(tmp_path / "flat")
    assert weights.training is None and "--dist-ckpt-optim-fully-reshardable" in weights.notes[0]


@pytest.mark.parametrize("form", ["dist", "legacy"])
@pytest.mark.parametrize("case", ["gpt2-tp2-pp2", "llama-tp2-pp1", "qwen-tp2-pp2"])
def test_a_box_is_the_same_part_of_the_whole(made: Path, case: str, form: str) -> None:
    weights, generator = MegatronWeights(made / case / form), torch.Generator().manual_seed(3)
    for name, shape in weights.parameters.items():
        whole = weights.read(name)
        assert whole.shape == shape and whole.dtype == torch.float32
        low = [int(torch.randint(0, size, (), generator=generator)) for size in shape]
        count = [int(torch.randint(1, s - lo + 1, (), generator=generator)) for lo, s in zip(low, shape, strict=True)]
        box = Rectangle(tuple(low), tuple(count))
        assert torch.equal(weights.read(name, box), whole[box.within(Rectangle((0,) * len(shape), shape))]), name
        whole.zero_()
        assert weights.read(name).any(), name


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Saves a file of a legacy checkpoint, or common.pt, anew."""
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


def legacy_names(state: dict[str, Any]) -> None:
    """As Megatron-LM had them before Megatron-Core: nested, with other names of the same modules."""
    names = {
        "self_attention.linear_qkv": "attention.query_key_value",
        "self_attention.linear_proj": "attention.dense",
        "mlp.linear_fc1": "mlp.dense_h_to_4h",
        "mlp.linear_fc2": "mlp.dense_4h_to_h",
        "pre_mlp_layernorm": "post_attention_layernorm",
    }
    tree: dict[str, Any] = {"embedding": {"word_embeddings": {}, "position_embeddings": {}}, "transformer": {}}
    for name, tensor in state["model"].items():
        if name.startswith("embedding."):
            tree["embedding"][name.split(".")[1]]["weight"] = tensor
        elif isinstance(tensor, torch.Tensor):
            for new, old in names.items():
                name = name.replace(new, old)
            tree["transformer"][name.removeprefix("decoder.")] = tensor
    state["model"] = {"language_model": tree}


@pytest.mark.parametrize("version", [0, 1.0, 3.0])
def test_names_and_orders_of_before_megatron_core(made: Path, tmp_path: Path, version: float) -> None:
    """Version 0 stacked the q of all heads, then k, then v; 1.0 had q, k and v feature by feature."""

    def older(state: dict[str, Any]) -> None:
        heads, size = 2, 2  # of one of two tensor-parallel ranks
        for name, tensor in state["model"].items():
            if "linear_qkv." in name and isinstance(tensor, torch.Tensor) and version < 2:
                rows = tensor.view(heads, 3, size, *tensor.shape[1:])
                swapped = rows.transpose(0, 1) if version == 0 else rows.transpose(1, 2)
                state["model"][name] = swapped.reshape(tensor.shape).contiguous()
        legacy_names(state)
        state["checkpoint_version"] = version
        if version == 0:
            del state["checkpoint_version"]

    shutil.copytree(made / "gpt2-tp2-pp1" / "legacy", tmp_path / "old")
    for rank in (0, 1):
        rewrite(tmp_path / "old" / ITERATION / f"mp_rank_{rank:02d}" / "model_optim_rng.pt", older)
    weights = MegatronWeights(tmp_path / "old")
    assert_same_logits(weights, load_file(made / "gpt2-tp2-pp1" / "expected.safetensors"))


def test_files_of_before_torch_1_6(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "gpt2-tp1-pp1" / "legacy", tmp_path / "old")
    path = tmp_path / "old" / ITERATION / "mp_rank_00" / "model_optim_rng.pt"
    torch.save(torch.load(path, weights_only=False), path, _use_new_zipfile_serialization=False)
    assert_same_logits(MegatronWeights(tmp_path / "old"), load_file(made / "gpt2-tp1-pp1" / "expected.safetensors"))


def test_a_config_json_cuts_the_padding_of_the_vocabulary(made: Path, tmp_path: Path) -> None:
    fields = {"n_layer": 3, "n_embd": 8, "n_head": 4, "n_positions": 16, "vocab_size": 30, "resid_pdrop": 0.0}
    config = {"model_type": "gpt2", "embd_pdrop": 0.0, "attn_pdrop": 0.0, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = made / "gpt2-tp2-pp2"
    expected = load_file(folder / "expected.safetensors")
    for form in ("dist", "legacy"):
        weights = MegatronWeights(folder / form, tmp_path)
        assert weights.config.vocab_size == 30
        found = logits(weights, expected["tokens"].clamp(max=29))
        assert found.shape[-1] == 30
    whole = MegatronWeights(folder / "dist").read("embedding.word.weight")
    assert torch.equal(weights.read("embedding.word.weight"), whole[:30])
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_head": 2, "activation_function": "relu"}))
    with pytest.raises(ConvertError, match=r"config\.json: differs from the args .*num_attention_heads \(2, not 4\)"):
        MegatronWeights(folder / "dist", tmp_path)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (eval, ("open('ran', 'w').close()",))


def test_nothing_in_a_pickle_runs(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made / "gpt2-tp1-pp1", tmp_path / "evil")
    legacy = tmp_path / "evil" / "legacy" / ITERATION / "mp_rank_00" / "model_optim_rng.pt"
    metadata = tmp_path / "evil" / "dist" / ITERATION / ".metadata"
    rewrite(metadata.parent / "common.pt", lambda state: state.update(more=Evil()))
    loaded = pickle.loads(metadata.read_bytes())
    loaded.planner_data = Evil()
    metadata.write_bytes(pickle.dumps(loaded))
    MegatronWeights(tmp_path / "evil" / "dist")
    state = torch.load(legacy, weights_only=False) | {"more": Evil()}
    for zipped in (True, False):
        torch.save(state, legacy, _use_new_zipfile_serialization=zipped)
        MegatronWeights(tmp_path / "evil" / "legacy")
    assert not (tmp_path / "ran").exists()
    torch.load(legacy, weights_only=False)
    assert (tmp_path / "ran").exists()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def first_chunks(folder: Path) -> Path:
    return sorted((folder / ITERATION).glob("*.distcp"))[0]


DAMAGE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "empty pointer": ("dist", lambda p: (p / "latest_checkpointed_iteration.txt").write_text(""), "is empty"),
    "wrong pointer": (
        "dist",
        lambda p: (p / "latest_checkpointed_iteration.txt").write_text("9"),
        "no folder .*iter_0000009",
    ),
    "no number": ("dist", lambda p: (p / "latest_checkpointed_iteration.txt").write_text("last"), "'last'.* no folder"),
    "lost chunks": ("dist", lambda p: first_chunks(p).unlink(), r"distcp: missing"),
    "cut chunks": ("dist", lambda p: truncate(first_chunks(p)), r"distcp: damaged or cut short"),
    "empty metadata": ("dist", lambda p: (p / ITERATION / ".metadata").write_bytes(b""), r"\.metadata: damaged"),
    "cut common": ("dist", lambda p: truncate(p / ITERATION / "common.pt"), r"common\.pt: damaged or cut short"),
    "zarr": ("dist", lambda p: (p / ITERATION / "metadata.json").write_text('{"sharded_backend": "zarr"}'), "'zarr'"),
    "lost rank": ("legacy", lambda p: shutil.rmtree(p / ITERATION / "mp_rank_01_001"), r"mp_rank_01_001/.*missing"),
    "lost first": ("legacy", lambda p: shutil.rmtree(p / ITERATION / "mp_rank_00_000"), r"mp_rank_00_000/.*missing"),
    "cut rank": (
        "legacy",
        lambda p: truncate(p / ITERATION / "mp_rank_01_000" / "model_optim_rng.pt"),
        r"mp_rank_01_000/model_optim_rng\.pt: damaged or cut short",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(made: Path, tmp_path: Path, damage: str) -> None:
    form, change, message = DAMAGE[damage]
    shutil.copytree(made / "llama-tp2-pp2" / form, tmp_path / "broken")
    change(tmp_path / "broken")
    with pytest.raises(ConvertError, match=message):
        weights = MegatronWeights(tmp_path / "broken")
        for name in weights.parameters:
            weights.read(name)


def test_of_two_iterations_the_latest_is_taken_or_one_must_be_named(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "llama-tp1-pp1" / "legacy", tmp_path / "run")
    shutil.copytree(tmp_path / "run" / ITERATION, tmp_path / "run" / "iter_0000001")
    assert MegatronWeights(tmp_path / "run").folder.name == ITERATION
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").unlink()
    assert is_megatron(tmp_path / "run")
    with pytest.raises(ConvertError, match="iter_0000001, iter_0000003; give the folder"):
        MegatronWeights(tmp_path / "run")
    assert MegatronWeights(tmp_path / "run" / "iter_0000001").folder.name == "iter_0000001"


def test_a_config_json_stands_in_for_missing_args(made: Path, tmp_path: Path) -> None:
    case = made / "llama-tp2-pp2"
    sizes = {"num_hidden_layers": 3, "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"head_dim": 2, "intermediate_size": 12, "vocab_size": 32, "max_position_embeddings": 16}
    config = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, **sizes, **more}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copytree(case, tmp_path / "bare")
    files = (tmp_path / "bare" / "legacy" / ITERATION).glob("mp_rank_*/model_optim_rng.pt")
    for path in (tmp_path / "bare" / "dist" / ITERATION / "common.pt", *files):
        rewrite(path, lambda state: state.pop("args"))
    for form in ("dist", "legacy"):
        weights = MegatronWeights(tmp_path / "bare" / form, tmp_path / "config.json")
        assert_same_logits(weights, load_file(case / "expected.safetensors"))


def test_no_args_and_foreign_tensors_are_refused(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "llama-tp1-pp1", tmp_path / "other")
    common = tmp_path / "other" / "dist" / ITERATION / "common.pt"
    rewrite(common, lambda state: state.pop("args"))
    with pytest.raises(ConvertError, match=r"holds no args.*config\.json"):
        MegatronWeights(tmp_path / "other" / "dist")
    legacy = tmp_path / "other" / "legacy" / ITERATION / "mp_rank_00" / "model_optim_rng.pt"
    rewrite(legacy, lambda state: state["model"].update({"decoder.layers.0.mlp.router.weight": torch.ones(2)}))
    with pytest.raises(ConvertError, match=r"does not have: decoder\.layers\.0\.mlp\.router\.weight"):
        MegatronWeights(tmp_path / "other" / "legacy")
    rewrite(legacy, lambda state: state["model"].pop("decoder.layers.0.mlp.router.weight"))
    rewrite(legacy, lambda state: state["model"].pop("decoder.layers.1.mlp.linear_fc2.weight"))
    with pytest.raises(ConvertError, match=r"missing .*decoder\.layers\.1\.mlp\.linear_fc2\.weight"):
        MegatronWeights(tmp_path / "other" / "legacy")


SIZES = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
    "padded_vocab_size": 16,
    "bias_gelu_fusion": True,
}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_experts": 8}, "args.num_experts = 8"),
        ({"multi_latent_attention": True}, "args.multi_latent_attention = True"),
        ({"mtp_num_layers": 1}, "args.mtp_num_layers = 1"),
        ({"apply_layernorm_1p": True}, "args.apply_layernorm_1p = True"),
        ({"rotary_percent": 0.5}, r"args.rotary_percent = 0\.5 is not supported: only 1\.0 is"),
        ({"rotary_interleaved": True}, "args.rotary_interleaved = True"),
        ({"squared_relu": True}, "args.squared_relu = True"),
        ({"position_embedding_type": "yarn"}, "'yarn' is not supported: only 'learned_absolute' or 'rope' is"),
        ({"qk_layernorm": True}, "args.qk_layernorm"),
        ({"hidden_size": None}, "args lacks hidden_size"),
        ({"bias_gelu_fusion": None}, "args lacks bias_gelu_fusion"),
        ({"num_layers": 0}, "num_layers: .*greater than"),
    ],
)
def test_args_that_cannot_be_expressed_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConvertError, match=f"where: {'' if 'args' in message else '.*'}.*{message}"):
        read_args(Namespace(**{**SIZES, **changes}), "where")


def test_args_say_which_activation_and_which_rotation() -> None:
    def read(**changes: Any) -> Any:
        return read_args(Namespace(**{**SIZES, **changes}), "where")

    assert read().activation == "gelu_tanh"
    assert read(bias_gelu_fusion=False).activation == "gelu"
    assert read(add_bias_linear=False).activation == "gelu"
    assert read(bias_gelu_fusion=False, openai_gelu=True).activation == "gelu_tanh"
    rope = {"position_embedding_type": "rope"}
    assert read(**rope).rope_scaling is None
    scaling = read(**rope, use_rope_scaling=True, rope_scaling_factor=32.0).rope_scaling
    assert (scaling.type, scaling.factor, scaling.original_max_position_embeddings) == ("llama3", 32.0, 8192)
    assert read(**rope, rotary_seq_len_interpolation_factor=4).rope_scaling.type == "linear"
    assert read(window_size=(7, 0)).sliding_window == 8
