"""How the tools that run several layouts spell one: tp=2,dp=2,zero=1,mbs=4,section.field=value."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megazero.errors import LaunchError

ROOT = Path(__file__).resolve().parents[1]
FIELDS = {"tp": "parallel.tp", "pp": "parallel.pp", "zero": "zero.stage", "mbs": "train.micro_batch_size"}
HELP = (
    "A run is a comma-separated list of tp, pp, dp (processes along each axis), zero (zero.stage), mbs (micro-batch\n"
    "size) and section.field=value."
)


def parse_run(text: str) -> tuple[int, list[str]]:
    """(processes, flags of pretrain/gpt.py) of a run such as ``tp=2,dp=2,zero=1``."""
    processes, flags = 1, []
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or not (name in ("dp", *FIELDS) or "." in name):
            raise LaunchError(
                f"--runs {text!r}: {part!r} is none of dp=, {'=, '.join(FIELDS)}= and section.field=value"
            )
        if name in ("tp", "pp", "dp"):
            if not value.isdigit() or not int(value):
                raise LaunchError(f"--runs {text!r}: {part!r} is not a number of processes")
            processes *= int(value)
        if name != "dp":
            flags += [f"--{FIELDS.get(name, name)}", value]
    return processes, flags


def launch(text: str, script: Path, arguments: Sequence[str]) -> str:
    """Run a script on a run's processes, with its flags after ``arguments``; what it printed.

    Raises LaunchError where it failed; what it said is on stderr by then.
    """
    processes, flags = parse_run(text)
    # One process needs no launcher, which takes as long to start as the run itself.
    launcher = ["-m", "megazero", "launch", "--nproc", str(processes)] if processes > 1 else []
    command = [sys.executable, *launcher, str(script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([*command, *arguments, *flags], env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise LaunchError(f"the run {text!r} failed with exit code {done.returncode}; what it said is above")
    return done.stdout
