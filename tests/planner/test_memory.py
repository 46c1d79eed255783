"""The plan against measured peaks: published ones of a GPU, and those of real steps on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megazero.config import Config
from megazero.engine import Engine
from megazero.launch.environment import ProcessEnvironment
from megazero.planner.buffers import gathered_elements, unsharded_gradient_elements
from megazero.planner.memory import amount, plan
from megazero.planner.model_state import Buffer
from megazero.sharding import whole
from megazero.zero.flat import FlatLayout
from megazero.zero.settings import ZeroSettings
from tests.planner.live import LiveStorages

GIB = 2**30

# Peaks of one H200 that README.md's table gave for commit d32f5bd, with its commands' settings. The loss then held at
# most 2^27 logits at once.
MEASURED = {
    "GPT 1.3B": (
        66.8 * GIB,
        {"num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, "max_position_embeddings": 2048},
        2048,
        16,
    ),
    "GPT 124M": (21.0 * GIB, {}, 1024, 64),
}


@pytest.mark.parametrize("name", MEASURED)
def test_peak_is_the_one_measured_on_a_gpu(name: str) -> None:
    measured, model, seq_length, batch = MEASURED[name]
    config = Config.model_validate(
        {
            "model": {"vocab_size": 50304, **model},
            "data": {"seq_length": seq_length},
            "train": {"micro_batch_size": batch, "global_batch_size": batch},
        }
    )
    # P3 asks for 5 %.
    assert plan(config, 1).fullest.peak == pytest.approx(measured, rel=0.05)


class RandomTokens:
    """Micro-batches of uniformly random tokens."""

    def __init__(self, config: Config) -> None:
        self._vocab_size, self._length = config.model.vocab_size, config.data.seq_length

    def read(self, first: int, dp_rank: int, dp_size: int, global_size: int, micro_size: int) -> list[dict]:
        return [
            {
                "tokens": torch.randint(self._vocab_size, (micro_size, self._length + 1)),
                "weights": torch.ones(micro_size, self._length),
                "samples": torch.arange(start, start + micro_size),
            }
            for start in range(first, first + global_size, micro_size)
        ]


GPT2: dict[str, Any] = {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 64}
LLAMA: dict[str, Any] = {
    **GPT2,
    "num_key_value_heads": 2,
    "ffn_hidden_size": 352,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "position": "rotary",
    "qkv_bias": False,
    "out_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("model", "train", "stage"),
    [
        (GPT2, {"global_batch_size": 16, "precision": "bf16"}, 0),
        (LLAMA, {"recompute": "full"}, 2),
        (LLAMA, {"recompute": "selective"}, 3),
    ],
    ids=["gpt2 bf16 accumulated", "llama full recompute stage 2", "llama selective stage 3"],
)
def test_peak_is_that_of_a_step(model: dict[str, Any], train: dict[str, Any], stage: int) -> None:
    config = Config.model_validate(
        {
            "model": {"vocab_size": 600, **model},
            "data": {"seq_length": 64},
            "train": {"micro_batch_size": 8, "global_batch_size": 8, "precision": "fp32", "compile": False, **train},
            "zero": {"stage": stage, "stage3_prefetch_bucket_size": 1, "reduce_bucket_size": 1},
            "log": {"interval": 0},
        }
    )
    with LiveStorages() as live, Engine(config, ProcessEnvironment(0, 0, 1)) as engine:
        source = RandomTokens(config)
        engine.train_batch(source)
        live.peak = 0
        engine.train_batch(source)
    assert plan(config, 1, gpu=False).fullest.peak == pytest.approx(live.peak, rel=0.05)


def settings(prefetch_bucket_size: int = 0, max_live_parameters: int = 10**9, **changes: bool) -> ZeroSettings:
    return ZeroSettings(3, 1, 1, prefetch_bucket_size, 0, max_live_parameters, **changes)


def test_gathered_parameters_are_the_unit_in_use_and_those_fetched_ahead() -> None:
    sizes, uses = [5, 10, 10, 7, 20], range(5)
    assert gathered_elements(sizes, uses, settings()) == 20
    # The next one is fetched whatever its size, more while they fit.
    assert gathered_elements(sizes, uses, settings(prefetch_bucket_size=1)) == 27
    assert gathered_elements(sizes, uses, settings(prefetch_bucket_size=17)) == 37
    assert gathered_elements(sizes, uses, settings(prefetch_bucket_size=27)) == 47
    assert gathered_elements(sizes, uses, settings(prefetch_bucket_size=37)) == 52
    assert gathered_elements(sizes, uses, settings(prefetch_bucket_size=37, max_live_parameters=30)) == 27
    assert gathered_elements(sizes, uses, settings(keep_gathered=True)) == 52
    assert gathered_elements(sizes, uses, settings(reshard_after_forward=False)) == 52
    # A tied embedding is used first and last, and stays in between; one that persists takes nothing.
    assert gathered_elements([5, 10, 0, 20], [0, 1, 2, 3, 0], settings()) == 25


def test_unsharded_gradients_are_those_of_two_neighbouring_buckets() -> None:
    def buffer(elements: int) -> Buffer:
        return Buffer(FlatLayout.build("block", {"w": whole("w", (elements,))}, 1), False)

    buffers = [buffer(64 * n) for n in (9, 1, 2, 3, 4)]
    assert unsharded_gradient_elements(buffers, 1) == 64 * 10
    assert unsharded_gradient_elements(buffers, 64 * 7) == 64 * (3 + 9)  # 4 + 3, 2 + 1, 9
    assert unsharded_gradient_elements(buffers[1:], 64 * 100) == 64 * 10


def pipeline(schedule: str, micro_batches: int) -> list[int]:
    config = Config.model_validate(
        {
            "model": {"num_layers": 8},
            "parallel": {"pp": 4, "partition": [2, 2, 2, 2], "schedule": schedule},
            "train": {"global_batch_size": micro_batches},
        }
    )
    return [stage.activations for stage in plan(config, 4).stages]


def test_activations_follow_the_schedule() -> None:
    one = pipeline("1f1b", 1)
    assert pipeline("1f1b", 8) == [count * stage for count, stage in zip((4, 3, 2, 1), one)]
    assert pipeline("1f1b", 3) == [count * stage for count, stage in zip((3, 3, 2, 1), one)]
    assert pipeline("gpipe", 8) == [8 * stage for stage in one]


def test_description() -> None:
    config = Config.model_validate(
        {"model": {"preset": "llama3-8b"}, "parallel": {"pp": 2}, "zero": {"stage": 1}, "data": {"seq_length": 4096}}
    )
    found = plan(config, 16)
    assert found.fullest is found.stages[0] is found.of_rank(7)
    assert found.of_rank(8) is found.stages[1]
    text = found.describe()
    assert text.startswith(
        "memory per GPU (pipeline stage 0, which needs most): parameters 8.5 GB, gradients 16.9 GB, optimizer 6.3 GB, "
        "activations ~"
    )
    assert text.endswith(f"; at most ~{amount(found.fullest.peak)} at once")


def test_amounts() -> None:
    given = [0, 999, 1000, 99_400, 99_500, 999_600, 2.63e9, 1.12e12, 5.5e15]
    assert [amount(count) for count in given] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "99.4 kB",
        "100 kB",
        "1.0 MB",
        "2.6 GB",
        "1.1 TB",
        "5500 TB",
    ]
