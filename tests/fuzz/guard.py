"""Runs a reader where nothing but a clear error may come out: no hang, no huge allocation, nothing executed, nothing
written or read outside its directory."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megazero.errors import MegazeroError

SECONDS, WAIT, ROOM, LINE = 10.0, 200.0, 2**30, 3000
"""Seconds of work, seconds in all, and further bytes of memory that a case may take; characters in a line of its
message."""

_STARTED = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn", "os.fork")
_REACHING = ("socket.connect", "socket.bind", "ctypes.dlopen", "pickle.find_class", "os.kill")
_CHANGED = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class TooLong(BaseException):
    """Not an Exception, so that no reader catches it."""


@dataclass(frozen=True)
class Outcome:
    """``kind``: accepted, the class of the error, or FAULT; ``told``: what is wrong, with where it came from."""

    kind: str
    told: str = ""

    @property
    def place(self) -> str:
        """What is the same for findings of one cause."""
        lines = [line.strip() for line in self.told.splitlines()]
        frames = [line for line in lines if line.startswith("File ") and "/tests/fuzz/" not in line]
        return f"{lines[-1].partition(':')[0][:100]} at {frames[-1] if frames else lines[0]}"


class _Auditor:
    """What the interpreter says that it does, while a case runs. A hook cannot be taken off again: there is one."""

    def __init__(self) -> None:
        self.inside: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.inside is None:
            return
        if event.startswith(_STARTED) or event in _REACHING:
            self.seen.append(f"{event} {arguments!r:.300}")
        elif event in _CHANGED or event == "open" and arguments[2] & _WRITING:
            self._within(event, arguments[0])
        elif event == "open":
            path = os.path.abspath(os.fsdecode(arguments[0])) if not isinstance(arguments[0], int) else ""
            if path.startswith(("/etc/passwd", f"{self.inside.parent}/")):
                self._within(event, path)

    def _within(self, event: str, path: Any) -> None:
        if not isinstance(path, int) and path != os.devnull:
            if not f"{os.path.abspath(os.fsdecode(path))}/".startswith(f"{self.inside}/"):
                self.seen.append(f"{event} {os.fsdecode(path)!r:.300} outside its directory")


_auditor = _Auditor()


def run(reader: Callable[[Path], None], place: Path) -> Outcome:
    """``reader(place)``; the working directory is ``place`` meanwhile."""
    _auditor.inside, _auditor.seen = place, []
    before = os.getcwd()
    os.chdir(place)
    try:
        with _limited(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader(place)
        outcome = Outcome("accepted")
    except MegazeroError as error:
        long = max((len(line) for line in str(error).splitlines()), default=0)
        if long > LINE or not str(error):
            outcome = Outcome("FAULT", f"{traceback.format_exc(limit=-6)[:4000]}\nmessage: a line of {long} characters")
        else:
            outcome = Outcome(type(error).__name__)
    except (Exception, TooLong):
        outcome = Outcome("FAULT", traceback.format_exc(limit=-12)[-6000:])
    finally:
        _auditor.inside = None
        os.chdir(before)
    if _auditor.seen:
        outcome = Outcome("FAULT", f"{outcome.told}\nforbidden: {_auditor.seen[0]}")
    return outcome


@contextmanager
def _limited() -> Iterator[None]:
    begin, worked = time.monotonic(), time.process_time()

    def stop(number: int, frame: Any) -> None:
        if time.process_time() - worked > SECONDS or time.monotonic() - begin > WAIT:
            raise TooLong(f"over {SECONDS:g} s of work, or {WAIT:g} s in all")

    former = signal.signal(signal.SIGALRM, stop)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, limits[1]))
    signal.setitimer(signal.ITIMER_REAL, SECONDS, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
        resource.setrlimit(resource.RLIMIT_AS, limits)
