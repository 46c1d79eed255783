"""P1 on the reference runs: every layout against a plain Hugging Face model trained in float64 by one process.

By default every layout once, every other choice at least once. The whole product, which takes hours on two cores:
``bash tests/run.sh --whole -k reference_runs``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from data.sources import build_sources
from megazero.config import Config
from megazero.convert.hf_reader import HFWeights
from megazero.restore import resolve_model
from tests.distributed import runs
from tests.distributed.runs import Piece

ORACLE = Path(__file__).parents[1] / "fixtures" / "oracle"
CASES = ("gpt2-tied", "llama-gqa")
LAYOUTS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (4, 1, 1), (1, 4, 1), (2, 2, 2), (1, 3, 2))
CUT_LAYOUTS = ((1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 2))
LARGEST = 0


class Choice(NamedTuple):
    """One run. ``micro``: micro-batch size, LARGEST for one micro-batch per step; ``sequence``: sequence parallel."""

    case: str
    layout: runs.Layout
    zero: int
    micro: int
    schedule: str
    recompute: str
    sequence: bool

    def __str__(self) -> str:
        tp, pp, dp = self.layout
        micro = self.micro or "largest"
        sequence = "-sequence" if self.sequence else ""
        return (
            f"{self.case}-tp{tp}-pp{pp}-dp{dp}-zero{self.zero}-micro_{micro}-{self.schedule}-{self.recompute}{sequence}"
        )


def whole_product() -> list[Choice]:
    values = itertools.product(
        CASES,
        LAYOUTS,
        (0, 1),
        (1, 2, LARGEST),
        ("gpipe", "1f1b"),
        ("none", "selective", "full"),
        (False, True),
    )
    # Where gradients or parameters are cut, another order of gathers and reductions runs in every layout with dp.
    values = itertools.chain(
        values,
        itertools.product(CASES, CUT_LAYOUTS, (2, 3), (1, 2, LARGEST), ("1f1b",), ("none", "full"), (False, True)),
    )
    return [choice for choice in itertools.starmap(Choice, values) if not choice.sequence or choice.layout[0] > 1]


REDUCED = [
    Choice("gpt2-tied", (1, 1, 1), 0, LARGEST, "1f1b", "none", False),
    Choice("gpt2-tied", (2, 1, 1), 1, LARGEST, "gpipe", "full", True),
    Choice("gpt2-tied", (1, 2, 1), 0, 1, "gpipe", "none", False),
    Choice("gpt2-tied", (1, 3, 2), 0, LARGEST, "gpipe", "none", False),
    Choice("llama-gqa", (1, 1, 1), 1, LARGEST, "gpipe", "selective", False),
    Choice("llama-gqa", (4, 1, 1), 0, LARGEST, "1f1b", "none", False),
    Choice("llama-gqa", (1, 4, 1), 1, 2, "1f1b", "none", False),
    Choice("gpt2-tied", (1, 1, 4), 2, 2, "1f1b", "none", False),
    Choice("llama-gqa", (2, 1, 2), 2, LARGEST, "1f1b", "none", True),
    Choice("gpt2-tied", (1, 1, 2), 3, LARGEST, "1f1b", "none", False),
    Choice("llama-gqa", (2, 2, 2), 3, LARGEST, "1f1b", "none", True),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "choice" in metafunc.fixturenames:
        metafunc.parametrize("choice", whole_product() if metafunc.config.getoption("whole") else REDUCED, ids=str)


def config_of(choice: Choice) -> Config:
    """The run's settings, its data included, straight from the recipe."""
    directory = ORACLE / choice.case
    recipe = json.loads((directory / "recipe.json").read_text())
    tp, pp, dp = choice.layout
    tree: dict[str, Any] = {
        "model": {"init_from": str(directory / "hf_init")},
        "parallel": {"tp": tp, "pp": pp, "schedule": choice.schedule, "sequence_parallel": choice.sequence},
        # Buckets of a few layers, so that there are several.
        "zero": {
            "stage": choice.zero,
            "reduce_bucket_size": 80_000,
            "allgather_bucket_size": 40_000,
            "stage3_param_persistence_threshold": 100,
        },
        "data": {"train": str(directory / "tokens"), "seq_length": recipe["seq_length"], "shuffle": False},
        "optimizer": {
            "lr": recipe["lr"],
            "min_lr": recipe["min_lr"],
            "warmup_steps": recipe["warmup_steps"],
            "betas": recipe["betas"],
            "eps": recipe["eps"],
            "weight_decay": recipe["weight_decay"],
            "clip_grad_norm": recipe["clip"],
        },
        "train": {
            "steps": recipe["train_steps"],
            "global_batch_size": recipe["global_batch_size"],
            "micro_batch_size": choice.micro or recipe["global_batch_size"] // dp,
            "precision": "fp32",
            "recompute": choice.recompute,
            "compile": False,
        },
        "log": {"interval": 0},
    }
    return resolve_model(Config.from_dict(tree), tp * pp * dp)


def reference_run(choice: Choice) -> tuple[list[tuple[float, float, float]], list[Piece]]:
    """On every rank: (loss, norm, rate) per step, and the rank's weights after the last."""
    config = config_of(choice)
    source, _ = build_sources(config.data, vocab_size=config.model.vocab_size)
    with runs.make_engine(config) as engine:
        metrics = []
        while engine.running():
            metrics.append(engine.train_batch(source))
        source.close()
        return [(float(m.loss), float(m.grad_norm), m.lr) for m in metrics], runs.pieces_of(engine)


def test_a_layout_gives_the_reference_run(ranks: Callable, choice: Choice) -> None:
    tp, pp, dp = choice.layout
    # Four ranks on fewer cores take minutes over a micro-batch of one, each of whose collectives waits for a core.
    results = ranks(tp * pp * dp, reference_run, choice, timeout=1200)
    expected = json.loads((ORACLE / choice.case / "expected.json").read_text())
    for numbers, _ in results:
        assert len(numbers) == len(expected)
        for (loss, norm, rate), step in zip(numbers, expected):
            assert loss == pytest.approx(step["loss"], rel=runs.LOSS, abs=0), step
            assert norm == pytest.approx(step["grad_norm"], rel=runs.NORM, abs=0), step
            assert rate == pytest.approx(step["lr"], rel=1e-15, abs=0), step
    weights = runs.assemble([pieces for _, pieces in results])["weight"]
    final = HFWeights(ORACLE / choice.case / "hf_final")
    assert weights.keys() == final.parameters.keys()
    for name, ours in weights.items():
        assert runs.tensor_error(ours, final.read(name)) < runs.WEIGHTS, name
