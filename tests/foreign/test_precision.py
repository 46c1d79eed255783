"""16-bit training of models that are not ours: loss scale, overflow on one rank, divergence, what stays in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

import megazero
from megazero.errors import DivergenceError, MegazeroError
from tests.foreign.models import Odd, batch, build, config, trained, whole_weights

SGD = {"type": "SGD", "params": {"lr": 0.05}}


def in_16_bits(stage: int) -> dict[str, Any]:
    """bf16 against float32, with gradients accumulated in float32 and in bf16."""
    found: dict[str, Any] = {}
    for name, more in (
        ("fp32", {}),
        ("bf16", {"bf16": {"enabled": True}}),
        ("bf16 gradients", {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}),
    ):
        found[name] = trained(Odd, config(stage, 2, 0.5, optimizer=SGD, **more), 3)
    return found


def test_bf16_is_near_float32_and_the_same_at_every_stage(ranks: Callable) -> None:
    first = None
    for stage in (0, 1, 2, 3):
        for found in ranks(2, in_16_bits, stage):
            for name in ("bf16", "bf16 gradients"):
                assert found[name][0] == pytest.approx(found["fp32"][0], rel=5e-3)
                assert found[name][1] == pytest.approx(found["fp32"][1], rel=3e-2)
            if first is not None:
                assert found["bf16"][0] == pytest.approx(first["bf16"][0], rel=1e-3)
                assert found["bf16"][1] == pytest.approx(first["bf16"][1], rel=5e-3)
            first = first or found


def overflows(stage: int) -> dict[str, Any]:
    """Four steps in float16; in the second, one rank's gradient is infinite."""
    rates = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 10, "warmup_type": "linear"}}
    half = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 2}
    tree = config(stage, 1, 0.5, optimizer=SGD, fp16=half, scheduler=rates)
    engine, *_ = megazero.initialize(model=build(Odd), config=tree)
    found: dict[str, Any] = {"scales": [], "lrs": [], "norms": [], "skipped": [], "same": [], "applied": []}
    for step in range(4):
        before = whole_weights(engine)
        loss = engine(batch(step, 0, dist.get_rank()))
        engine.backward(loss * (float("inf") if (step, dist.get_rank()) == (1, 1) else 1.0))
        engine.step()
        after = whole_weights(engine)
        found["same"].append(all(torch.equal(before[name], after[name]) for name in before))
        found["scales"].append(engine.loss_scale)
        found["lrs"].append(engine.get_lr()[0])
        found["norms"].append(engine.get_global_grad_norm())
        found["skipped"].append(engine.skipped_steps)
        found["applied"].append(engine.was_step_applied())
    found["buffer"] = str(engine.module.inverse.dtype), str(engine.module.embed.weight.dtype)
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Callable, stage: int) -> None:
    first, second = ranks(2, overflows, stage)
    norms = first["norms"]
    assert first == second
    # The warm-up's first rate is 0, for the first step and after the first that counts.
    assert first["same"] == [True, True, True, False]
    assert first["scales"] == [256, 128, 128, 256]  # halved, then doubled after two good steps
    assert first["lrs"] == pytest.approx([0.0, 0.0, 0.005, 0.01])  # the schedule stood still in the second
    assert first["skipped"] == [0, 1, 1, 1] and first["applied"] == [True, False, True, True]
    assert norms[1] == norms[0] != norms[2] == pytest.approx(norms[0], rel=0.5)  # a skipped step has none
    assert first["buffer"] == ("torch.float32", "torch.float16")


def diverges(stage: int, kind: dict[str, Any]) -> tuple[str, bool]:
    engine, *_ = megazero.initialize(
        model=build(Odd), config=config(stage, 1, 0.0, optimizer=SGD, steps_per_print=2, **kind)
    )
    engine.backward(engine(batch(0, 0, dist.get_rank())))
    engine.step()
    before = whole_weights(engine)
    message = ""
    try:
        for _ in range(3):
            engine.backward(engine(batch(1, 0, dist.get_rank())) * (float("nan") if dist.get_rank() else 1.0))
            engine.step()
    except DivergenceError as error:
        message = str(error)
    after = whole_weights(engine)
    return message, all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "kind",
    [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 0, "hysteresis": 1}}],
    ids=["fp32", "bf16", "fp16 at the smallest scale"],
)
def test_divergence_on_one_rank_raises_on_all(ranks: Callable, kind: dict[str, Any]) -> None:
    for stage in (0, 3):
        for message, same in ranks(2, diverges, stage, kind):
            assert message.startswith("step 2: the gradient is not finite; the weights are those before this step")
            assert same


class Positions(nn.Module):
    """A table that is no parameter is added to activations, as in NLLB; and another one is of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(13, 6), nn.LayerNorm(6)
        self.register_buffer("table", torch.linspace(0, 1, 54).view(9, 6), persistent=False)
        self.register_buffer("order", torch.arange(9))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.embed(tokens) + self.table[self.order]).square().mean()


def buffers_in_16_bits() -> tuple[str, list[torch.dtype], float]:
    """What is said of the table that stays in float32; and with data_types.buffer_dtype, the dtypes and the loss."""
    tree = config(2, 1, 0.0, optimizer=SGD, bf16={"enabled": True})
    tokens = batch(0, 0, 0)
    engine, *_ = megazero.initialize(model=build(Positions), config=tree)
    with pytest.raises(MegazeroError) as said:
        engine(tokens)
    engine, *_ = megazero.initialize(model=build(Positions), config=tree | {"data_types": {"buffer_dtype": "bf16"}})
    return str(said.value), [buffer.dtype for buffer in engine.module.buffers()], float(engine(tokens))


def test_a_buffer_wider_than_the_parameters(ranks: Callable) -> None:
    wanted = float(build(Positions)(batch(0, 0, 0)))
    for said, dtypes, loss in ranks(2, buffers_in_16_bits):
        assert "table for one" in said and "set data_types.buffer_dtype to bf16" in said
        assert dtypes == [torch.bfloat16, torch.int64]
        assert loss == pytest.approx(wanted, rel=2e-2)
