"""The five schedules against DeepSpeed's own numbers, and where they differ on purpose (cases 37, 38)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megazero.ds_config import make_scheduler
from megazero.ds_config.schedulers import choose
from megazero.errors import ConfigError

# Of DeepSpeed 0.19.8's lr_schedules.py on AdamW with two groups of learning rates 5e-3 and 7e-3: what it has set
# before each of 16 optimizer steps, with a step() between each two.
DEEPSPEED = json.loads((Path(__file__).parent / "deepspeed_schedules.json").read_text())


def adamw(*rates: float, **options) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [torch.zeros(1)], "lr": rate} for rate in rates or (5e-3, 7e-3)], **options)


def make(optimizer, kind: str, params: dict):
    choice, found = choose(kind, params)
    assert not found, found
    return make_scheduler(choice, optimizer)


def run(optimizer, scheduler, steps: int) -> list[float]:
    """The first group's rate at each optimizer step."""
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("case", DEEPSPEED, ids=lambda case: f"{case['type']}-{'-'.join(case['params'])}"[:60])
def test_deepspeed_s_numbers(case):
    optimizer = adamw(betas=(0.9, 0.999))
    scheduler = make(optimizer, case["type"], case["params"])
    for step, expected in enumerate(case["lr"]):
        if step or case["params"].get("warmup_min_ratio") is None:
            assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected, rel=1e-14, abs=0)
        if case["params"].get("cycle_momentum", "beta1" in case):
            betas = [group["betas"] for group in optimizer.param_groups]
            assert [beta1 for beta1, _ in betas] == pytest.approx(case["beta1"][step], rel=1e-14)
            assert {beta2 for _, beta2 in betas} == {case["beta2"]}
        else:
            assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.999)}
        scheduler.step()


def test_the_cosine_starts_at_its_ratio():
    optimizer = adamw(1e-2)
    scheduler = make(optimizer, "WarmupCosineLR", dict(total_num_steps=8, warmup_num_steps=2, warmup_min_ratio=0.25))
    assert run(optimizer, scheduler, 2) == pytest.approx([2.5e-3, 2.5e-3], rel=1e-14)


@pytest.mark.parametrize("kind", ["log", "linear"])
def test_no_warm_up(kind):
    plain = dict(warmup_num_steps=0, warmup_type=kind)
    optimizer = adamw(3e-3)
    assert run(optimizer, make(optimizer, "WarmupLR", plain), 3) == [3e-3] * 3
    optimizer = adamw(3e-3)
    rates = run(optimizer, make(optimizer, "WarmupDecayLR", plain | dict(total_num_steps=4)), 6)
    assert rates == pytest.approx([3e-3, 3e-3, 3e-3 * 3 / 4, 3e-3 / 2, 3e-3 / 4, 0.0], rel=1e-14)
    optimizer = adamw(3e-3)
    rates = run(optimizer, make(optimizer, "WarmupCosineLR", plain | dict(total_num_steps=4, cos_min_ratio=0)), 5)
    half = [(1 + math.cos(math.pi * k / 4)) / 2 * 3e-3 for k in (1, 1, 2, 3, 4)]
    assert rates == pytest.approx(half, rel=1e-14, abs=1e-18)


@pytest.mark.parametrize(
    ("kind", "params", "highest"),
    [
        ("WarmupLR", dict(warmup_num_steps=3), 5e-3),
        ("WarmupDecayLR", dict(warmup_num_steps=3, total_num_steps=100), 5e-3),
        ("WarmupCosineLR", dict(warmup_num_steps=3, total_num_steps=10**6), 5e-3),
        ("LRRangeTest", dict(lr_range_test_step_rate=0), 5e-3),
    ],
)
def test_a_default_never_overrides_the_optimizer_s_rate(kind, params, highest):
    optimizer = adamw(5e-3)
    assert max(run(optimizer, make(optimizer, kind, params), 8)) == pytest.approx(highest, rel=1e-9)


def test_the_first_optimizer_step_uses_the_schedule():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=100.0)
    make(optimizer, "WarmupLR", dict(warmup_min_lr=0.25, warmup_max_lr=1.0, warmup_num_steps=10))
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.item() == 0.75


@pytest.mark.parametrize("case", DEEPSPEED[::3], ids=lambda case: case["type"])
def test_loaded_in_the_middle_it_goes_on_as_before(case):
    whole, half = adamw(), adamw()
    first, second = (make(optimizer, case["type"], case["params"]) for optimizer in (whole, half))
    for _ in range(5):
        first.step()
    state = json.loads(json.dumps(first.state_dict()))
    for _ in range(2):  # loading twice is loading once
        second.load_state_dict(state)
        assert [g["lr"] for g in half.param_groups] == [g["lr"] for g in whole.param_groups]
        assert [g["betas"] for g in half.param_groups] == [g["betas"] for g in whole.param_groups]
    assert run(half, second, 8) == run(whole, first, 8)
    fresh, untouched = adamw(), adamw()
    never = make(fresh, case["type"], case["params"])
    make(untouched, case["type"], case["params"])
    never.load_state_dict(never.state_dict())
    assert [g["lr"] for g in fresh.param_groups] == [g["lr"] for g in untouched.param_groups]


def test_a_rate_that_is_a_tensor_stays_the_same_tensor():
    rate = torch.tensor(5e-3)
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=rate, capturable=False, foreach=False)
    scheduler = make(optimizer, "WarmupLR", dict(warmup_num_steps=2))
    assert optimizer.param_groups[0]["lr"] is rate and rate == 0
    for _ in range(3):
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == pytest.approx(5e-3)


def test_momentum_without_betas():
    params = dict(cycle_min_lr=1e-3, cycle_max_lr=1e-2, cycle_first_step_size=2)
    sgd = torch.optim.SGD([torch.zeros(1)], lr=1.0, momentum=0.5)
    with pytest.warns(UserWarning, match="momentum is not cycled"):
        scheduler = make(sgd, "OneCycle", params)
    scheduler.step()
    assert sgd.param_groups[0]["momentum"] == 0.5 and sgd.param_groups[0]["lr"] == pytest.approx(5.5e-3)
    with pytest.raises(ConfigError, match="scheduler.params.cycle_momentum: true needs an optimizer with betas"):
        make(sgd, "OneCycle", params | dict(cycle_momentum=True))


def test_rates_per_group_must_fit():
    with pytest.raises(ConfigError, match="scheduler.params.warmup_max_lr: 3 values for 2 parameter groups"):
        make(adamw(), "WarmupLR", dict(warmup_max_lr=[1, 2, 3]))


def test_a_schedule_of_torch_by_name():
    optimizer = adamw(1.0)
    rates = run(optimizer, make(optimizer, "StepLR", dict(step_size=2, gamma=0.5)), 5)
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25]


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("StepLR", dict(step_size="2", gamma="5e-1")),
        ("StepLR", dict(step_size=2.0, gamma=0.5)),
        ("MultiStepLR", dict(milestones=["2", 4.0], gamma=0.5)),
    ],
)
def test_numbers_of_a_schedule_of_torch_may_be_strings_and_floats(kind, params):
    optimizer = adamw(1.0)
    assert run(optimizer, make(optimizer, kind, params), 5) == [1.0, 1.0, 0.5, 0.5, 0.25]


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("warmuplr", {}, "scheduler.type: 'warmuplr' .*did you mean WarmupLR"),
        ("Cosine", {}, "scheduler.type: 'Cosine' is no schedule"),
        ("LambdaLR", {}, "scheduler.type: 'LambdaLR' cannot be described in JSON"),
        ("WarmupLR", dict(warmup_steps=3), "scheduler.params.warmup_steps: .*did you mean warmup_num_steps"),
        ("WarmupLR", dict(warmup_num_steps=-1), "scheduler.params.warmup_num_steps: -1 must be at least 0"),
        ("WarmupLR", dict(warmup_num_steps=2.5), "scheduler.params.warmup_num_steps: 2.5 must be a whole number"),
        ("WarmupLR", dict(warmup_type="cubic"), "scheduler.params.warmup_type: 'cubic' must be one of log, linear"),
        ("WarmupDecayLR", {}, "scheduler.params.total_num_steps: WarmupDecayLR needs it"),
        ("OneCycle", dict(cycle_min_lr=1, cycle_max_lr=2, cycle_first_step_size=0), "0 must be above 0"),
        ("LRRangeTest", dict(lr_range_test_step_size=0), "0 must be at least 1"),
        ("StepLR", dict(step=2), "scheduler.params.step: StepLR has no such argument; did you mean step_size"),
        ("StepLR", {}, "scheduler.params.step_size: StepLR needs it"),
        ("StepLR", dict(step_size="x"), "scheduler.params.step_size: 'x' must be a number"),
        ("MultiStepLR", dict(milestones=[2, "x"]), "scheduler.params.milestones: 'x' must be a number"),
        ("OneCycleLR", dict(max_lr=1, total_steps=9, cycle_momentum="no"), "cycle_momentum: 'no' must be true"),
        ("OneCycleLR", dict(max_lr=1, total_steps=9, anneal_strategy="x"), "scheduler.params: OneCycleLR does not"),
    ],
)
def test_mistakes(kind, params, message):
    choice, found = choose(kind, params)
    assert choice is None and len(found) == 1
    with pytest.raises(ConfigError, match=message):
        raise ConfigError(found)
