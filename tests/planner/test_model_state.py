"""Model state against the ZeRO paper's table, against counts of parameters, and against the storages of real blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megazero.build import DTYPES, describe_stage, zero_settings
from megazero.comm import Communicator
from megazero.config import Config
from megazero.layout import Layout
from megazero.models.parameters import parameter_count
from megazero.optim.adamw import AdamW
from megazero.planner.model_state import ModelState, model_state, model_state_bytes, stage_buffers
from megazero.tensor_parallel.mappings import TensorParallel
from megazero.zero.blocks import decoder_units
from megazero.zero.groups import DataParallel
from megazero.zero.sharded import ShardedModel
from tests.planner.live import storage_bytes

# Rajbhandari et al. 2020, arXiv 1910.02054, table 1: GB per device for 7.5, 128 and 1000 billion parameters, each at
# stages 1, 2 and 3, by number of devices.
PUBLISHED = {
    1: "120 120 120 2048 2048 2048 16000 16000 16000",
    4: "52.5 41.3 30 896 704 512 7000 5500 4000",
    16: "35.6 21.6 7.5 608 368 128 4750 2875 1000",
    64: "31.4 16.6 1.88 536 284 32 4187 2218 250",
    256: "30.4 15.4 0.47 518 263 8 4046 2054 62.5",
    1024: "30.1 15.1 0.12 513 257 2 4011 2013 15.6",
}


@pytest.mark.parametrize("ranks", PUBLISHED)
def test_sizes_are_those_of_the_zero_papers_table(ranks: int) -> None:
    published = iter(PUBLISHED[ranks].split())
    for parameters in (75 * 10**8, 128 * 10**9, 10**12):
        for stage in (1, 2, 3):
            figure = next(published)
            found = model_state_bytes(parameters, ranks, stage, grad_bytes=2) / 1e9
            # The table rounds some figures and cuts others off.
            digit = 10 ** -len(figure.partition(".")[2])
            assert float(figure) - digit / 2 <= found < float(figure) + digit, (parameters, stage)
        assert model_state_bytes(parameters, ranks, 0, grad_bytes=2) == 16 * parameters


def test_seventy_billion_parameters_on_one_rank() -> None:
    for stage in range(4):
        assert model_state_bytes(70 * 10**9, 1, stage, grad_bytes=2) == 1.12e12
        assert model_state_bytes(70 * 10**9, 1, stage) == 18 * 70e9
        assert model_state_bytes(70 * 10**9, 1, stage, precision="fp32") == 16 * 70e9


SMALL: dict[str, Any] = dict(
    num_layers=5, hidden_size=48, num_attention_heads=4, vocab_size=101, max_position_embeddings=24
)
GROUPED: dict[str, Any] = dict(
    SMALL, num_attention_heads=8, num_key_value_heads=1, position="rotary", norm="rmsnorm", tie_word_embeddings=False
)


def settings(model: dict[str, Any], stage: int, threshold: int = 100, **parallel: int) -> Config:
    zero = {"stage": stage, "stage3_param_persistence_threshold": threshold}
    return Config.model_validate({"model": model, "parallel": {"vocab_multiple": 8, **parallel}, "zero": zero})


def state_of(config: Config, layout: Layout, rank: int, precision: str = "bf16", grads: str = "fp32") -> ModelState:
    buffers = stage_buffers(config, config.model.architecture, layout, rank)
    return model_state(buffers.all, layout.coordinates(rank)["dp"], config.zero.stage, precision, grads)


@pytest.mark.parametrize("model", [SMALL, GROUPED], ids=["tied", "untied"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("precision", "grads"), [("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp32")])
def test_ranks_together_hold_what_the_formula_says(
    model: dict[str, Any], stage: int, precision: str, grads: str
) -> None:
    ranks = 3
    layout, config = Layout(dp=ranks), settings(model, stage, threshold=0)
    states = [state_of(config, layout, rank, precision, grads) for rank in range(ranks)]
    count = parameter_count(config.model.architecture)
    expected = ranks * model_state_bytes(count, ranks, stage, {"fp32": 4, "bf16": 2}[grads], precision)
    assert sum(state.total - state.padding for state in states) == round(expected)
    assert len({state.total for state in states}) == 1


def test_persistent_parameters_are_whole_on_every_rank_and_their_gradients_are_not() -> None:
    ranks, config = 4, settings(SMALL, 3, threshold=48)
    states = [state_of(config, Layout(dp=ranks), rank) for rank in range(ranks)]
    count = parameter_count(config.model.architecture)
    # Of 48 elements or fewer: four norm vectors and two output biases per layer, and the final norm's two.
    persistent = 48 * (6 * SMALL["num_layers"] + 2)
    assert sum(state.parameters for state in states) == 2 * (count + (ranks - 1) * persistent)
    assert sum(state.gradients for state in states) == 4 * count
    assert sum(state.masters for state in states) == sum(state.exp_avg_sq for state in states) == 4 * count


@pytest.mark.parametrize("model", [SMALL, GROUPED], ids=["tied", "untied"])
def test_tensor_and_pipeline_ranks_hold_the_parameters_of_their_modules(model: dict[str, Any]) -> None:
    layout, config = Layout(tp=4, pp=2, dp=2), settings(model, 1, tp=4, pp=2)
    for rank in range(layout.world_size):
        coordinates = layout.coordinates(rank)
        tp = TensorParallel(4, coordinates["tp"], True)
        decoder, _ = describe_stage(config, config.model.architecture, coordinates, tp)
        elements = sum(parameter.numel() for parameter in decoder.parameters())
        # 101 words are 26 rows a rank, rounded up to 32: the last rank has 5 of them.
        unused = 48 * (32 - 5) if coordinates["tp"] == 3 else 0
        assert state_of(config, layout, rank).parameters == 2 * (elements - unused)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("stage", range(4))
def test_storages_of_125_million_parameters_on_four_ranks(stage: int, precision: str) -> None:
    layout, config = Layout(dp=4), settings({}, stage, threshold=100_000, vocab_multiple=128)
    decoder, specs = describe_stage(config, config.model.architecture, layout.coordinates(0), TensorParallel())
    for rank in (0, 3):
        planned, dp = state_of(config, layout, rank, precision), Communicator(None, 4, rank)
        sharded = ShardedModel(
            decoder,
            decoder_units(decoder, specs),
            DataParallel(dp, dp, Communicator(None, 1, 0)),
            zero_settings(config),
            dtypes=dict.fromkeys(specs, DTYPES[precision]),
            grad_dtype=torch.float32,
            device=torch.device("meta"),
        )
        AdamW(sharded, (0.9, 0.95), 1e-8, 0.1, torch.device("meta"))
        for block in sharded.blocks:
            block.gradient.accumulate()
            if block.sharding.gradients:
                block.gradient.keep_owned()
        held = [
            x
            for block in sharded.blocks
            for x in (*vars(block).values(), *vars(block.gradient).values(), *block.optimizer_state.values())
        ]
        assert storage_bytes(x for x in held if isinstance(x, torch.Tensor)) == planned.total
    # 64 elements align a parameter; the rest of the padding is 47 rows of the vocabulary.
    assert planned.padding < planned.total / 500
