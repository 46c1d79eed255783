"""`megazero launch`: start a script on every process of one machine, on torchrun's elastic agent.

The agent starts the workers, watches them, ends them all when one fails and passes signals on. Ours is the rest:
loopback and a free port by default, one clear message at the end, and no process left behind.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megazero.errors import LaunchError
from megazero.integrations import hook
from megazero.launch.devices import chosen_devices
from megazero.launch.environment import keep_gloo_on_loopback

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

SUMMARY = "Run a script on several processes of this machine."

_GRACE_SECONDS = 120
"""How long workers have to save and end after a signal before they are killed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments; whatever follows SCRIPT belongs to the script."""
    parser.add_argument("--nproc", type=int, metavar="N", help="processes to start (default: one per GPU, else 1)")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name, as for python -m")
    parser.add_argument(
        "--as-deepspeed",
        action="store_true",
        help="a script written for DeepSpeed: its imports of deepspeed mean megazero, and it gets --local_rank. SCRIPT "
        "may be another launcher's command, as in `-- accelerate launch train.py`",
    )
    flags = parser.add_argument_group("as DeepSpeed's launcher has them")
    flags.add_argument("--num_gpus", type=int, metavar="N", help="as --nproc")
    flags.add_argument("--num_nodes", type=int, metavar="N", help="only 1")
    flags.add_argument("-i", "--include", metavar="HOST:N,N…", help="one process on each of these GPUs")
    flags.add_argument("-e", "--exclude", metavar="HOST:N,N…", help="one process on each of the others")
    flags.add_argument("-H", "--hostfile", metavar="FILE", help="lines of HOST slots=N; only this machine")
    flags.add_argument("--master_addr", metavar="ADDRESS", help="where processes meet (default: 127.0.0.1)")
    flags.add_argument("--master_port", type=int, metavar="PORT", help="and at which port (default: any free one)")
    flags.add_argument("--no_local_rank", action="store_true", help="do not give the script --local_rank")
    parser.add_argument("script", metavar="SCRIPT", help="the Python script to run")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own arguments")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="megazero launch", description=SUMMARY)
    add_arguments(parser)
    return run(parser.parse_args(argv))


def run(arguments: argparse.Namespace) -> int:
    """Run the job; returns 0, the first failing rank's exit code, or 128 + the signal that stopped it."""
    try:
        if arguments.as_deepspeed:
            hook.prepare(os.environ)
            if not arguments.module and _is_command(arguments.script):
                os.execvp(arguments.script, [arguments.script, *arguments.arguments])
        if not arguments.module and not Path(arguments.script).is_file():
            raise LaunchError(f"there is no script {arguments.script!r}")
        nproc = _processes(arguments)
        command = ["-m"] if arguments.module else []
        if arguments.as_deepspeed and not arguments.no_local_rank:
            command.insert(0, "--local_rank")
        meeting = arguments.master_addr or "127.0.0.1", arguments.master_port or 0
        with tempfile.TemporaryDirectory(prefix="megazero-launch-", ignore_cleanup_errors=True) as directory:
            return _run_agent(nproc, [*command, arguments.script, *arguments.arguments], directory, meeting)
    except LaunchError as error:
        _say(str(error))
        return 2


def _is_command(script: str) -> bool:
    """Whether it is another launcher, and not a Python script, that is to be run."""
    return not script.endswith(".py") and shutil.which(script) is not None


def _processes(arguments: argparse.Namespace) -> int:
    if arguments.nproc is not None:
        if arguments.nproc < 1:
            raise LaunchError(f"--nproc {arguments.nproc}: at least 1 process is needed")
        for flag in ("num_gpus", "include", "exclude"):
            if getattr(arguments, flag) is not None:
                raise LaunchError(f"--nproc and --{flag} are both given; give one")
    gpus = _gpu_count()
    count, shown = chosen_devices(arguments, gpus)
    if shown is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(index) for index in range(gpus)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[index] for index in shown)
    return arguments.nproc or count or gpus or 1


def _run_agent(nproc: int, command: Sequence[str], directory: str, meeting: tuple[str, int]) -> int:
    """Start ``command`` on ``nproc`` workers and wait for their end; error files go under ``directory``.

    ``meeting``: address and port where the workers' process group meets; port 0: any free one.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    address, port = meeting
    _silence_the_agent()
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(max(1, _core_count() // nproc))
    keep_gloo_on_loopback()
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_GRACE_SECONDS))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        # With the static one the workers meet where they are told; with the other, at a port of its own choice.
        rdzv_backend="static" if port else "c10d",
        # Numbers and not names: the machine's own name need not resolve.
        rdzv_endpoint=f"{address}:{port}",
        rdzv_configs={"rank": 0} if port else {"is_host": True},
        local_addr=address,
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=directory),
    )
    worker = str(Path(__file__).with_name("worker.py"))
    try:
        elastic_launch(config, sys.executable)("-u", worker, *command)
    except ChildFailedError as error:
        return _explain(error.failures)
    except SignalException as error:
        _say(f"stopped by {error.sigval.name}")
        return 128 + error.sigval
    return 0


def _explain(failures: Mapping[int, ProcessFailure]) -> int:
    """Say which rank failed first and why, as the last line; returns the exit code.

    The cause, in this order: a rank that came forward as the first ([Note: first failure]), one that died of a
    signal (SIGTERM is how the agent ends the others, so it counts least), one that ended without a word.
    """

    def order(rank: int) -> tuple[int, int]:
        failure = failures[rank]
        if _record(failure).get("first"):
            return 0, rank
        if failure.exitcode < 0:
            return (3 if failure.exitcode == -signal.SIGTERM else 1), rank
        return 2, rank

    rank = min(failures, key=order)
    failure = failures[rank]
    record = _record(failure)
    if record.get("first"):
        _say(f"rank {rank} failed: {record['summary']}")
        return record["code"]
    if failure.exitcode < 0:
        _say(f"rank {rank} (process {failure.pid}) was killed by {failure.signal_name()}")
        return 128 - failure.exitcode
    _say(f"rank {rank} failed: {record.get('summary') or f'exit code {failure.exitcode}'}")
    return failure.exitcode


def _record(failure: ProcessFailure) -> Mapping:
    """What `report_errors` wrote about the failure; empty where the process wrote nothing."""
    return failure.error_file_data.get("megazero", {})


def _say(message: str) -> None:
    sys.stdout.flush()
    print(f"megazero launch: {message}", file=sys.stderr, flush=True)


def _silence_the_agent() -> None:
    """Its log lines and banners repeat, at length, what `_explain` says."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic") or name == "torch.distributed.launcher.api":
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


def _core_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
