"""How a failing process says so: once for the whole job, and in a form the launcher can repeat.

[Note: first failure] Where one rank fails the others soon fail too, in collectives whose partner is gone. Under
torchrun's agent all ranks of a machine share a directory (the parent of TORCHELASTIC_ERROR_FILE's); the rank that
creates the file ``first_failure`` in it prints its error, the others only record theirs. An exception reaches
`report_errors` before its process closes any connection, so the cause comes first. A process killed by a signal
creates nothing, and its siblings would win; therefore one whose error looks like a lost connection waits a little:
by then the cause has come forward, or the agent has seen the dead process and sends SIGTERM. Where that signal came
before the error, and whoever handled it knew what it means, the exception has an attribute ``told_to_end``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from megazero.errors import ConfigError, MegazeroError, WorldSizeError
from megazero.launch.mistakes import about_a_config

CRASHED, USER_ERROR, STUCK = 1, 2, 3
"""Exit codes: an exception; what is the user's to mend; the watchdog's end. After the second a new start is no use."""

_CONNECTION_WAIT = 15.0
"""Seconds a lost connection waits for its cause to come forward; the agent looks for dead processes every 0.1 s."""


@contextmanager
def report_errors() -> Iterator[None]:
    """Turn an exception of the body into one report and SystemExit; also usable as a decorator of ``main``.

    A MegazeroError is the user's to mend, and so is what other libraries say of a ds_config: the message alone, exit
    code 2. Another exception: its traceback, exit code 1. Printed to stderr by the first rank that fails (see
    [Note: first failure]). The body's own SystemExit is recorded where it means failure, and passes through.
    """
    try:
        yield
    except _Reported:
        raise
    except SystemExit as ending:
        if ending.code not in (None, 0):
            number = isinstance(ending.code, int)
            summary = f"exit code {ending.code}" if number else _one_line(str(ending.code))
            _report(ending, "", summary, code=ending.code if number else 1)
        raise
    except KeyboardInterrupt:
        raise _Reported(128 + signal.SIGINT) from None
    except Exception as error:
        message = str(error) if isinstance(error, MegazeroError) else about_a_config(error)
        if message is not None:
            _report(error, f"error: {message}\n", _one_line(message), code=USER_ERROR)
            raise _Reported(USER_ERROR) from None
        text = _traceback_text(error)
        if os.environ.get("WORLD_SIZE", "1") != "1":
            text = f"rank {os.environ.get('RANK')}:\n{text}"
        _report(error, text, _one_line("".join(traceback.format_exception_only(error))), code=CRASHED)
        raise _Reported(CRASHED) from None


def end_process(summary: str, text: str, shown: bool, then: Callable[[], object]) -> NoReturn:
    """End this process from any thread, with STUCK. ``shown``: it speaks for the job, prints ``text`` and is named as
    the first failure. ``then``: called when that is done."""
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if place is not None:
        if shown:
            with suppress(OSError):
                (Path(place).parent.parent / "first_failure").touch()
        _write_error_file(Path(place), text, summary, STUCK, first=shown, misfits=False)
    if shown:
        sys.stdout.flush()
        print(text, end="", file=sys.stderr, flush=True)
    try:
        then()
    finally:
        os._exit(STUCK)


class _Reported(SystemExit):
    """The exit of a process whose error has been dealt with, so that an outer `report_errors` lets it be."""


def _report(error: BaseException, text: str, summary: str, code: int) -> None:
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if place is None:
        # No common directory. A ConfigError is the same on every rank, so rank 0 speaks for all.
        first = os.environ.get("RANK", "0") == "0" or not isinstance(error, ConfigError)
    else:
        first = _is_first(error, Path(place).parent.parent)
        _write_error_file(Path(place), text, summary, code, first, isinstance(error, WorldSizeError))
    if first:
        sys.stdout.flush()
        print(text, end="", file=sys.stderr, flush=True)


def _is_first(error: BaseException, shared: Path) -> bool:
    marker = shared / "first_failure"
    if _is_lost_connection(error) and (getattr(error, "told_to_end", False) or _told_to_end(marker)):
        return False
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _is_lost_connection(error: BaseException) -> bool:
    # By name: this module must not import torch, and gloo's errors are plain RuntimeErrors.
    names = {cls.__name__ for cls in type(error).__mro__}
    return "DistError" in names or any(text in str(error) for text in ("by peer", "Broken pipe", "NCCL"))


def _told_to_end(marker: Path) -> bool:
    """Wait until another rank has come forward or SIGTERM has come; False if neither did in time."""
    told = threading.Event()
    with suppress(ValueError):  # signal handlers are the main thread's alone
        signal.signal(signal.SIGTERM, lambda number, frame: told.set())
    deadline = time.monotonic() + _CONNECTION_WAIT
    while time.monotonic() < deadline:
        if told.wait(0.05) or marker.exists():
            return True
    return False


def _write_error_file(place: Path, text: str, summary: str, code: int, first: bool, misfits: bool) -> None:
    """The elastic agent's format (``message``), so that torchrun shows it, and what our launcher reads beside it."""
    content = {
        "message": {
            "message": summary,
            "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))},
        },
        "megazero": {"summary": summary, "code": code, "first": first, "misfits": misfits},
    }
    with suppress(OSError):  # the launcher may be gone, and its directory with it
        place.write_text(json.dumps(content))


def _one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


def _traceback_text(error: Exception) -> str:
    """The traceback from the script's own frames on, without those of the launcher that called it."""
    start: TracebackType | None = error.__traceback__
    while start is not None and _is_ours(start.tb_frame.f_code.co_filename):
        start = start.tb_next
    return "".join(traceback.format_exception(type(error), error, start))


def _is_ours(filename: str) -> bool:
    return filename in (__file__, str(Path(__file__).with_name("worker.py"))) or "runpy" in filename
