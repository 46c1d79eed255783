"""Plans of adapters against what peft's model holds and sends under `megazero.initialize`'s engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import megazero
from megazero.config import Config
from megazero.errors import ConfigError
from megazero.models.parameters import parameter_count
from megazero.planner.adapters import adapter_memory, check_adapters, search_adapters
from megazero.planner.chips import CHIPS
from megazero.planner.dry_adapters import adapters_dry_run, adapters_planned
from tests.planner.live import LiveStorages

MODEL: dict[str, Any] = dict(
    num_layers=3,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    ffn_hidden_size=176,
    vocab_size=101,
    max_position_embeddings=64,
    norm="rmsnorm",
    activation="swiglu",
    position="rotary",
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    tie_word_embeddings=False,
)


def settings(model: dict[str, Any], stage: int, batch: int, **more: Any) -> Config:
    zero = {"stage": stage, "stage3_param_persistence_threshold": more.pop("threshold", 100)}
    length = more.pop("seq_length", 16)
    train = {"global_batch_size": batch, "micro_batch_size": 2, **more}
    return Config.model_validate({"model": model, "data": {"seq_length": length}, "zero": zero, "train": train})


@pytest.mark.parametrize(
    ("stage", "dp", "micro_batches", "recompute", "changes"),
    [
        (0, 2, 2, "none", {}),
        (1, 2, 2, "full", {"tie_word_embeddings": True}),
        (2, 2, 3, "none", {"qkv_bias": True, "num_key_value_heads": 4}),
        (3, 3, 3, "full", {}),
        (3, 2, 1, "none", {"tie_word_embeddings": True}),
    ],
)
def test_counted_is_planned(stage: int, dp: int, micro_batches: int, recompute: str, changes: dict[str, Any]) -> None:
    config = settings({**MODEL, **changes}, stage, 2 * dp * micro_batches, recompute=recompute)
    assert adapters_dry_run(config, dp, dp - 1, 4) == adapters_planned(config, dp, dp - 1, 4)


def test_a_frozen_parameter_takes_two_bytes_and_a_trained_one_eighteen() -> None:
    model = {"preset": "llama3.1-8b"}
    config = settings(model, 0, 8)
    state = adapter_memory(config, config.model.architecture, 16, config.layout(1)).state
    # peft's print_trainable_parameters of Llama-3.1 8B with r=16 on q_proj and v_proj: 6,815,744.
    assert state.optimizer == 12 * 6_815_744 and state.gradients == 4 * 6_815_744
    assert state.parameters == 2 * (parameter_count(config.model.architecture) + 6_815_744)


@pytest.fixture
def alone() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_peak_is_that_of_a_step(recompute: str, alone: None) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
    length, vocab, rank, batch = 64, 2000, 8, 8
    made = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=vocab)).to(torch.bfloat16)
    if recompute == "full":
        made.gradient_checkpointing_enable({"use_reentrant": False})
    model = get_peft_model(made, LoraConfig(r=rank, target_modules=["q_proj", "v_proj"]))
    ds = {"train_micro_batch_size_per_gpu": batch, "bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}
    tokens = torch.randint(vocab, (batch, length))
    padding = torch.ones_like(tokens)
    padding[:, -1] = 0
    with LiveStorages() as live:
        engine, *_ = megazero.initialize(model=model, config=ds)
        for _ in range(2):
            live.peak = 0
            output = engine(input_ids=tokens, labels=tokens, attention_mask=padding, use_cache=False)
            engine.backward(output.loss)
            engine.step()
            del output
    changes = dict(num_layers=4, hidden_size=128, ffn_hidden_size=352, vocab_size=vocab)
    config = settings({**MODEL, **changes}, 0, batch, micro_batch_size=batch, recompute=recompute, seq_length=length)
    planned = adapter_memory(config, config.model.architecture, rank, config.layout(1))
    assert planned.peak == pytest.approx(live.peak, rel=0.05)


def test_what_has_no_plan_is_said() -> None:
    with pytest.raises(ConfigError, match="--lora: 0 must be from 1 to model.hidden_size = 64"):
        check_adapters(settings(MODEL, 0, 2), settings(MODEL, 0, 2).model.architecture, 0)
    gpt2 = settings({"preset": "gpt2-124m"}, 0, 2)
    with pytest.raises(ConfigError, match="--lora: adapters of q_proj and v_proj need a model of the Llama"):
        search_adapters(gpt2, 1, CHIPS["h100"], 8)
    with pytest.raises(ConfigError, match="train.global_batch_size: 4 is not a multiple of the 3 GPUs"):
        search_adapters(settings(MODEL, 0, 4), 3, CHIPS["h100"], 8)
