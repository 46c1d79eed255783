"""The plan against what a rank does that is built and run without hardware: equal to the byte and to the element."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from megazero.config import Config
from megazero.errors import LaunchError
from megazero.planner.chips import CHIPS
from megazero.planner.dry_run import dry_run, planned
from megazero.planner.model_state import stage_buffers
from megazero.planner.search import search

SMALL: dict[str, Any] = dict(
    num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=101, max_position_embeddings=16
)
GROUPED: dict[str, Any] = dict(
    SMALL,
    num_key_value_heads=2,
    ffn_hidden_size=80,
    norm="rmsnorm",
    activation="swiglu",
    position="rotary",
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    tie_word_embeddings=False,
)
SMALL_PIECES = {"device": "cpu", "buffer_size": 1024}
EVERYTHING = {
    "offload_optimizer": {
        **SMALL_PIECES,
        "device": "nvme",
        "nvme_path": "nowhere",
        "masters": "split",
        "moments": "bf16",
    },
    "offload_param": {"device": "cpu"},
}
IN_FILES = {
    "offload_optimizer": {**SMALL_PIECES, "device": "nvme", "nvme_path": "nowhere"},
    "offload_param": {"device": "nvme", "nvme_path": "nowhere"},
}
# tp, pp, dp, ZeRO, recompute, virtual_pp, micro-batches, and other settings.
LAYOUTS: list[tuple[dict, tuple, dict]] = [
    (SMALL, (1, 1, 4, 0, "none", 1, 1), {}),
    (SMALL, (2, 2, 2, 1, "none", 1, 2), {}),
    (GROUPED, (4, 2, 2, 2, "selective", 1, 5), {"train": {"grad_dtype": "bf16"}}),
    (SMALL, (2, 1, 3, 3, "full", 1, 4), {"parallel": {"sequence_parallel": False}}),
    ({**GROUPED, "num_layers": 4}, (2, 2, 2, 3, "none", 2, 3), {"zero": {"stage3_param_persistence_threshold": 100}}),
    (GROUPED, (1, 1, 2, 3, "none", 1, 3), {"parallel": {"keep_gathered": True}}),
    (SMALL, (2, 2, 2, 1, "none", 1, 2), {"zero": {"offload_optimizer": {**SMALL_PIECES, "ratio": 0.6}}}),
    (GROUPED, (1, 1, 2, 3, "full", 1, 4), {"zero": {**EVERYTHING, "stage3_param_persistence_threshold": 100}}),
    (GROUPED, (1, 1, 2, 3, "full", 1, 4), {"zero": {**IN_FILES, "stage3_param_persistence_threshold": 100}}),
    (
        SMALL,
        (1, 2, 2, 3, "none", 1, 2),
        {
            "zero": {
                **IN_FILES,
                "offload_optimizer": {**SMALL_PIECES, "ratio": 0.6},
                "stage3_param_persistence_threshold": 100,
            },
            "parallel": {"keep_gathered": True},
        },
    ),
]


def settings(model: dict[str, Any], layout: tuple, more: dict[str, Any]) -> tuple[Config, int]:
    tp, pp, dp, zero, recompute, virtual_pp, micro_batches = layout
    train = {"global_batch_size": 2 * dp * micro_batches, "micro_batch_size": 2, "recompute": recompute}
    tree: dict[str, Any] = {
        "model": model,
        "parallel": {"tp": tp, "pp": pp, "virtual_pp": virtual_pp, "vocab_multiple": 8},
        "zero": {"stage": zero, "reduce_bucket_size": 1},
        "data": {"seq_length": 16},
        "train": train,
    }
    for section, fields in more.items():
        tree[section] = {**tree[section], **fields}
    return Config.from_dict(tree, world_size=tp * pp * dp), tp * pp * dp


@pytest.mark.parametrize(("model", "layout", "more"), LAYOUTS)
def test_counted_is_planned(model: dict[str, Any], layout: tuple, more: dict[str, Any]) -> None:
    config, world_size = settings(model, layout, more)
    for rank in {0 if config.parallel.pp > 1 else world_size - 1, world_size - 1}:
        assert dry_run(config, world_size, rank) == planned(config, world_size, rank)
    assert not dist.is_initialized()


@pytest.mark.parametrize("zero", range(4))
def test_traffic_over_dp_is_as_promised(zero: int) -> None:
    """DESIGN's P4: elements of all parameters, padding included, with m micro-batches, times (N - 1)/N."""
    micro_batches = 3
    choice = (1, 1, 4, zero, "none", 1, micro_batches)
    config, world_size = settings(SMALL, choice, {"zero": {"stage3_param_persistence_threshold": 0}})
    layout, model = config.layout(world_size), config.model.architecture
    whole = sum(buffer.layout.numel for buffer in stage_buffers(config, model, layout, 1).all)
    traffic = dry_run(config, world_size, 1).traffic
    moved = sum((2 if kind == "all_reduce" else 1) * n for (group, kind, _), n in traffic.items() if group == "dp")
    assert moved == {0: 2, 1: 2, 2: micro_batches + 1, 3: 3 * micro_batches}[zero] * whole


def test_a_process_that_is_in_a_group_is_told() -> None:
    config, world_size = settings(SMALL, LAYOUTS[0][1], {})
    store = dist.HashStore()
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        with pytest.raises(LaunchError, match="run it in a process that is in none"):
            dry_run(config, world_size, 0)
    finally:
        dist.destroy_process_group()


MODELS = {"llama3-8b": 8192, "llama3-70b": 8192, "llama3.1-405b": 8192, "gpt3-175b": 2048}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rank_of_16384" in metafunc.fixturenames:
        whole = [(model, rank) for model in MODELS for rank in (0, 8192, 16383)]
        chosen = whole if metafunc.config.getoption("whole") else whole[1:2]
        metafunc.parametrize("rank_of_16384", chosen, ids=str)


def test_the_fastest_layout_of_16384_gpus(rank_of_16384: tuple[str, int]) -> None:
    """First, middle and last rank of each; one of the twelve without --whole."""
    model, rank = rank_of_16384
    base = Config.model_validate(
        {
            "model": {"preset": model},
            "data": {"seq_length": MODELS[model]},
            "train": {"global_batch_size": (1 << 24) // MODELS[model]},
        }
    )
    config = search(base, 16384, CHIPS["h100"], top=1).plans[0].config
    assert dry_run(config, 16384, rank) == planned(config, 16384, rank)
