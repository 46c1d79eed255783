"""Setting up: the interpreter that is there, else a .venv, made once. With stand-ins for Python and pip."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

# Plays python3: `- MODULES` says what is missing, `-m venv` makes a copy of itself, `-m pip install` marks it whole.
STAND_IN = """#!/bin/bash
case "$*" in
    "- "*) cat >/dev/null; [ -e "$(dirname "$0")/whole" ] || echo torch ;;
    *ensurepip*) [ -z "$NO_ENSUREPIP" ] ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip --version") ;;
    "-m pip install"*)
        echo "$@" >>"$LOG"
        sleep 0.5
        [ -z "$NO_NETWORK" ] && touch "$(dirname "$0")/whole" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    root = tmp_path / "a check out"
    (root / "tests").mkdir(parents=True)
    shutil.copy(TESTS / "python_env.sh", root / "tests")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "python3").write_text(STAND_IN)
    (bin_folder / "python3").chmod(0o755)
    for tool in ("bash", "dirname", "cat", "cp", "mkdir", "touch", "sleep", "flock"):
        (bin_folder / tool).symlink_to(shutil.which(tool))
    return root


def start(checkout, **environment):
    code = f'set -euo pipefail; . "{checkout}/tests/python_env.sh"; need_python test torch; echo "$PYTHON"'
    environment = {"PATH": str(checkout.parent / "bin"), "LOG": str(checkout.parent / "log"), **environment}
    return subprocess.Popen(
        ["bash", "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd="/"
    )


def finish(process):
    out, err = process.communicate(timeout=60)
    return process.returncode, out.strip(), err


def installations(checkout):
    log = checkout.parent / "log"
    return log.read_text().splitlines() if log.exists() else []


def test_an_interpreter_that_has_everything_is_used(checkout):
    (checkout.parent / "bin/whole").touch()
    assert finish(start(checkout)) == (0, "python3", "")
    assert not (checkout / ".venv").exists()


def test_two_runs_at_once_install_once(checkout):
    both = [start(checkout), start(checkout)]
    expected = str(checkout / ".venv/bin/python")
    assert [finish(process)[:2] for process in both] == [(0, expected)] * 2
    assert finish(start(checkout))[:2] == (0, expected)
    (command,) = installations(checkout)
    assert command.endswith(f"-c {checkout}/constraints.txt -e {checkout}[test]")
    assert sorted(os.listdir(checkout)) == [".venv", "tests"]


def test_missing_ensurepip_names_the_package(checkout):
    status, out, err = finish(start(checkout, NO_ENSUREPIP="1"))
    assert (status, out) == (1, "")
    assert "apt-get install python3-venv" in err
    assert not (checkout / ".venv").exists()


def test_no_network_says_what_is_missing(checkout):
    status, out, err = finish(start(checkout, NO_NETWORK="1"))
    assert (status, out) == (1, "")
    assert "python3 lacks torch" in err


def test_a_chosen_python_is_not_passed_over(checkout):
    status, _, err = finish(start(checkout, PYTHON=str(checkout.parent / "bin/python3")))
    assert status == 1 and "lacks torch" in err
    assert installations(checkout) == []
