"""`report_errors` without our launcher, and what a process knows of itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megazero.errors import ConfigError, LaunchError
from megazero.launch.environment import process_environment
from megazero.launch.errors import report_errors

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
sys.path.append(sys.argv[1])
from megazero.errors import ConfigError
from megazero.launch.errors import report_errors
with report_errors():
    raise ConfigError.single("parallel.tp", "3 does not divide 8")
"""


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment in which no launcher has set anything; what the test's code sets is taken back."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def test_under_plain_torchrun_a_user_error_is_printed_once(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, str(script), str(ROOT)], capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.count("\nerror: parallel.tp") + done.stderr.startswith("error: parallel.tp") == 1


def test_as_a_single_script(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script), str(ROOT)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: parallel.tp: 3 does not divide 8\n")


def test_exceptions_keep_their_traceback(bare: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ending, report_errors():
        raise ValueError("boom")
    assert ending.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("Traceback (most recent call last):\n") and error.endswith("ValueError: boom\n")


def test_without_an_agent_rank_0_speaks_for_all(bare: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    bare.setenv("RANK", "1")
    bare.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit), report_errors():
        raise ConfigError.single("parallel.tp", "3 does not divide 8")
    assert capsys.readouterr().err == ""


def test_success_and_exits_pass(bare: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    with report_errors():
        pass
    with pytest.raises(SystemExit) as ending, report_errors():
        sys.exit(5)
    assert ending.value.code == 5 and capsys.readouterr().err == ""


def test_a_process_without_launcher_is_rank_0_of_1(bare: pytest.MonkeyPatch) -> None:
    assert process_environment() == (0, 0, 1)
    assert os.environ["MASTER_ADDR"] == "127.0.0.1" and 0 < int(os.environ["MASTER_PORT"]) < 65536


def test_the_launchers_environment_is_read(bare: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }.items():
        bare.setenv(name, value)
    environment = process_environment()
    assert (environment.rank, environment.local_rank, environment.world_size) == (5, 1, 8)


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"RANK": "1"}, "WORLD_SIZE=None"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 with WORLD_SIZE=2"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR is not"),
    ],
)
def test_a_half_set_environment_is_refused(bare: pytest.MonkeyPatch, variables: dict[str, str], message: str) -> None:
    for name, value in variables.items():
        bare.setenv(name, value)
    with pytest.raises(LaunchError, match=message):
        process_environment()
