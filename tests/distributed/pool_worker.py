"""The other side of the harness: a process that waits for jobs, one after the other."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import NamedTuple


class Job(NamedTuple):
    """One call of a function, by name; ``arguments`` is pickled apart, to be read once its module is there."""

    module: str
    file: str | None
    function: str
    arguments: bytes
    world_size: int
    store: str
    timeout: float


class Reply(NamedTuple):
    """A pickled result, or a traceback; ``time`` is of the machine's monotonic clock, to find the first failure."""

    result: bytes | None
    traceback: str | None
    time: int


def work(connection: Connection, log: str) -> None:
    """Serve jobs until the pipe closes. Standard output and error go to the file ``log``."""
    import torch

    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's to handle
    torch.set_num_threads(1)
    gc.freeze()  # a collection through all that the server has imported takes 0.3 s, and every engine begins with one
    connection.send("ready")
    while True:
        try:
            rank, job = connection.recv()
        except (EOFError, OSError):
            return
        connection.send(_do(rank, job))


def _do(rank: int, job: Job) -> Reply:
    from torch import distributed as dist

    environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job.world_size)}
    os.environ.update(environment, GLOO_SOCKET_IFNAME="lo")
    try:
        function = _find(job)
        args, kwargs = pickle.loads(job.arguments)
        store = dist.FileStore(job.store, job.world_size)
        # Longer than the harness waits: it shows where a hanging rank stands, which a timeout inside gloo would not.
        limit = timedelta(seconds=job.timeout + 60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world_size, timeout=limit)
        result = pickle.dumps(function(*args, **kwargs))
        # Nobody leaves before all are done: a rank that closes its connections early would look like a failure.
        dist.barrier()
        dist.destroy_process_group()
        return Reply(result, None, time.monotonic_ns())
    except BaseException:
        # The group stays open, so that no other rank fails for want of this one and hides the cause.
        return Reply(None, traceback.format_exc(), time.monotonic_ns())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _find(job: Job) -> Callable:
    """Test modules are loaded from their file under the name pytest gave them; others are imported."""
    if job.module not in sys.modules:
        if job.module.split(".")[0] in ("megazero", "data", "pretrain", "tools"):
            importlib.import_module(job.module)
        else:
            assert job.file is not None
            spec = importlib.util.spec_from_file_location(job.module, job.file)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[job.module] = module
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[job.module]
                raise
    return getattr(sys.modules[job.module], job.function)
