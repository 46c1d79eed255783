"""Faults in a run of a small GPT on two machines of two processes each, and what became of it: a table.

    python tests/many_nodes/faults.py [--each N] [--seed S] [--only FAULT …]

A run must end as the undisturbed one does, to the bit, within the limit, and leave no process behind. Not a test that
pytest runs: it needs root, and a minute a fault.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from tests.engine.tiny import flags, rank_files, tiny, write_corpus  # noqa: E402
from tests.many_nodes.namespaces import Machines  # noqa: E402

STEPS, SAVES = 40, 5
LIMIT = 240.0
"""Seconds that a run with one fault may take: restart, waits and this machine's slowness included."""


def worker(machines: Machines, draw: random.Random) -> int:
    """The process of one rank."""
    found = [p for name in machines.names for p, line in machines.processes(name).items() if "launch/worker.py" in line]
    return draw.choice(sorted(found))


def kill_rank(machines: Machines, draw: random.Random, run: Path) -> None:
    os.kill(worker(machines, draw), signal.SIGKILL)


def stop_rank(machines: Machines, draw: random.Random, run: Path) -> None:
    os.kill(worker(machines, draw), signal.SIGSTOP)


def kill_agent(machines: Machines, draw: random.Random, run: Path) -> None:
    found = [p for name in machines.names for p, line in machines.processes(name).items() if "launch/node.py" in line]
    os.kill(draw.choice(sorted(found)), signal.SIGKILL)


def kill_machine(machines: Machines, draw: random.Random, run: Path) -> None:
    for process in machines.processes(machines.names[1]):
        os.kill(process, signal.SIGKILL)


def link_down(machines: Machines, draw: random.Random, run: Path) -> None:
    machines.link(machines.names[1], "down")
    time.sleep(30)
    machines.link(machines.names[1], "up")


def link_slow(machines: Machines, draw: random.Random, run: Path) -> None:
    machines.link(machines.names[1], "tbf", "rate", "2mbit", "burst", "16kb", "latency", "400ms")
    time.sleep(10)
    machines.heal(machines.names[1])


def newest_file(run: Path) -> Path:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if found := sorted(run.glob("step_*/rank_00001.safetensors")):
            return found[-1]
        time.sleep(0.1)
    raise TimeoutError("nothing was saved")


def flip_byte(machines: Machines, draw: random.Random, run: Path) -> None:
    with newest_file(run).open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))
    kill_rank(machines, draw, run)


def cut_file(machines: Machines, draw: random.Random, run: Path) -> None:
    path = newest_file(run)
    os.truncate(path, path.stat().st_size // 2)
    kill_rank(machines, draw, run)


def remove_file(machines: Machines, draw: random.Random, run: Path) -> None:
    newest_file(run).unlink()
    kill_rank(machines, draw, run)


Fault = Callable[[Machines, random.Random, Path], None]
FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        *(kill_rank, stop_rank, kill_agent, kill_machine, link_down, link_slow),
        *(flip_byte, cut_file, remove_file),
    )
}


def start(machines: Machines, corpus: Path, directory: Path) -> subprocess.Popen:
    """The launcher, on the first machine."""
    changes = {"train.steps": STEPS, "train.global_batch_size": 8, "train.micro_batch_size": 1, "parallel.tp": 2}
    changes |= {"checkpoint.dir": directory / "run", "checkpoint.save_interval": SAVES, "checkpoint.keep": 3}
    changes |= {"train.timeout": 15, "watch.peer_timeout": 10, "log.events": directory / "events.jsonl"}
    command = [*machines.inside(machines.names[0]), sys.executable, "-m", "megazero", "launch", "--restarts", "4"]
    command += ["--hostfile", str(machines.hostfile([2, 2])), "--ssh", machines.ssh]
    command += [str(ROOT / "tests" / "resilience" / "job.py"), "pace", "0", "0", *flags(tiny(corpus, changes))]
    log = (directory / "log").open("w")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment, start_new_session=True)


def wait_for_step(directory: Path, step: int, launcher: subprocess.Popen) -> None:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and launcher.poll() is None:
        steps = re.findall(r"^step (\d+)/", (directory / "log").read_text(), re.MULTILINE)
        if steps and int(steps[-1]) >= step:
            return
        time.sleep(0.1)


def disturbed(machines: Machines, corpus: Path, fault: str, draw: random.Random, wanted: dict[str, bytes]) -> str:
    """What became of a run with this fault: one line."""
    directory = Path(tempfile.mkdtemp(prefix=f"megazero-{fault}-"))
    step, begin = draw.randint(2, STEPS - 5), time.monotonic()
    launcher = start(machines, corpus, directory)
    try:
        wait_for_step(directory, step, launcher)
        FAULTS[fault](machines, draw, directory / "run")
        code: int | str = launcher.wait(LIMIT)
    except subprocess.TimeoutExpired:
        code = "HUNG"
    finally:
        machines.heal(machines.names[1])
    seconds = time.monotonic() - begin
    time.sleep(1)
    left = [line for name in machines.names for line in machines.processes(name).values()]
    for name in machines.names:
        for process in machines.processes(name):
            os.kill(process, signal.SIGKILL)
    launcher.wait(30)
    same = code == 0 and rank_files(directory / "run") == wanted
    said = re.findall(r"^megazero launch: (.*)$", (directory / "log").read_text(), re.MULTILINE)
    outcome = "recovered, same bits" if same else f"FAILED (exit code {code}; see {directory})"
    if left:
        outcome += f", LEFT BEHIND {len(left)}"
    return f"| {fault} | {step} | {outcome} | {seconds:.0f} s | {said[0] if said else 'no restart'} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--each", type=int, default=1, metavar="N", help="runs of each fault (default: 1)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of where faults strike (default: 1)")
    parser.add_argument("--only", nargs="+", choices=[*FAULTS], default=[*FAULTS], help="these faults (default: all)")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    corpus = write_corpus(Path(tempfile.mkdtemp(prefix="megazero-corpus-")))
    failed = False
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the machines are taken down
    with Machines(2) as machines:
        directory = Path(tempfile.mkdtemp(prefix="megazero-undisturbed-"))
        if start(machines, corpus, directory).wait(LIMIT):
            print((directory / "log").read_text())
            return 1
        wanted = rank_files(directory / "run")
        print("| fault | at step | outcome | took | the launcher's first line |\n|---|---|---|---|---|", flush=True)
        for fault in arguments.only:
            for _ in range(arguments.each):
                line = disturbed(machines, corpus, fault, draw, wanted)
                failed |= "FAILED" in line or "LEFT" in line
                print(line, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
