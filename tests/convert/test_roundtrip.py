"""Every family into a checkpoint and out again, judged by transformers' own models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from megazero.convert import HFWeights, export, import_checkpoint, open_weights
from megazero.models import rotary
from megazero.models.context import Context
from megazero.models.gpt import GPT

transformers = pytest.importorskip("transformers")

LLAMA3 = dict(
    rope_type="llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
    rope_theta=500.0,
)
YARN = dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=32, rope_theta=1000.0)
SIZES = dict(
    vocab_size=101,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
GPT2 = dict(vocab_size=131, n_embd=32, n_layer=3, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)

# name → (model_type expected of the export, transformers config class, its arguments)
MODELS = {
    "gpt2": ("gpt2", "GPT2Config", GPT2),
    "gpt2-untied": ("gpt2", "GPT2Config", GPT2 | dict(tie_word_embeddings=False)),
    "gpt2-inner-gelu": ("gpt2", "GPT2Config", GPT2 | dict(n_inner=50, activation_function="gelu")),
    "llama": ("llama", "LlamaConfig", SIZES),
    "llama-mha-tied": ("llama", "LlamaConfig", SIZES | dict(num_key_value_heads=4, tie_word_embeddings=True)),
    "llama-biases": ("llama", "LlamaConfig", SIZES | dict(attention_bias=True, mlp_bias=True)),
    "llama-attention-bias": ("llama", "LlamaConfig", SIZES | dict(attention_bias=True)),
    "llama-head-dim": ("llama", "LlamaConfig", SIZES | dict(head_dim=12)),
    "llama3": ("llama", "LlamaConfig", SIZES | dict(rope_parameters=LLAMA3)),
    "llama-linear": (
        "llama",
        "LlamaConfig",
        SIZES | dict(rope_parameters=dict(rope_type="linear", factor=3.0, rope_theta=100.0)),
    ),
    "mistral": ("mistral", "MistralConfig", SIZES | dict(sliding_window=5)),
    "mistral-odd-width": ("mistral", "MistralConfig", SIZES | dict(hidden_size=30, head_dim=8, sliding_window=None)),
    "qwen2": ("qwen2", "Qwen2Config", SIZES),
    "qwen2-tied": ("qwen2", "Qwen2Config", SIZES | dict(tie_word_embeddings=True)),
    "qwen2-sliding": (
        "qwen2",
        "Qwen2Config",
        SIZES | dict(use_sliding_window=True, sliding_window=5, max_window_layers=0),
    ),
    "qwen2-yarn": ("qwen2", "Qwen2Config", SIZES | dict(rope_parameters=YARN)),
    "qwen3": ("qwen3", "Qwen3Config", SIZES | dict(head_dim=16)),
    "qwen3-bias": ("qwen3", "Qwen3Config", SIZES | dict(head_dim=8, attention_bias=True, tie_word_embeddings=True)),
}


def build(name: str) -> torch.nn.Module:
    """A model whose every parameter is random, so that one in the wrong place shows."""
    _, config_class, arguments = MODELS[name]
    config = getattr(transformers, config_class)(**arguments)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def hf_logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens).logits


def our_logits(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Logits (B, S, V) of megazero's own plain model with the directory's weights."""
    weights = open_weights(directory)
    config = weights.config
    model = GPT(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            head, _, kind = name.rpartition(".")
            module = model.get_submodule(head)
            if hasattr(module, "parts"):
                stem = head.rpartition(".")[0]
                parameter.copy_(torch.cat([weights.read(f"{stem}.{part.name}.{kind}") for part in module.parts]))
            else:
                parameter.copy_(weights.read(name))
    batch, length = tokens.shape
    positions = torch.arange(length)
    cos = sin = None
    if config.position == "rotary":
        cos, sin = rotary.tables(rotary.inverse_frequencies(config), rotary.amplitude(config), positions)
    mask = None
    if config.sliding_window is not None:
        distance = positions[:, None] - positions[None, :]
        mask = ((distance >= 0) & (distance < config.sliding_window))[None, None]
    context = Context(length, cos, sin, positions.repeat(batch), mask, None)
    with torch.no_grad():
        return model.head(model(tokens.flatten(), context)).view(batch, length, -1)


@pytest.fixture(scope="module", params=MODELS)
def trip(request, tmp_path_factory):
    """(name, original model, its directory, checkpoint directory, exported directory)."""
    root = tmp_path_factory.mktemp(request.param)
    model = build(request.param)
    model.save_pretrained(root / "hf")
    import_checkpoint(root / "hf", root / "checkpoint")
    export(root / "checkpoint", root / "exported")
    return request.param, model, root


def tokens_for(model: torch.nn.Module) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))


def test_import_gives_the_same_logits(trip):
    _, model, root = trip
    tokens = tokens_for(model)
    expected = hf_logits(model, tokens)
    for directory in (root / "hf", root / "checkpoint"):
        torch.testing.assert_close(our_logits(directory, tokens), expected, rtol=2e-5, atol=2e-5)


def test_export_gives_bitwise_the_same_logits(trip):
    name, model, root = trip
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        root / "exported", attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    assert loaded.config.model_type == MODELS[name][0]
    assert loaded.dtype == torch.float32
    tokens = tokens_for(model)
    assert torch.equal(hf_logits(loaded.eval(), tokens), hf_logits(model, tokens))


def test_import_of_the_export_is_the_same_model(trip):
    _, _, root = trip
    first, second = HFWeights(root / "hf"), HFWeights(root / "exported")
    assert first.config == second.config
    assert all(torch.equal(first.read(name), second.read(name)) for name in first.parameters)


def test_tied_head_is_not_stored(trip):
    _, model, root = trip
    stored = safetensors.torch.load_file(root / "exported" / "model.safetensors")
    assert ("lm_head.weight" in stored) == (not model.config.tie_word_embeddings)


@pytest.mark.parametrize("name", ["llama3", "qwen2-yarn", "llama-linear", "mistral"])
def test_config_in_the_style_of_transformers_4(name, tmp_path):
    """rope_theta and rope_scaling beside each other, torch_dtype, type instead of rope_type."""
    model = build(name)
    model.save_pretrained(tmp_path / "hf")
    expected = HFWeights(tmp_path / "hf").config
    path = tmp_path / "hf" / "config.json"
    raw = json.loads(path.read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["torch_dtype"] = raw.pop("dtype")
    if rope["rope_type"] == "linear":
        rope["type"] = rope.pop("rope_type")
    raw["rope_scaling"] = rope if rope.get("rope_type") != "default" else None
    path.write_text(json.dumps(raw))
    assert HFWeights(tmp_path / "hf").config == expected


def test_fields_left_out_have_the_defaults_of_transformers(tmp_path):
    """For each family an empty config.json but for its type means the same model to both."""
    from megazero.convert.configs import read_config, write_config

    for model_type, config_class in {m[0]: m[1] for m in MODELS.values()}.items():
        whole = getattr(transformers, config_class)().to_dict()
        bare_family, bare = read_config({"model_type": model_type}, "config.json")
        assert read_config(whole, "config.json") == (bare_family, bare)
        ours = write_config(bare_family, bare, "float32", {})
        known = {k: v for k, v in ours.items() if k in whole and not k.endswith(("token_id", "dtype"))}
        same = {k: whole[k] for k in known}
        for loose in ("architectures", "n_inner", "max_window_layers", "layer_types", "sliding_window", "head_dim"):
            known.pop(loose, None), same.pop(loose, None)
        assert known == same
