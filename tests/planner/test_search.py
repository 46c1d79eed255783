"""The search: the fastest of what fits is found, nothing that does not fit is offered, every refusal has its reason."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from megazero.config import Config
from megazero.errors import ConfigError
from megazero.planner.chips import CHIPS
from megazero.planner.dry_run import dry_run
from megazero.planner.many import Memories
from megazero.planner.memory import plan
from megazero.planner.search import search
from megazero.planner.step_time import balanced_counts, step_time


def settings(model: dict[str, Any], seq_length: int, batch: int, **sections: dict[str, Any]) -> Config:
    tree = {"model": model, "data": {"seq_length": seq_length}, "train": {"global_batch_size": batch}}
    for name, fields in sections.items():
        tree[name] = {**tree.get(name, {}), **fields}
    return Config.model_validate(tree)


GPT = {"preset": "gpt2-355m"}


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (GPT, (2, 4, 3, 3, 1, 9)),
        (GPT, (2, 4, 3, 2, 3, 101)),
        (GPT, (1, 1, 4, 1, 1, 5)),
        ({"preset": "llama3-8b"}, (4, 3, 2, 3, 2, 7)),
    ],
)
def test_memory_of_many_layouts_is_the_memory_of_each(model: dict[str, Any], layout: tuple) -> None:
    tp, pp, dp, zero, virtual_pp, micro_batches = layout
    counts = balanced_counts(Config.model_validate({"model": model}).model.architecture, 1024, pp * virtual_pp)
    parallel = {"tp": tp, "pp": pp, "virtual_pp": virtual_pp, "partition": counts}
    config = settings(model, 1024, dp * micro_batches, parallel=parallel, zero={"stage": zero})
    memories, expected = Memories(config.model.architecture), plan(config, tp * pp * dp)
    for pp_rank, memory in enumerate(expected.stages):
        found = memories.of_pp_rank(config, expected.layout, counts, pp_rank)
        assert found == (memory.peak, memory.rank, memory.state)
    assert memories.fullest(config, expected.layout, counts)[0] == expected.fullest.peak


def test_the_fastest_of_all_is_found() -> None:
    """Against every layout of a grid, one by one."""
    base, gpus, chip = settings(GPT, 1024, 64), 8, CHIPS["rtx4090"]
    found = search(base, gpus, chip)
    fastest = found.plans[0].time.seconds
    for tp, pp, zero, micro_batch in itertools.product((1, 2), (1, 4), (1, 3), (1, 8)):
        changes = {
            "parallel": {"tp": tp, "pp": pp},
            "zero": {"stage": zero},
            "train": {"micro_batch_size": micro_batch},
        }
        config = settings(GPT, 1024, 64, **changes)
        if plan(config, gpus).fullest.peak <= chip.usable_memory():
            assert step_time(config, gpus, chip).seconds > 0.98 * fastest
    assert [p.time.seconds for p in found.plans] == sorted(p.time.seconds for p in found.plans)
    for each in found.plans:
        assert plan(each.config, gpus).fullest == each.memory
        assert each.memory.peak <= chip.usable_memory()
        assert step_time(each.config, gpus, chip) == each.time
        assert each.config.problems(gpus) == []


def test_one_micro_batch_may_fit_where_several_smaller_ones_do_not() -> None:
    """With several, all gradients are there beside the activations of the last."""

    def settings_of(micro_batch: int) -> Config:
        train = {"micro_batch_size": micro_batch, "recompute": "full"}
        return settings(GPT, 1024, 8, train=train)

    two, one = (plan(settings_of(micro_batch), 1).fullest.peak for micro_batch in (4, 8))
    assert one < two
    chip = CHIPS["h100"]
    chip = chip.model_copy(update={"memory": chip.memory - chip.usable_memory() / 0.96 + (one + two) / 2 / 0.96})
    tried = [rejection.choice for rejection in search(settings(GPT, 1024, 8), 1, chip).rejected]
    full = {choice.micro_batch for choice in tried if choice.recompute == "full"}
    assert 4 in full and 8 not in full


def test_a_refusal_says_which_rank_lacks_how_much() -> None:
    chip = CHIPS["a100-40"]
    found = search(settings({"preset": "llama3-8b"}, 4096, 32), 4, chip)
    lacking = [rejection for rejection in found.rejected if rejection.kind == "memory"]
    assert lacking and all(rejection.lacks > 0 for rejection in lacking)
    one = next(r for r in lacking if r.choice[:3] == (1, 1, 1) and r.choice.recompute == "full" and r.choice.zero == 3)
    config = settings(
        {"preset": "llama3-8b"},
        4096,
        32,
        zero={"stage": 3},
        train={"recompute": "full", "micro_batch_size": one.choice.micro_batch},
    )
    memory = plan(config, 4).fullest
    needs = memory.state.total if memory.state.total > chip.usable_memory() else memory.peak
    assert one.lacks == needs - chip.usable_memory()
    assert one.reason.startswith(f"rank {memory.rank} lacks {one.lacks / 1e9:.1f} GB: ")


def test_a_broken_rule_is_a_reason() -> None:
    machines = CHIPS["h100"].model_copy(update={"gpus_per_node": 5})
    found = search(settings({"preset": "gpt2-124m"}, 1024, 10), 15, machines)
    reasons = {rejection.kind: rejection.reason for rejection in found.rejected}
    assert "15 is not" not in reasons["train.global_batch_size"]
    assert "10 is not a multiple of train.micro_batch_size x dp" in reasons["train.global_batch_size"]
    assert "does not divide model.num_attention_heads = 12" in reasons["parallel.tp"]
    assert {p.choice.dp for p in found.plans} <= {1, 5} and found.plans


def test_tensor_parallel_ranks_share_a_machine() -> None:
    """Of 8 GPUs to a machine, three by three, some would not."""
    found = search(settings({"preset": "gpt2-124m"}, 1024, 48), 24, CHIPS["h100"], top=100)
    assert {choice.tp for choice in (each.choice for each in (*found.plans, *found.rejected))} <= {1, 2, 4, 8}


def test_no_layout_fits() -> None:
    found = search(settings({"preset": "llama3-70b"}, 4096, 64), 1, CHIPS["h200"])
    assert found.plans == [] and found.fitting == 0
    assert "its model state alone is" in found.rejected[0].reason


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zero": {"stage": 1, "mics_shard_size": 2}}, "zero.mics_shard_size: is not in the planner's model"),
        ({"train": {"precision": "fp32"}}, "train.precision: fp32: the rate"),
        ({"data": {"seq_length": 4096}}, "more than model.max_position_embeddings = 1024"),
    ],
)
def test_what_is_wrong_under_every_layout_is_said_at_once(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        search(settings(GPT, 1024, 8, **changes), 8, CHIPS["h100"])


def test_a_split_backward_has_no_plan() -> None:
    config = settings(GPT, 1024, 8, parallel={"pp": 2, "schedule": "zero_bubble"})
    for planned in (lambda: step_time(config, 2, CHIPS["h100"]), lambda: dry_run(config, 2, 0)):
        with pytest.raises(ConfigError, match="parallel.schedule: zero_bubble's split backward"):
            planned()


def test_step_time_of_a_layout_that_does_not_fit_the_rules() -> None:
    with pytest.raises(ConfigError, match="does not divide the 3 processes"):
        step_time(settings(GPT, 1024, 8, parallel={"tp": 2}), 3, CHIPS["h100"])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "large" in metafunc.fixturenames:
        models = ["llama3-8b", "llama3-70b", "llama3.1-405b", "gpt3-175b"]
        whole = list(itertools.product(models, [8, 64, 1024, 16384]))
        metafunc.parametrize("large", whole if metafunc.config.getoption("whole") else [("llama3-70b", 16384)], ids=str)


def test_a_search_over_large_models_and_many_gpus(large: tuple[str, int]) -> None:
    """What it finds fits, in order; or it says of each layout why not."""
    model, gpus = large
    length = 2048 if model == "gpt3-175b" else 8192
    base = settings({"preset": model}, length, max(1 << 22, 1024 * gpus) // length)
    found = search(base, gpus, CHIPS["h100"])
    speeds = [plan.tokens_per_second for plan in found.plans]
    assert speeds == sorted(speeds, reverse=True) and (speeds or found.rejected)
    for best in found.plans[:1]:
        assert plan(best.config, gpus).fullest.peak == best.memory.peak <= CHIPS["h100"].usable_memory()
