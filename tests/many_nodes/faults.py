"""Faults in a run of a small GPT on two machines of two processes each, and what became of it: a table.

    python tests/many_nodes/faults.py [--each N] [--seed S] [--only FAULT …] [--limit SECONDS]

A run must end as the undisturbed one does, to the bit and within the limit, by itself or, where the fault is one to
stop for, after it has said why and was started again; and it must leave no process behind. Not a test that pytest runs:
it needs root, and a minute or two a fault.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from tests.engine.tiny import flags, rank_files, tiny, write_corpus  # noqa: E402
from tests.many_nodes.kinds import FAULTS, Scene  # noqa: E402
from tests.many_nodes.namespaces import Machines, call  # noqa: E402

STEPS, SAVES = 30, 5


def start(machines: Machines, corpus: Path, directory: Path, log: str = "log") -> subprocess.Popen:
    """The launcher, on the first machine."""
    changes = {"train.steps": STEPS, "train.global_batch_size": 8, "train.micro_batch_size": 1, "parallel.tp": 2}
    changes |= {"checkpoint.dir": directory / "run", "checkpoint.save_interval": SAVES, "checkpoint.keep": 3}
    changes |= {"train.timeout": 15, "watch.peer_timeout": 10, "watch.replica_interval": SAVES}
    changes |= {"log.events": directory / "events.jsonl"}
    command = [*machines.inside(machines.names[0]), sys.executable, "-m", "megazero", "launch", "--restarts", "4"]
    command += ["--hostfile", str(machines.hostfile([2, 2])), "--ssh", machines.ssh]
    command += [str(ROOT / "tests" / "resilience" / "job.py"), "pace", "0", "0", *flags(tiny(corpus, changes))]
    out = (directory / log).open("w")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # seven processes would each compile the same modules
    return subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, env=environment, start_new_session=True)


def wait_for_step(directory: Path, step: int, launcher: subprocess.Popen, limit: float) -> None:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline and launcher.poll() is None:
        steps = re.findall(r"^step (\d+)/", (directory / "log").read_text(), re.MULTILINE)
        if steps and int(steps[-1]) >= step:
            return
        time.sleep(0.1)


def end_of(scene: Scene, limit: float) -> int | str:
    """The launcher's exit code, HUNG past the limit, with what is left of the job where that is anything."""
    try:
        code: int | str = scene.launcher.wait(limit)
    except subprocess.TimeoutExpired:
        code = "HUNG"
    names, deadline = scene.machines.names, time.monotonic() + 60
    while (left := sum(len(scene.machines.processes(name)) for name in names)) and time.monotonic() < deadline:
        time.sleep(0.5)
    for name in names:
        for process in scene.machines.processes(name):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    scene.launcher.wait(30)
    return f"{code}, {left} processes left behind" if left else code


def final_loss(log: Path) -> str:
    """Of the last step, as printed."""
    return re.findall(rf"^step {STEPS}/.*?(loss \S+)", log.read_text(), re.MULTILINE)[-1]


def disturbed(name: str, corpus: Path, seed: str, limit: float, wanted: Run) -> Row:
    """A run with this fault, and what became of it."""
    kind, draw = FAULTS[name], random.Random(seed)
    directory = Path(tempfile.mkdtemp(prefix=f"megazero-{name}-"))
    if kind.small_disk:
        call("mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(directory))
    try:
        with Machines(2) as machines:
            (directory / "job").mkdir()
            return _disturbed(name, machines, corpus, directory / "job", draw, limit, wanted)
    finally:
        if kind.small_disk:
            call("umount", "--lazy", str(directory))


def _disturbed(
    name: str, machines: Machines, corpus: Path, directory: Path, draw: random.Random, limit: float, wanted: Run
) -> Row:
    kind, step = FAULTS[name], draw.randint(2, STEPS - SAVES - 1)
    scene = Scene(machines, draw, directory, start(machines, corpus, directory))
    wait_for_step(directory, step, scene.launcher, limit)
    begin = time.monotonic()
    kind.strike(scene)
    code, log = end_of(scene, limit), directory / "log"
    seconds = time.monotonic() - begin
    said = re.findall(r"^megazero launch: (.*)$", log.read_text(), re.MULTILINE)
    how = f"restarted{' twice' if len(said) == 2 else f' {len(said)} times' if said[2:] else ''}" if said else "went on"
    stops = kind.says or kind.may_say
    if stops and code not in (0, "HUNG") and re.search(stops, said[-1] if said else ""):
        how, log = "stopped, started again by hand", directory / "log2"
        kind.remedy(scene)
        again = Scene(machines, draw, directory, start(machines, corpus, directory, "log2"))
        code = end_of(again, limit)
    elif kind.says:
        code = f"{code}, not as it should say"
    same = code == 0 and Run(rank_files(directory / "run"), final_loss(log)) == wanted
    outcome = f"{how}; same loss, same bits" if same else f"FAILED ({code}; see {directory})"
    if same:
        shutil.rmtree(directory)
    return Row(name, step, outcome, seconds, said[0] if said else "")


class Run(NamedTuple):
    """The bytes of every rank's last file, and the last loss as printed."""

    files: dict[str, bytes]
    loss: str


class Row(NamedTuple):
    """``seconds``: from the fault to the end. ``said``: the launcher's first line."""

    fault: str
    step: int
    outcome: str
    seconds: float
    said: str

    def __str__(self) -> str:
        said = self.said if len(self.said) < 240 else f"{self.said[:240]}…"
        return f"| {self.fault} | {self.step} | {self.outcome} | {self.seconds:.0f} s | {said} |"


def summary(rows: list[Row]) -> str:
    """By kind: how often, what became of it, the longest."""
    lines = ["| fault | times | outcome | at most |", "|---|---|---|---|"]
    for name, kind in FAULTS.items():
        if mine := [row for row in rows if row.fault == name]:
            outcomes = Counter(re.sub(r"see .*", "", row.outcome) for row in mine)
            told = ", ".join(f"{outcome} ({count})" for outcome, count in outcomes.most_common())
            lines.append(f"| {kind.title} | {len(mine)} | {told} | {max(row.seconds for row in mine):.0f} s |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--each", type=int, default=4, metavar="N", help="runs of each fault (default: 4)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of where faults strike (default: 1)")
    parser.add_argument("--only", nargs="+", choices=[*FAULTS], default=[*FAULTS], help="these faults (default: all)")
    parser.add_argument("--limit", type=float, default=240, metavar="SECONDS", help="for a run, fault included")
    arguments = parser.parse_args()
    corpus = write_corpus(Path(tempfile.mkdtemp(prefix="megazero-corpus-")))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the machines are taken down
    directory, rows = Path(tempfile.mkdtemp(prefix="megazero-undisturbed-")), []
    with Machines(2) as machines:
        if start(machines, corpus, directory).wait(arguments.limit):
            print((directory / "log").read_text())
            return 1
    wanted = Run(rank_files(directory / "run"), final_loss(directory / "log"))
    print("| fault | at step | outcome | took | the launcher's first line |\n|---|---|---|---|---|", flush=True)
    try:
        for turn in range(arguments.each):
            for fault in arguments.only:
                seed = f"{arguments.seed} {fault} {turn}"
                try:
                    rows.append(disturbed(fault, corpus, seed, arguments.limit, wanted))
                except (OSError, subprocess.SubprocessError) as error:
                    rows.append(Row(fault, 0, f"FAILED ({error!r})", 0, ""))
                print(rows[-1], flush=True)
    finally:
        print(f"\n{summary(rows)}", flush=True)
    return int(any("FAILED" in row.outcome for row in rows))


if __name__ == "__main__":
    sys.exit(main())
