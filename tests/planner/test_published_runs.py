"""The model of time against what others have published, and against this project's own runs on H200s.

Two figures are fitted on rows of the first table: the passes of MEGATRON_2024 on its first row, and what a lower power
limit leaves of the chip's rate on its last. Everything else of a chip is fitted on the own runs.
"""

from __future__ import annotations

from typing import Any

import pytest

from megazero.config import Config
from megazero.models.parameters import matmul_parameter_count
from megazero.planner.chips import CHIPS, Chip
from megazero.planner.practice import MEGATRON_2021, MEGATRON_2024, MEGAZERO, TORCHTITAN, Practice
from megazero.planner.step_time import StepTime, step_time


def settings(
    model: dict[str, Any],
    tp: int,
    pp: int,
    batch: int,
    micro_batch: int,
    seq_length: int,
    zero: int,
    recompute: str,
    sequence_parallel: bool | str = "auto",
    virtual_pp: int = 1,
) -> Config:
    return Config.model_validate(
        {
            "model": model,
            "parallel": {"tp": tp, "pp": pp, "virtual_pp": virtual_pp, "sequence_parallel": sequence_parallel},
            "zero": {"stage": zero},
            "data": {"seq_length": seq_length},
            "train": {
                "global_batch_size": batch,
                "micro_batch_size": micro_batch,
                "recompute": recompute,
                "precision": "bf16",
            },
        }
    )


def gpt(heads: int, hidden: int, layers: int, vocab: int, positions: int) -> dict[str, Any]:
    return dict(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        vocab_size=vocab,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
    )


def tflops_with_whole_attention(config: Config, gpus: int, time: StepTime) -> float:
    """Per GPU, of 12 · L · h · s FLOPs per token for attention."""
    model, seq_length = config.model.architecture, config.data.seq_length
    attention = 12 * model.num_layers * model.num_attention_heads * model.head_size * seq_length
    flops = config.train.global_batch_size * seq_length * (6 * matmul_parameter_count(model) + attention)
    return flops / gpus / time.seconds / 1e12


# Megatron-LM's README: heads, hidden, layers; tp, pp, GPUs, batch; TFLOP/s per GPU. It does not say micro-batches and
# virtual stages: here all four sequences of a replica at once where there is no pipeline, else one, and one layer per
# virtual stage.
MEGATRON_H100 = [
    ((16, 2048, 24), 1, 1, 48, 192, 4, 1, 408.8),
    ((32, 4096, 30), 2, 1, 96, 192, 4, 1, 465.9),
    ((56, 7168, 48), 8, 1, 384, 192, 4, 1, 459.6),
    ((80, 10240, 92), 8, 4, 1536, 768, 1, 23, 420.5),
    ((144, 18432, 112), 8, 16, 6144, 3072, 1, 7, 459.9),
]


@pytest.mark.parametrize(
    ("shape", "tp", "pp", "gpus", "batch", "micro_batch", "virtual_pp", "published"), MEGATRON_H100
)
def test_megatron_on_h100(
    shape: tuple, tp: int, pp: int, gpus: int, batch: int, micro_batch: int, virtual_pp: int, published: float
) -> None:
    config = settings(gpt(*shape, 131072, 4096), tp, pp, batch, micro_batch, 4096, 1, "none", virtual_pp=virtual_pp)
    time = step_time(config, gpus, CHIPS["h100"], MEGATRON_2024)
    found = tflops_with_whole_attention(config, gpus, time)
    print(f"{shape}: {found:.1f} of {published} TFLOP/s, {found / published - 1:+.1%}")
    assert found == pytest.approx(published, rel=0.15)


def h100_of_torchtitan() -> Chip:
    """What its benchmarks/llama3_h100 report says it ran on: HBM2e of 2.4 TB/s, and a power limit of 500 W of 700."""
    chip, left = CHIPS["h100"], 0.8
    efficiency = chip.efficiency.model_copy(
        update={"matmul": left * chip.efficiency.matmul, "attention": left * chip.efficiency.attention}
    )
    return chip.model_copy(update={"memory_bandwidth": 2.4e12, "efficiency": efficiency})


# The same report: 8 GPUs (fitted) and 128.
@pytest.mark.parametrize(("gpus", "published"), [(8, 6667), (128, 6514)])
def test_torchtitan_on_h100(gpus: int, published: float) -> None:
    config = settings({"preset": "llama3.1-8b"}, 1, 1, 2 * gpus, 2, 8192, 3, "selective")
    time = step_time(config, gpus, h100_of_torchtitan(), TORCHTITAN)
    found = 2 * 8192 / time.seconds
    print(f"torchtitan on {gpus}: {found:.0f} of {published} tokens/s, {found / published - 1:+.1%}")
    assert found == pytest.approx(published, rel=0.15)


def test_torchtitan_70b_on_h100() -> None:
    """Tensor parallelism over 8 and FSDP over 32 (its report of June 2025): nothing is fitted to it."""
    config = settings({"preset": "llama3-70b"}, 8, 1, 512, 16, 8192, 3, "full")
    found = 512 * 8192 / 256 / step_time(config, 256, h100_of_torchtitan(), TORCHTITAN).seconds
    print(f"torchtitan 70B on 256: {found:.0f} of 597 tokens/s, {found / 597.3 - 1:+.1%}")
    assert found == pytest.approx(597.3, rel=0.15)


# Narayanan et al. 2021, arXiv 2104.04473, table 1: full recompute, whose FLOPs count. Nothing here is fitted to it.
MEGATRON_A100 = [
    ((24, 2304, 24), 1, 1, 32, 512, 16, 137),
    ((32, 4096, 36), 4, 1, 128, 512, 16, 142),
    ((48, 6144, 40), 8, 1, 256, 1024, 4, 135),
    ((80, 10240, 60), 8, 4, 1024, 1792, 2, 140),
    ((128, 16384, 96), 8, 16, 1920, 2160, 1, 155),
]


@pytest.mark.parametrize(("shape", "tp", "pp", "gpus", "batch", "micro_batch", "published"), MEGATRON_A100)
def test_megatron_on_a100(
    shape: tuple, tp: int, pp: int, gpus: int, batch: int, micro_batch: int, published: float
) -> None:
    config = settings(gpt(*shape, 51200, 2048), tp, pp, batch, micro_batch, 2048, 0, "full", sequence_parallel=False)
    time = step_time(config, gpus, CHIPS["a100-80"], MEGATRON_2021)
    _, hidden, layers = shape
    flops = 96 * batch * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))
    found = flops / gpus / time.seconds / 1e12
    print(f"{shape}: {found:.1f} of {published} TFLOP/s, {found / published - 1:+.1%}")
    assert found == pytest.approx(published, rel=0.15)


A = dict(num_layers=24, hidden_size=2048, num_attention_heads=16, vocab_size=50304, max_position_embeddings=2048)
LLAMA = {"preset": "llama3-8b"}

# docs/performance.md and README.md: model, GPUs, tp, pp, batch, micro-batch, sequence, ZeRO, recompute; tokens/s per
# GPU on H200s.
OWN = [
    (A, 1, 1, 1, 16, 16, 2048, 0, "none", 65_661),
    ({"vocab_size": 50304}, 1, 1, 1, 64, 64, 1024, 0, "none", 536_024),
    (LLAMA, 2, 1, 1, 4, 2, 4096, 1, "none", 10_946),
    (LLAMA, 2, 1, 1, 4, 2, 4096, 2, "none", 10_824),
    (LLAMA, 2, 1, 1, 4, 2, 4096, 3, "none", 10_832),
    (LLAMA, 2, 1, 1, 6, 3, 4096, 1, "selective", 11_351),
    (LLAMA, 2, 1, 1, 6, 3, 4096, 3, "selective", 11_182),
    (LLAMA, 4, 1, 1, 16, 2, 4096, 1, "selective", 11_320),
    (LLAMA, 4, 1, 1, 16, 4, 4096, 1, "selective", 11_481),
    (LLAMA, 4, 1, 1, 16, 2, 4096, 2, "selective", 11_153),
    (LLAMA, 4, 1, 1, 16, 2, 4096, 3, "selective", 10_775),
    (LLAMA, 4, 2, 1, 16, 4, 4096, 1, "selective", 10_150),
    (LLAMA, 4, 2, 2, 16, 2, 4096, 0, "selective", 9_034),
    (LLAMA, 4, 4, 1, 16, 4, 4096, 0, "selective", 8_807),
]
# Others on the same machine; the practices' constants are from here, but for those of the first table.
MEGATRON_NOW = Practice(partial_sum_bytes=2, logit_bytes=52.0, loss_has_backward=True, fuses_gradient="always")
PEERS = [
    (A, 1, 1, 1, 16, 16, 2048, 0, "none", 61_137, MEGATRON_NOW),
    ({"vocab_size": 50304}, 1, 1, 1, 64, 64, 1024, 0, "none", 414_084, MEGATRON_NOW),
    (LLAMA, 2, 2, 1, 4, 4, 4096, 0, "none", 9_870, MEGATRON_NOW),
    (LLAMA, 2, 1, 2, 8, 1, 4096, 0, "none", 9_917, MEGATRON_NOW),
    (LLAMA, 2, 1, 1, 4, 2, 4096, 3, "none", 9_904, TORCHTITAN),
    (LLAMA, 2, 1, 1, 6, 3, 4096, 3, "none", 10_933, MEGAZERO),
]


@pytest.mark.parametrize("row", [*((*row, MEGAZERO) for row in OWN), *PEERS])
def test_runs_on_h200(row: tuple) -> None:
    model, gpus, tp, pp, batch, micro_batch, seq_length, zero, recompute, measured, practice = row
    config = settings(model, tp, pp, batch, micro_batch, seq_length, zero, recompute)
    found = batch * seq_length / gpus / step_time(config, gpus, CHIPS["h200"], practice).seconds
    print(f"{row[1:9]}: {found:.0f} of {measured} tokens/s, {found / measured - 1:+.1%}")
    assert found == pytest.approx(measured, rel=0.10)
