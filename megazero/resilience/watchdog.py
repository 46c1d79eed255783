"""A thread beside training that notices a hang or a lost peer, says who waits for whom, and ends the job.

[Note: what the ranks tell each other]
All goes through the process group's store, over a connection of the thread's own, in a few bytes every few seconds;
each rank looks after one other, so the work per rank does not grow with their number. Whoever notices something first
raises the alarm; then, and only then, does every rank say all about itself, and that first rank collects it.

  beat/RANK    JSON: how many beats, and the moment in the step
  alarm        JSON: the rank that raised it, and why
  said/RANK    JSON: a Statement
  reported     the report is printed: end
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megazero.launch.errors import end_process
from megazero.pipeline.schedules import COMMUNICATION, SENDS, Action
from megazero.resilience.collectives import Entered, entered
from megazero.resilience.position import Position, describe
from megazero.resilience.report import Silence, Statement, report

BACKSTOP = 60.0
"""Seconds after the watchdog's limit at which collectives give up by themselves, should it not have ended the job."""

_ANSWER = 5.0
"""Seconds the ranks have to say where they are, once there is an alarm."""
_OWN_END = 10.0
"""Seconds a rank has to end by itself after another has failed: its own error may say more."""
_FRAMES = 12


class Watchdog:
    """Watches this rank and one other; made by every rank of a job of two or more, after the process group.

    Args:
        peers: by pipeline rank, the global rank that this one exchanges tensors with.
        limit: seconds without any progress inside a step, an evaluation or a save.
        step_limit: seconds that a whole step may take, 0 for any.
        peer_limit: seconds without a sign of life after which another process is lost, 0 for any.
    """

    def __init__(
        self, position: Position, peers: Sequence[int], limit: float, step_limit: float = 0.0, peer_limit: float = 0.0
    ) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._position, self._peers = position, peers
        self._limit, self._step_limit, self._peer_limit = limit, step_limit, peer_limit
        shortest = min(seconds for seconds in (limit, step_limit, peer_limit) if seconds)
        self._interval = min(5.0, shortest / 5)
        self._whole = dist.distributed_c10d._get_default_store()
        # Each rank's n-th watchdog is one: another engine has keys of its own.
        number = self._whole.add(f"megazero/watch/made/{self.rank}", 1)
        prefix = f"megazero/watch/{number}"
        self._of_training = dist.PrefixStore(prefix, self._whole)
        self._store = dist.PrefixStore(prefix, self._whole.clone())
        self._store.set_timeout(timedelta(seconds=max(10.0, 2 * self._interval)))
        self._main, self._since = threading.get_ident(), time.time_ns()
        self._host = socket.gethostname()
        self._beats = 0
        self._seen, self._seen_at = b"", time.monotonic()
        self._step, self._step_since = position.now.step, time.monotonic()
        self._stop = threading.Event()
        self._alarmed = False
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self, error: BaseException | None = None) -> None:
        """This rank needs watching no more. ``error``: it fails, and the others must not wait for it."""
        self._stop.set()
        self._thread.join(None if self._alarmed else 3 * self._interval + 10)
        try:
            if error is not None:
                self._raise_alarm(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", failed=True)
            self._store.set(f"beat/{self.rank}", b"")
        except RuntimeError:
            pass  # the store's process has ended already

    def host_of(self, rank: int) -> str:
        """The machine of another rank, "?" where it has not said anything yet."""
        key = f"beat/{rank}"
        beat = self._of_training.get(key) if self._of_training.check([key]) else b""
        return json.loads(beat)[1] if beat else "?"

    def _run(self) -> None:
        self._position.enter_thread()
        unreachable = 0.0
        while True:
            try:
                self._beat()
                if self._store.check(["alarm"]):
                    self._answer()
                elif cause := self._own_trouble() or self._lost_peer():
                    self._raise_alarm(cause)
                    self._answer()
                unreachable = 0.0
            except RuntimeError as error:  # torch.distributed.DistError among them
                if self._stop.is_set():
                    return
                unreachable = unreachable or time.monotonic()
                if time.monotonic() - unreachable > (self._peer_limit or self._limit):
                    self._end_alone(f"the store of the process group is out of reach ({_one_line(error)})")
            if self._stop.wait(self._interval):
                return

    def _beat(self) -> None:
        self._beats += 1
        content = [self._beats, self._host, os.getpid(), describe(self._position.now)]
        self._store.set(f"beat/{self.rank}", json.dumps(content))

    def _own_trouble(self) -> str | None:
        now, clock = self._position.now, time.monotonic()
        if now.step != self._step or not now.limited:
            self._step, self._step_since = now.step, clock
        if now.limited and clock - now.since > self._limit:
            return f"no progress for {self._limit:g} s (train.timeout)"
        if self._step_limit and clock - self._step_since > self._step_limit:
            return f"step {now.step} is not done after {self._step_limit:g} s (watch.step_timeout)"
        return None

    def _lost_peer(self) -> str | None:
        """Whether the next rank has stopped giving signs of life; a clock's comparison is with its own only."""
        peer = (self.rank + 1) % self.size
        beat = self._store.get(f"beat/{peer}") if self._store.check([f"beat/{peer}"]) else None
        if beat is None or beat == b"" or beat != self._seen:
            self._seen, self._seen_at = beat or b"", time.monotonic()
        elif self._peer_limit and time.monotonic() - self._seen_at > self._peer_limit:
            _, host, process, at = json.loads(beat)
            return (
                f"rank {peer} ({host}, process {process}) has given no sign of life for {self._peer_limit:g} s "
                f"(watch.peer_timeout); last heard of at {at}"
            )
        return None

    def _raise_alarm(self, cause: str, failed: bool = False) -> None:
        self._store.compare_set("alarm", "", json.dumps([self.rank, cause, failed]))

    def _answer(self) -> None:
        """There is an alarm: take part in its report, and end."""
        self._alarmed = True
        first, cause, failed = json.loads(self._store.get("alarm"))
        if failed:
            if not self._stop.wait(_OWN_END):
                self._end(f"ended, because rank {first} failed: {cause}", "", shown=False)
            return
        self._store.set(f"said/{self.rank}", json.dumps(self._statement()))
        if first != self.rank:
            self._wait_until(lambda: self._store.check(["reported"]), 3 * _ANSWER)
            self._end(f"ended by rank {first}'s report: {cause}", "", shown=False)
        self._wait_until(lambda: self._store.check([f"said/{r}" for r in range(self.size)]), _ANSWER + self._interval)
        said, silent = self._collect()
        text, summary = report(cause, said, silent)
        self._end(summary, text, shown=True)

    def _collect(self) -> tuple[dict[int, Statement], dict[int, Silence]]:
        said, silent = {}, {}
        for rank in range(self.size):
            if self._store.check([f"said/{rank}"]):
                said[rank] = _statement_of(json.loads(self._store.get(f"said/{rank}")))
                continue
            beat = self._store.get(f"beat/{rank}") if self._store.check([f"beat/{rank}"]) else b""
            silent[rank] = Silence(*json.loads(beat)[1:]) if beat else Silence("", 0, "")
        return said, silent

    def _statement(self) -> Statement:
        now, device = self._position.now, self._position.device_at()
        awaits: tuple[int, ...] = ()
        what = (device or now).what  # on a GPU the host does not wait for what it receives
        if isinstance(what, Action) and what.kind in COMMUNICATION and what.kind not in SENDS:
            awaits = (self._peers[what.peer or 0],)
        frame = sys._current_frames().get(self._main)
        stack = "".join(traceback.format_stack(frame)[-_FRAMES:])
        seconds = time.monotonic() - now.since
        at_device = describe(device) if device is not None else ""
        return Statement(
            self._host, os.getpid(), describe(now), seconds, at_device, awaits, tuple(entered(self._since)), stack
        )

    def _end_alone(self, cause: str) -> None:
        text, summary = report(cause, {self.rank: self._statement()}, {})
        self._end(summary, text, shown=True)

    def _end(self, summary: str, text: str, shown: bool) -> None:
        def then() -> None:
            if shown:
                self._store.set("reported", b"")
                time.sleep(1.0)  # this process may be the one that serves the store

        end_process(summary, text, shown, then)

    @staticmethod
    def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not condition():
            time.sleep(0.1)


def _statement_of(fields: list[Any]) -> Statement:
    said = Statement(*fields)
    groups = tuple(Entered(name, tuple(ranks), *rest) for name, ranks, *rest in said.groups)
    return said._replace(awaits=tuple(said.awaits), groups=groups)


def _one_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
