"""The planner's answers in docs/layouts.md are the planner's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megazero.config import Config
from megazero.planner.chips import CHIPS
from megazero.planner.memory import plan
from megazero.planner.step_time import step_time

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "layouts.md").read_text()
ROW = {name: line for line in PAGE.splitlines() for name in ("14B", "175B", "405B") if f" {name} on " in line}


@pytest.mark.parametrize(
    ("row", "preset", "gpus", "parallel", "zero", "train", "seq_length"),
    [
        ("14B", "qwen2.5-14b", 8, {"pp": 4}, 2, (1024, 1, "none"), 4096),
        ("14B", "qwen2.5-14b", 8, {}, 3, (1024, 1, "none"), 4096),
        ("175B", "gpt3-175b", 512, {}, 3, (2048, 4, "full"), 2048),
        ("175B", "gpt3-175b", 512, {"tp": 4, "pp": 16, "virtual_pp": 6}, 1, (2048, 2, "selective"), 2048),
        ("405B", "llama3.1-405b", 16384, {"tp": 8, "pp": 8, "virtual_pp": 15}, 1, (2048, 1, "full"), 8192),
    ],
)
def test_tokens_per_second(
    row: str, preset: str, gpus: int, parallel: dict[str, Any], zero: int, train: tuple[int, int, str], seq_length: int
) -> None:
    batch, micro_batch, recompute = train
    config = Config.from_dict(
        {
            "model": {"preset": preset},
            "parallel": parallel,
            "zero": {"stage": zero},
            "data": {"seq_length": seq_length},
            "train": {"global_batch_size": batch, "micro_batch_size": micro_batch, "recompute": recompute},
        },
        world_size=gpus,
    )
    assert plan(config, gpus).fullest.peak <= CHIPS["h100"].usable_memory()
    speed = batch * seq_length / gpus / step_time(config, gpus, CHIPS["h100"]).seconds
    assert f" {speed:,.0f}" in ROW[row]
