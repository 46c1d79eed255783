"""One machine's part of a job: its workers, on torchrun's elastic agent.

The agent starts the workers, watches them, ends them all when one fails and passes signals on.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megazero.launch.environment import keep_gloo_on_loopback
from megazero.launch.verdict import Cause, Verdict, of_failures

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsSpecs

_GRACE_SECONDS = 120
"""How long workers have to save and end after a signal before they are killed."""


class Part(NamedTuple):
    """This machine's part: number ``node`` of ``nodes``, that meet at ``address`` and ``port`` (0: any free one).

    ``run_id``: the same on all machines. ``logs``: a directory for what each rank prints, None for none.
    """

    nproc: int
    address: str = "127.0.0.1"
    port: int = 0
    node: int = 0
    nodes: int = 1
    run_id: str = "megazero"
    logs: str | None = None


def run_part(part: Part, command: Sequence[str], directory: str) -> Verdict:
    """Start ``command`` on the workers and wait for their end; error files go under ``directory``."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from megazero.launch import rendezvous

    rendezvous.register()
    listener = rendezvous.listen(part.address, part.port) if part.node == 0 else None
    port = listener.getsockname()[1] if listener is not None else part.port
    meeting = rendezvous.Meeting(part.address, port, part.node, part.nodes, part.run_id, listener)
    _silence_the_agent()
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(max(1, _core_count() // part.nproc))
    if part.nodes == 1:
        keep_gloo_on_loopback()
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_GRACE_SECONDS))
    specs: LogsSpecs = DefaultLogsSpecs(log_dir=directory)
    if part.logs is not None:
        specs = _rank_logs(Path(part.logs), directory)
    config = LaunchConfig(
        min_nodes=part.nodes,
        max_nodes=part.nodes,
        nproc_per_node=part.nproc,
        run_id=part.run_id,
        rdzv_backend=rendezvous.BACKEND,
        # Numbers and not names: the machine's own name need not resolve.
        rdzv_endpoint=f"{part.address}:{port}",
        rdzv_configs={"meeting": meeting},
        local_addr=part.address if part.node == 0 else None,
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=specs,
        # The last is Slurm's warning before a time limit.
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        log_line_prefix_template="[rank ${rank}] ",
    )
    worker = str(Path(__file__).with_name("worker.py"))
    try:
        elastic_launch(config, sys.executable)("-u", worker, *command)
        meeting.leave()
    except ChildFailedError as error:
        return of_failures(error.failures)
    except SignalException as error:
        return Verdict(128 + error.sigval, f"stopped by {error.sigval.name}", Cause.SAID, stopped=True)
    return Verdict(0)


def _rank_logs(place: Path, directory: str) -> LogsSpecs:
    """Whatever a rank prints goes to place/rank_N.out and .err too; the rest of torch's files under ``directory``."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

    place.mkdir(parents=True, exist_ok=True)

    class RankLogs(DefaultLogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            found = super().reify(envs)
            for local, variables in envs.items():
                name = str(place / f"rank_{variables['RANK']}")
                found.stdouts[local] = found.tee_stdouts[local] = f"{name}.out"
                found.stderrs[local] = found.tee_stderrs[local] = f"{name}.err"
            return found

    return RankLogs(log_dir=directory, tee=Std.ALL)


def _silence_the_agent() -> None:
    """Its log lines and banners repeat, at length, what the verdict says."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic") or name == "torch.distributed.launcher.api":
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _core_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
