"""Who finds megazero under deepspeed's names: the processes that ask for it, by each of the ways to ask."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

from megazero.errors import LaunchError, MegazeroError
from megazero.integrations import hook
from megazero.integrations.optimizers import DeepSpeedCPUAdam
from megazero.launch.environment import free_port
from tests.integrations.launched import HERE, launched, python

RUN = HERE / "surface_run.py"


def found(done: CompletedProcess) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.split("FOUND ")[1].splitlines()[0])


def check(result: dict[str, Any]) -> None:
    assert result["version"] == result["child"] == hook.VERSION and result["spec"]
    assert result["lacking"] == []
    assert result["unknown"] == [
        "ModuleNotFoundError: megazero stands in for deepspeed here, and has no deepspeed.moe",
        "ModuleNotFoundError: megazero stands in for deepspeed here, and has no deepspeed.runtime."
        "activation_checkpointing",
        "megazero stands in for deepspeed here, and has no checkpointing of it",
        "megazero stands in for deepspeed.comm here, and has no log_summary of it",
        "megazero stands in for deepspeed's accelerator here, and has no on_accelerator of it",
    ]
    assert result["train"] == {
        "ranks": [0, 1],
        "optimizer": "AdamW",
        "learns": True,
        "engine": True,
        "config": 3,
        "weights": True,
        "masters": True,
        "loaded": True,
        "marked": True,
        "device": "cpu",
    }


@pytest.mark.whole
def test_by_the_launcher(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import sys\nsys.other_sitecustomize = True\n")
    port = free_port()
    module = ("-m", "tests.integrations.surface_run", tmp_path / "saved", "--mine")
    result = found(launched("--as-deepspeed", "--num_gpus=1", f"--master_port={port}", *module, PYTHONPATH=str(other)))
    check(result)
    assert result["told"] == [str(port), "--local_rank=0", str(tmp_path / "saved"), "--mine"]
    assert result["other sitecustomize"]


def test_by_one_process_without_a_launcher(tmp_path: Path) -> None:
    check(found(python("-m", "megazero.integrations.deepspeed", RUN, tmp_path)))


def test_an_optimizer_that_accelerate_would_replace_is_an_error() -> None:
    """accelerate gives DeepSpeedCPUAdam the groups of whatever is to be offloaded."""
    own = [kind([torch.ones(2)]).param_groups for kind in (torch.optim.SGD, torch.optim.RMSprop, torch.optim.NAdam)]
    for groups in (*own, [{"params": [torch.ones(2)], "lr": 0.1, "eps": (1e-30, 1e-3)}]):  # the last is Adafactor's
        with pytest.raises(MegazeroError, match="set zero_force_ds_cpu_optimizer to false"):
            DeepSpeedCPUAdam(groups, lr=0.1, adamw_mode=False)
    for given in (torch.optim.Adam([torch.ones(2)]).param_groups, [{"params": [torch.ones(2)], "name": "own"}]):
        assert DeepSpeedCPUAdam(given, adamw_mode=False).param_groups[0]["params"] == given[0]["params"]


def test_nobody_else_does() -> None:
    told = python("-c", "import megazero, megazero.integrations.hook, deepspeed")
    assert told.returncode == 1 and "No module named 'deepspeed'" in told.stderr


@pytest.mark.parametrize(("name", "told"), [("deepspeed", "imported deepspeed itself"), ("trl", "before it")])
def test_too_late(monkeypatch: pytest.MonkeyPatch, name: str, told: str) -> None:
    for library in ("accelerate", "transformers.integrations.deepspeed", "trl"):
        monkeypatch.delitem(sys.modules, library, raising=False)
    monkeypatch.setitem(sys.modules, name, type(sys)(name))
    before = list(sys.meta_path)
    with pytest.raises(LaunchError, match=told):
        hook.install()
    assert sys.meta_path == before


def test_mistakes_at_the_start(tmp_path: Path) -> None:
    done = python("-m", "megazero.integrations.deepspeed", tmp_path / "none.py")
    assert done.returncode == 2 and "there is no script" in done.stderr.splitlines()[-1]
    done = launched("--as-deepspeed", "--nproc", "1", "--num_gpus", "2", RUN)
    assert done.returncode == 2 and "--nproc and --num_gpus are both given" in done.stderr.splitlines()[-1]


WAITING = """
import datetime, sys, time, torch, deepspeed
assert len(sys.argv) == 1
deepspeed.init_distributed(timeout=datetime.timedelta(seconds=3))
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 1), config={"train_batch_size": 2})
if deepspeed.comm.get_rank() == 0:
    engine.save_checkpoint(FOLDER)
else:
    time.sleep(100)
"""


def test_a_rank_that_does_not_come_is_an_error_in_the_time_set(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITING.replace("FOLDER", repr(str(tmp_path / "saved"))))
    done = launched("--as-deepspeed", "--no_local_rank", "--num_gpus=2", script, timeout=90)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("megazero launch: rank 0 failed: ") and "imed out" in last, last
    assert "save_checkpoint" in done.stderr
