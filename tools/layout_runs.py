"""What the tools that run several layouts share: how one is spelled, tp=2,dp=2,zero=1,mbs=4,section.field=value, how it
is run, what they ask of their own flags and of the files that they are to write."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megazero.errors import ConfigError, LaunchError

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


def benchmark(text: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The report of tools/benchmark.py under a run's layout. Raises LaunchError where it failed or gave none."""
    output = launch(text, ROOT / "tools" / "benchmark.py", arguments)
    for line in output.splitlines():
        if line.startswith("{"):
            try:
                return json.loads(line)
            except ValueError:
                break
    raise LaunchError(f"the run {text!r} ended without a report; what it said is above")


def check_counts(arguments: argparse.Namespace, *names: str) -> None:
    """Raises ConfigError where one of these is given and not at least 1."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError.single(f"--{name.replace('_', '-')}", f"{value} must be at least 1")


def check_outputs(arguments: argparse.Namespace, *names: str) -> None:
    """Before anything is run: makes the folders of these files. Raises ConfigError where one could not be written."""
    for name in names:
        path: Path | None = getattr(arguments, name)
        if path is None:
            continue
        flag = f"--{name.replace('_', '-')}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError.single(flag, f"{path.parent} cannot be made: {error.strerror}") from None
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError.single(flag, f"{path} cannot be written; give the path of a file")


def gpus_or_all(gpus: int | None) -> int:
    """``gpus``, or all of this machine. Raises LaunchError where there is none."""
    import torch  # which takes a second to load, and not every tool needs it

    if gpus is None and not torch.cuda.device_count():
        raise LaunchError("there is no GPU here; --gpus N runs the layouts as N processes on the CPU")
    return torch.cuda.device_count() if gpus is None else gpus
