"""P2 and case 39 where gradients and parameters are cut: resumed in the same layout, and from stage to stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.harness import RankFailure
from tests.engine.test_resume import DROPOUT, NUMBERS, call, places
from tests.engine.tiny import (
    assert_close,
    assert_weights_close,
    open_run,
    rank_files,
    run_script,
    run_script_until_killed,
    series,
    state,
    steps_in,
    tiny,
)


@pytest.mark.parametrize(
    "world_size, changes",
    [
        (2, {"zero.stage": 2, **DROPOUT}),
        (
            4,
            {
                "parallel.pp": 2,
                "zero.stage": 3,
                "zero.stage3_param_persistence_threshold": 40,
                "train.recompute": "full",
                **DROPOUT,
            },
        ),
    ],
    ids=["dp2 zero2", "pp2 dp2 zero3"],
)
def test_killed_and_resumed_is_bitwise_the_run_that_never_stopped(
    corpus: Path, tmp_path: Path, ranks: Callable, world_size: int, changes: dict
) -> None:
    changes = changes | {"checkpoint.save_interval": 3, "train.steps": 6}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    ranks(world_size, run_script, tiny(corpus, changes | places(whole)))
    settings = tiny(corpus, changes | places(broken))
    with pytest.raises(RankFailure, match="SIGKILL"):
        ranks(world_size, run_script_until_killed, settings, 4)
    assert steps_in(broken) == [3]
    ranks(world_size, run_script, settings)
    assert series(broken.with_suffix(".jsonl"), *NUMBERS) == series(whole.with_suffix(".jsonl"), *NUMBERS)
    assert len(series(whole.with_suffix(".jsonl"), *NUMBERS)) == 6
    assert rank_files(broken) == rank_files(whole)


# (stage, tp, pp, dp), two steps each
CHAIN = [(1, 2, 2, 2), (3, 1, 1, 4), (0, 1, 1, 1), (2, 1, 2, 2)]


def test_from_stage_to_stage(corpus: Path, tmp_path: Path, ranks: Callable) -> None:
    """One run in four layouts, moments and the loss's trajectory going on, against one process that never stopped."""
    whole, chain = tmp_path / "whole", tmp_path / "chain"
    run_script(tiny(corpus, places(whole)))
    for index, (stage, tp, pp, dp) in enumerate(CHAIN):
        layout = {
            "zero.stage": stage,
            "parallel.tp": tp,
            "parallel.pp": pp,
            "zero.stage3_param_persistence_threshold": 40,
        }
        # The learning rate follows from train.steps: each part is stopped rather than shortened.
        settings = tiny(corpus, {**layout, **places(chain), "train.micro_batch_size": 2})
        call(ranks, tp * pp * dp, run_part, settings, 2 * (index + 1))
    assert steps_in(chain) == [2, 4, 6, 8]
    names = ("loss", "grad_norm")
    assert_close(series(chain.with_suffix(".jsonl"), *names), series(whole.with_suffix(".jsonl"), *names))
    exact = ("lr", "consumed_samples")
    assert series(chain.with_suffix(".jsonl"), *exact) == series(whole.with_suffix(".jsonl"), *exact)
    assert_weights_close(state(chain), state(whole))


def run_part(settings: dict, until: int) -> None:
    engine, train, _ = open_run(settings)
    with engine:
        while engine.step < until:
            engine.train_batch(train)
        engine.save(train)


def test_what_is_loaded_is_what_was_saved(corpus: Path, tmp_path: Path, ranks: Callable) -> None:
    """Case 42 across stages: saved again at once by another layout, every bit of weights and moments is the same."""
    first, second = tmp_path / "first", tmp_path / "second"
    ranks(2, run_script, tiny(corpus, {"zero.stage": 3, "train.steps": 2, "checkpoint.dir": first}))
    settings = tiny(corpus, {"zero.stage": 2, "train.steps": 2, "parallel.tp": 2, "checkpoint.dir": second})
    ranks(2, run_script, settings | {"checkpoint.resume": first})
    found, wanted = state(second), state(first)
    assert found.keys() == wanted.keys() and all(bool((found[key] == wanted[key]).all()) for key in wanted)
