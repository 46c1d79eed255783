"""The one harness for tests that need several processes.

`run(world_size, function, *args)` calls a module-level function on every rank of a gloo group and returns the
results by rank. Worker processes persist from test to test: they are forked from a server that has imported torch
once, so a test costs what its work costs. Every job gets a fresh default group, and a pool that saw a failure is
killed and built anew, so nothing leaks from one test into the next.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.distributed.pool_worker import Job, Reply, work

_AFTER_FAILURE = 0.5
"""Seconds the other ranks have to end, once one has failed, before they are killed."""

_JOBS_PER_WORKER = 40
"""Jobs after which workers are made anew: a job's models are cycles, and hold its process groups and their threads."""

_STACK_DUMP = 0.3
"""Seconds a signalled worker has to write its stack."""


class RankFailure(Exception):
    """A job failed; the message holds the first failing rank's traceback and where each other rank stood."""


@dataclass
class _Worker:
    process: multiprocessing.process.BaseProcess
    connection: Connection
    log: Path
    log_read: int = 0

    def new_output(self) -> str:
        """What the worker wrote to stdout and stderr since the last call."""
        with self.log.open("rb") as file:
            file.seek(self.log_read)
            output = file.read()
        self.log_read += len(output)
        return output.decode(errors="replace")


class Pool:
    """Worker processes 0 … n-1, grown on demand; a job of world size w runs on the first w."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._directory = tempfile.TemporaryDirectory(prefix="megazero-tests-")
        self._jobs = 0
        self._context = multiprocessing.get_context("forkserver")
        # torch imports torch._dynamo at the first collective, which takes seconds: once here, not in every worker.
        self._context.set_forkserver_preload(["torch._dynamo", "pytest", "megazero.engine"])

    def run(self, world_size: int, function: Callable, args: Sequence, kwargs: dict, timeout: float) -> list[Any]:
        """See `run`."""
        assert "." not in function.__qualname__, f"{function.__qualname__}: only module-level functions can be sent"
        if self._jobs % _JOBS_PER_WORKER == 0:
            self.close()
        new = [self._add_worker() for _ in range(world_size - len(self._workers))]
        for worker in new:
            worker.connection.recv()  # it is ready; the first start of all imports torch, on no job's time
        self._jobs += 1
        module = sys.modules[function.__module__]
        job = Job(
            module=function.__module__,
            file=module.__file__,
            function=function.__name__,
            arguments=pickle.dumps((tuple(args), kwargs)),
            world_size=world_size,
            store=str(Path(self._directory.name) / f"store-{self._jobs}"),
            timeout=timeout,
        )
        workers = self._workers[:world_size]
        for rank, worker in enumerate(workers):
            try:
                worker.connection.send((rank, job))
            except OSError:
                pass  # it died since the last job; _collect finds its exit code
        try:
            replies, problem = self._collect(workers, timeout)
        except BaseException:  # Ctrl-C, say: replies to this job must not be taken for those to the next
            self.close()
            raise
        failed = [reply for reply in replies.values() if reply.traceback is not None]
        if problem is None and not failed:
            self._show_output(workers)
            return [pickle.loads(replies[rank].result) for rank in range(world_size)]
        message = self._describe(workers, replies, problem, function.__name__)
        self._show_output(workers)
        self.close()
        raise RankFailure(message)

    def close(self) -> None:
        """Kill every worker."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
        self._workers = []

    def _add_worker(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        log = Path(self._directory.name) / f"worker-{self._jobs}-{len(self._workers)}.log"
        log.touch()
        process = self._context.Process(target=work, args=(theirs, str(log)), daemon=True)
        process.start()
        theirs.close()
        self._workers.append(_Worker(process, ours, log))
        return self._workers[-1]

    def _collect(self, workers: list[_Worker], timeout: float) -> tuple[dict[int, Reply], str | None]:
        """Replies by rank, and what went wrong apart from exceptions: a crash or the timeout."""
        deadline = time.monotonic() + timeout
        replies: dict[int, Reply] = {}
        problem: str | None = None
        while len(replies) < len(workers):
            remaining = deadline - time.monotonic()
            waiting = [rank for rank in range(len(workers)) if rank not in replies]
            ready = wait([workers[rank].connection for rank in waiting], max(0.0, remaining))
            if not ready:
                return replies, problem or (None if any(r.traceback for r in replies.values()) else "timeout")
            failed = False
            for rank in waiting:
                if workers[rank].connection not in ready:
                    continue
                try:
                    replies[rank] = workers[rank].connection.recv()
                    failed |= replies[rank].traceback is not None
                except (EOFError, OSError):
                    workers[rank].process.join(5)
                    code = workers[rank].process.exitcode
                    died = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
                    problem = problem or f"rank {rank}'s process died: {died}"
                    replies[rank] = Reply(None, None, time.monotonic_ns())
                    failed = True
            if failed:
                deadline = min(deadline, time.monotonic() + _AFTER_FAILURE)
        return replies, problem

    def _describe(self, workers: list[_Worker], replies: dict[int, Reply], problem: str | None, function: str) -> str:
        lines = [f"{function} failed on {len(workers)} ranks"]
        if problem is not None:
            lines.append(problem)
        failed = sorted((r.time, rank) for rank, r in replies.items() if r.traceback is not None)
        for position, (_, rank) in enumerate(failed):
            traceback = replies[rank].traceback or ""
            text = traceback if position == 0 else traceback.strip().splitlines()[-1]
            lines.append(f"rank {rank} {'raised' if position == 0 else 'then raised'}:\n{text}")
        hanging = [rank for rank in range(len(workers)) if rank not in replies]
        self._show_output(workers)
        for rank in hanging:
            if workers[rank].process.is_alive():
                os.kill(workers[rank].process.pid, signal.SIGUSR1)
        if hanging:
            time.sleep(_STACK_DUMP)
        for rank in hanging:
            lines.append(f"rank {rank} had not ended; it stood here:\n{workers[rank].new_output()}")
        done = [rank for rank, r in replies.items() if r.traceback is None and r.result is not None]
        if done:
            lines.append(f"ranks that had ended well: {sorted(done)}")
        return "\n".join(lines)

    @staticmethod
    def _show_output(workers: list[_Worker]) -> None:
        """Print what the ranks printed, so that pytest shows it with a failing test."""
        for rank, worker in enumerate(workers):
            for line in worker.new_output().splitlines():
                print(f"[rank {rank}] {line}")


_pool: Pool | None = None


def run(world_size: int, function: Callable, *args: Any, timeout: float = 120, **kwargs: Any) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on ``world_size`` gloo ranks; its results by rank.

    ``function`` must stand at the top of a module; arguments and results are pickled. It finds the default process
    group initialised, one thread per process, and RANK, LOCAL_RANK and WORLD_SIZE in the environment. An exception
    on any rank, a dead process or ``timeout`` seconds raise RankFailure with the traceback or stacks.
    """
    global _pool
    if _pool is None:
        _pool = Pool()
    return _pool.run(world_size, function, args, kwargs, timeout)


def shutdown() -> None:
    """End all workers; the next `run` starts anew."""
    global _pool
    if _pool is not None:
        _pool.close()
        _pool = None
