"""One style for all code: `ruff check` and `ruff format` have nothing to say."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("arguments", [("check",), ("format", "--check", "--diff")], ids=["check", "format"])
def test_ruff(arguments):
    done = subprocess.run([sys.executable, "-m", "ruff", *arguments, "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_scripts_are_valid_bash():
    for path in [*ROOT.glob("examples/*.s*"), *ROOT.glob("tests/*.sh"), ROOT / ".ci/run"]:
        if path.suffix in (".sh", ".sbatch", ""):
            done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
