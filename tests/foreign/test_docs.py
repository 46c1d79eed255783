"""The scripts of docs/from-deepspeed.md run as they stand, with each way of starting them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import megazero
from tests.forked_scripts import run_forked

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "from-deepspeed.md").read_text()
SCRIPTS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)

LAUNCHERS = {
    "python": [],
    "megazero launch": ["-m", "megazero", "launch", "--nproc", "2"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"],
}


# Each script once, and each launcher once.
@pytest.mark.parametrize(
    ("number", "launcher", "expected"),
    [
        (0, "python", ["ZeRO stage 3, float32", "step 10: loss", "prediction"]),
        (
            1,
            "megazero launch",
            ["ZeRO stage 3, bfloat16, micro-batch 4 x 2 accumulation", "gradient norm", "[[1, 2, 3"],
        ),
        # transformers and peft take long to import, so once each.
        (2, "torchrun", ["no optimizer is given", "left to the defaults: train_batch_size = 1"]),
    ],
)
def test_script_runs(number: int, launcher: str, expected: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[number])
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = run_forked(*LAUNCHERS[launcher], script, directory=tmp_path, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in expected:
        assert text in done.stdout, done.stdout
    if number == 2:
        assert (tmp_path / "adapters" / "adapter_model.safetensors").stat().st_size > 1000


def test_names_of_the_page_exist() -> None:
    section = PAGE[PAGE.index("## The engine") : PAGE.index("Between steps at stages")]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`(\w+)(?:\(.*?\))?`", row)]
    found = {*dir(megazero.ZeroEngine), *megazero.ZeroEngine.__init__.__code__.co_names, "engine"}
    assert len(names) > 25 and not [name for name in names if name not in found]
