"""`megazero launch`: start a script on every process of a job, on one machine or many, and again where it fails.

Loopback and a free port unless other machines are named, one clear message at the end, and no process left behind.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial

from megazero.errors import CommandLine, LaunchError
from megazero.integrations import hook
from megazero.launch import fewer
from megazero.launch.agent import Part, run_part
from megazero.launch.cluster import SIGNALS, Cluster, meeting_address
from megazero.launch.devices import chosen_devices
from megazero.launch.errors import USER_ERROR
from megazero.launch.exported import default_places, exported
from megazero.launch.hosts import Host
from megazero.launch.node import interface_to
from megazero.launch.places import PORT, cluster_hosts, own_place
from megazero.launch.verdict import Verdict

SUMMARY = "Run a script on several processes, of this machine or of many."

_FIRST_WAIT, _LONGEST_WAIT = 5.0, 300.0
"""Seconds before a restart: twice as many each time."""
_SETTLED_SECONDS = 1800.0
"""A start that lasted longer has been a good one: restarts are counted anew."""


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
    parser.add_argument(
        "--restarts", type=int, default=0, metavar="N", help="start again after a failure, N times in a row"
    )
    parser.add_argument(
        "--min_nodes",
        type=int,
        metavar="N",
        help="start again on the machines that are left, N or more: dp shrinks, the global batch does not",
    )
    parser.add_argument("--env", action="append", metavar="NAME=VALUE", help="a variable for every rank (repeatable)")
    parser.add_argument(
        "--log_dir", metavar="DIR", help="keep what each rank prints, in DIR/start_I/rank_N.out and .err"
    )
    parser.add_argument("--ssh", default="ssh", metavar="COMMAND", help="with its options (default: ssh)")
    flags = parser.add_argument_group("as DeepSpeed's launcher has them")
    flags.add_argument("--num_gpus", type=int, metavar="N", help="as --nproc")
    flags.add_argument("--num_nodes", type=int, metavar="N", help="only the first N machines; with --node_rank: of N")
    flags.add_argument("--node_rank", type=int, metavar="I", help="started by hand on each machine: which this one is")
    flags.add_argument("-i", "--include", metavar="HOST:N,N…", help="one process on each of these GPUs")
    flags.add_argument("-e", "--exclude", metavar="HOST:N,N…", help="one process on each of the others")
    flags.add_argument("-H", "--hostfile", metavar="FILE", help="lines of HOST slots=N: start there over ssh")
    flags.add_argument(
        "--master_addr",
        metavar="ADDRESS",
        help="where processes meet (default: 127.0.0.1; of several machines, the first)",
    )
    flags.add_argument(
        "--master_port",
        type=int,
        metavar="PORT",
        help="and at which port (default: any free one; of several machines, 29500)",
    )
    flags.add_argument("--no_local_rank", action="store_true", help="do not give the script --local_rank")
    parser.add_argument("script", metavar="SCRIPT", help="the Python script to run")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's own arguments")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and run; returns the exit code."""
    parser = CommandLine(prog="megazero launch", description=SUMMARY)
    add_arguments(parser)
    return run(parser.parse_args(argv))


def run(arguments: argparse.Namespace) -> int:
    """Run the job; returns 0, the first failing rank's exit code, or 128 + the signal that stopped it."""
    try:
        if arguments.as_deepspeed:
            hook.prepare(os.environ)
            if not arguments.module and _is_command(arguments.script):
                os.execvp(arguments.script, [arguments.script, *arguments.arguments])
        if not arguments.module and not os.path.isfile(arguments.script):
            raise LaunchError(f"there is no script {arguments.script!r} that can be read")
        command = ["-m"] if arguments.module else []
        if arguments.as_deepspeed and not arguments.no_local_rank:
            command.insert(0, "--local_rank")
        command += [arguments.script, *arguments.arguments]
        verdict = _with_restarts(arguments.restarts, _starter(arguments, command))
    except LaunchError as error:
        _say(str(error))
        return USER_ERROR
    except KeyboardInterrupt:  # between two starts: whatever waits for a job's end has handlers of its own
        verdict = Verdict(128 + signal.SIGINT, "stopped by SIGINT", stopped=True)
    if verdict.message:
        _say(verdict.message)
    return verdict.code


def _with_restarts(restarts: int, start: Callable[[int], Verdict]) -> Verdict:
    """Start the job, and again where it fails and that may help: at most ``restarts`` times in a row."""
    failures = starts = 0
    while True:
        begin = time.monotonic()
        os.environ["MEGAZERO_RESTARTS"] = str(starts)
        verdict = start(starts)
        if time.monotonic() - begin > _SETTLED_SECONDS:
            failures = 0
        if not verdict.may_be_restarted or failures == restarts:
            return verdict
        starts, failures = starts + 1, failures + 1
        wait = min(_FIRST_WAIT * 2 ** (failures - 1), _LONGEST_WAIT)
        _say(f"{verdict.message}; restart {failures} of at most {restarts} in a row, in {wait:g} s")
        told = _pause(wait)
        if told is not None:
            return Verdict(128 + told, f"stopped by {signal.Signals(told).name}", stopped=True)


def _pause(seconds: float) -> int | None:
    """Sleep; the signal that cut it short, if one did."""
    told: list[int] = []
    before = {number: signal.signal(number, lambda n, frame: told.append(n)) for number in SIGNALS}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not told:
        time.sleep(0.1)
    for number, handler in before.items():
        signal.signal(number, handler)
    return told[0] if told else None


def _starter(arguments: argparse.Namespace, command: list[str]) -> Callable[[int], Verdict]:
    """What starts the job once; it is given the number of starts before."""

    def logs(start: int) -> str | None:
        return f"{os.path.abspath(arguments.log_dir)}/start_{start}" if arguments.log_dir else None

    hosts, reach = cluster_hosts(arguments)
    variables = exported(os.environ, arguments.env or (), default_places())
    _check_min_nodes(arguments, len(hosts))
    if hosts:

        def on(start: int, chosen: Sequence[Host]) -> Verdict:
            # An address that was given is of the first machine, which may be the one that is gone.
            given = arguments.master_addr if chosen[0] == hosts[0] else None
            meeting = given or meeting_address(chosen), arguments.master_port or PORT
            environment = {**variables, "MEGAZERO_RESTARTS": str(start)}
            return Cluster(chosen, reach, command, environment, meeting, logs(start)).run()

        def there(start: int) -> Verdict:
            if not start or not arguments.min_nodes:
                return on(start, hosts)
            return fewer.restart(hosts, arguments.min_nodes, fewer.answering(reach), partial(on, start), _say)

        return there
    os.environ.update(variables)
    part = _part(arguments)

    def here(start: int) -> Verdict:
        with tempfile.TemporaryDirectory(prefix="megazero-launch-", ignore_cleanup_errors=True) as directory:
            return run_part(part._replace(logs=logs(start)), command, directory)

    return here


def _check_min_nodes(arguments: argparse.Namespace, machines: int) -> None:
    least = arguments.min_nodes
    if least is None:
        return
    if not machines:
        raise LaunchError(
            "--min_nodes: this launcher starts the processes of one machine and knows of no others; give --hostfile, "
            "or start it once inside a Slurm allocation, without srun"
        )
    if not 1 <= least <= machines:
        raise LaunchError(f"--min_nodes {least}: there are {machines} machines; expected 1 to {machines}")
    if not arguments.restarts:
        raise LaunchError("--min_nodes is of restarts, and there are none; give --restarts N as well")


def _part(arguments: argparse.Namespace) -> Part:
    """This machine's part of a job that is started on each of its machines by hand, or by srun; or the whole of one."""
    nodes, node, address, port = own_place(arguments)
    nproc = _processes(arguments, nodes > 1)
    if nodes == 1:
        return Part(nproc, arguments.master_addr or "127.0.0.1", arguments.master_port or 0)
    if name := interface_to(address, port):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    return Part(nproc, address, port, node, nodes)


def _is_command(script: str) -> bool:
    """Whether it is another launcher, and not a Python script, that is to be run."""
    return not script.endswith(".py") and shutil.which(script) is not None


def _processes(arguments: argparse.Namespace, many: bool) -> int:
    if arguments.nproc is not None:
        if arguments.nproc < 1:
            raise LaunchError(f"--nproc {arguments.nproc}: at least 1 process is needed")
        for flag in ("num_gpus", "include", "exclude"):
            if getattr(arguments, flag) is not None:
                raise LaunchError(f"--nproc and --{flag} are both given; give one")
    gpus = _gpu_count()
    if many:
        arguments = argparse.Namespace(**{**vars(arguments), "num_nodes": None})
    count, shown = chosen_devices(arguments, gpus)
    if shown is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(index) for index in range(gpus)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[index] for index in shown)
    return arguments.nproc or count or gpus or 1


def _say(message: str) -> None:
    sys.stdout.flush()
    print(f"megazero launch: {message}", file=sys.stderr, flush=True)


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count()
