"""transformers' Trainer, peft and accelerate on megazero over NCCL, against plain Trainer on the same GPUs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations import test_trainer
from tests.integrations.launched import HERE, launched
from tests.integrations.test_trainer import LOSS, STAGES, same

# What is bitwise on a CPU is not where sums are in the order of the atomics.
CHECKS = ("full", "optimizer_of_the_config", "saved", "from_pretrained", "resized", "evaluated", "half_precision")


@pytest.mark.gpu(1)
def test_trainer_is_as_plain_trainer_on_one_gpu(tmp_path: Path) -> None:
    as_plain_trainer(tmp_path, 1)


@pytest.mark.gpu(2)
@pytest.mark.own_gpus
def test_trainer_is_as_plain_trainer_over_nccl(tmp_path: Path) -> None:
    as_plain_trainer(tmp_path, 2)


def as_plain_trainer(tmp_path: Path, gpus: int) -> None:
    pytest.importorskip("peft")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    script = ("--as-deepspeed", f"--num_gpus={gpus}", HERE / "trainer_runs.py", tmp_path)
    done = launched(*script, CUDA_VISIBLE_DEVICES=visible)
    assert done.returncode == 0, done.stdout + done.stderr
    results: dict[str, Any] = json.loads((tmp_path / "results.json").read_text())
    wrong = {name: found["error"] for name, found in results.items() if "error" in found}
    assert not wrong, "\n".join(wrong.values())
    for name in CHECKS:
        more = (results,) if name == "half_precision" else ()
        getattr(test_trainer, f"test_{name}")(results[name], *more)
    for kind in ("adapters", "head"):
        same(results["lora"][f"{kind} 3"], results["lora"][f"{kind} plain"])
    for stage in STAGES:
        before, after = results["resumed"][stage]
        assert after == pytest.approx(before, **LOSS)
    plain = results["accelerated"].pop("plain")
    for name, found in results["accelerated"].items():
        assert found["losses"][:8] == pytest.approx(plain["losses"], **LOSS), name
        assert found["losses"][8:] == pytest.approx(found["losses"][4:8], **LOSS), name
