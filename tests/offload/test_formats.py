"""State in fewer bits: exact where it is said to be, right in the mean where it is rounded at random."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import megazero
from megazero.models.config import ModelConfig
from megazero.optim import host_adamw
from megazero.zero.offload.formats import Noise, join, round_at_random, split
from tests.distributed.runs import TokenSource, make_engine, random_weights, settings
from tests.distributed.test_cases import GPT2
from tests.offload.choices import CPU, PARAMETERS

BOTH = {"moments": "bf16", "masters": "bf16"}


def values(numel: int = 1 << 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(numel, generator=generator) * torch.exp(5 * torch.randn(numel, generator=generator))
    drawn[:4] = torch.tensor([0.0, -0.0, 1e-40, 1 + 2**-9])
    return drawn


def test_split_masters_are_the_same_bits() -> None:
    x = values()
    upper, lower = torch.empty(len(x), dtype=torch.bfloat16), torch.empty(len(x), dtype=torch.int16)
    split(x.clone(), upper, lower)
    joined = torch.empty_like(x)
    join(upper, lower, joined)
    assert torch.equal(joined.view(torch.int32), x.view(torch.int32))
    nearest = x.to(torch.bfloat16)
    halves = (x.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(upper[~halves], nearest[~halves])


def test_rounding_at_random_is_right_in_the_mean() -> None:
    """Of 400 draws the mean is within five of its standard deviations, which are at most half a last place's, and every
    draw is one of the two neighbours; the same draw comes again for the same piece and step."""
    x, noise, count = values(), Noise(1 << 16), 400
    out, again, total = torch.empty(len(x), dtype=torch.bfloat16), torch.empty(len(x), dtype=torch.bfloat16), 0
    below = (x.view(torch.int32) & ~0xFFFF).view(torch.float32)
    above = ((x.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32)
    for step in range(count):
        round_at_random(x.clone(), noise.of(len(x), "block", step), out)
        assert bool(((out == below) | (out == above)).all())
        total = total + out.double()
    round_at_random(x.clone(), noise.of(len(x), "block", count - 1), again)
    assert torch.equal(out, again)
    place = (above.double() - below.double()).abs()
    assert bool(((total / count - x.double()).abs() <= 5 * place / 2 / count**0.5).all())
    share = ((out == above) & (below != x)).double().mean() / (below != x).double().mean()
    assert 0.45 < float(share) < 0.55


def losses(fields: dict[str, Any], micro: int, steps: int = 100, **train: Any) -> torch.Tensor:
    """Of 100 steps in bfloat16 that end near a fifth of the first loss."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": fields}
    tree = settings(GPT2, zero=zero | (PARAMETERS if fields else {}))
    tree["train"] |= {"precision": "bf16", "micro_batch_size": micro, "steps": 100} | train
    tree["optimizer"] |= {"lr": 3e-3, "betas": [0.9, 0.999], "schedule": "constant"}
    source = TokenSource(37, 12, samples=16)
    with make_engine(tree, random_weights(ModelConfig(**GPT2))) as engine:
        return torch.tensor([float(engine.train_batch(source).loss) for _ in range(steps)])


def test_runs_in_fewer_bits_stay_near() -> None:
    """The band is what another micro-batch size changes in bfloat16. Split masters are float32 ones until, after some
    20 steps of a model of this size, a tie is rounded otherwise: within the band, then; moments at random stay in twice
    the band, as any layout; without masters it is three times its median."""
    plain = losses({}, 4)
    band = (losses({}, 2) - plain).abs()
    for state, share in (({"masters": "split"}, 1.0), ({"moments": "bf16"}, 2.0), (BOTH, 3.0)):
        far = (losses({**CPU, **state}, 4) - plain).abs()
        assert state != {"masters": "split"} or not far[:10].any()
        assert far.median() <= share * band.median() and far.max() <= 2 * band.max(), (state, far)


def test_strips_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks of some 8,000 elements in pieces of 4,096, whole or in strips of 192 that divide neither."""
    files = {"device": "nvme", "nvme_path": str(tmp_path)}
    for fields in ({}, BOTH, {"masters": "split", "moments": "bf16"}, {**files, "moments": "bf16"}):
        found = []
        for strip in (1 << 17, 64):
            monkeypatch.setattr(host_adamw, "STRIP", strip)
            found.append(losses({**CPU, "buffer_size": 4096, "threads": 3, **fields}, 4, steps=6, grad_dtype="bf16"))
        assert torch.equal(*found), fields


def test_a_foreign_model_s_parameters_are_rounded_anew_at_each_step() -> None:
    """Without masters, steps of 1/8 of the last place: after 64 each element has gone the binomial way, 8 places in the
    mean, sqrt(64 · 1/8 · 7/8) the deviation."""

    class Down(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2000))

        def forward(self) -> torch.Tensor:
            return self.weight.float().sum()

    config = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 2**-11, "weight_decay": 0.0}},
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
    }
    engine, *_ = megazero.initialize(model=Down(), config=config)
    for _ in range(64):
        engine.backward(engine())
        engine.step()
    places = (1 - megazero.zero.safe_get_full_fp32_param(engine.module.weight)) * 256
    engine.destroy()
    assert float(places.mean()) == pytest.approx(8, abs=0.3)
    assert float(places.std()) == pytest.approx(7**0.5, abs=0.3)


def test_second_moments_in_bf16_decay() -> None:
    """With beta2 0.999 and no gradient the second moment fades; rounded to the nearest it would stay."""
    tree = settings(GPT2, zero={"stage": 1, "offload_optimizer": {**CPU, "moments": "bf16"}})
    tree["train"] |= {"steps": 41}
    tree["optimizer"] |= {"betas": [0.9, 0.999], "schedule": "constant"}
    source = TokenSource(37, 12, samples=4)
    with make_engine(tree, random_weights(ModelConfig(**GPT2))) as engine:
        engine.train_batch(source)
        before = torch.cat([block.owned_state("exp_avg_sq") for block in engine.stage.sharded.blocks])
        source.fields["weights"].zero_()
        for _ in range(40):
            engine.train_batch(source)
        after = torch.cat([block.owned_state("exp_avg_sq") for block in engine.stage.sharded.blocks])
    there = before > 0
    mean = float((after[there] / before[there]).double().mean())
    assert mean == pytest.approx(0.999**40, rel=2e-3)
