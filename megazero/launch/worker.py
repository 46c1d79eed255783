"""What the launcher starts in every process: the user's script, as Python itself would run it.

Run by path (``python worker.py [--local_rank] [-m] SCRIPT ARGS…``), so that a folder called megazero in the working
directory cannot be taken for the package.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import io
import os
import signal
import sys
from contextlib import suppress

_TEARDOWN_LIMIT = 15
"""Seconds a failed process may take to end. Its siblings live until it has, and a collective's teardown may hang."""


def main() -> None:
    """Run the script, its errors reported once per job. ``--local_rank``: it is told its rank as its first argument."""
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    from megazero.launch.errors import report_errors

    _end_with_the_launcher()
    faulthandler.enable()
    failed: list[int] = []
    atexit.register(_skip_teardown, failed)  # before all others, so that it is called after them
    command = sys.argv[1:]
    if command[0] == "--local_rank":
        at = 3 if command[1] == "-m" else 2
        command = [*command[1:at], f"--local_rank={os.environ['LOCAL_RANK']}", *command[at:]]
    try:
        with report_errors():
            run_script(command)
    except SystemExit as ending:
        if ending.code not in (None, 0):
            faulthandler.dump_traceback_later(_TEARDOWN_LIMIT, exit=True)
            failed.append(ending.code if isinstance(ending.code, int) else 1)
        raise


def _skip_teardown(failed: list[int]) -> None:
    """Leave a failed process where Python would take it apart: threads of process groups that nobody has destroyed may
    hang in that, or abort it. Of what it does, open files are still owed what was written to them."""
    if failed:
        for found in gc.get_objects():
            if issubclass(type(found), io.IOBase):
                with suppress(Exception):  # one that is closed, say
                    found.flush()
        os._exit(failed[0])


def run_script(command: list[str]) -> None:
    """[-m MODULE | SCRIPT, ARGS…] as ``__main__``, a script with its own folder first on sys.path."""
    import runpy

    from megazero.errors import LaunchError

    if command[0] == "-m":
        if len(command) < 2:
            raise LaunchError("give the module to run after -m")
        sys.argv, sys.path[0] = command[1:], os.getcwd()
        if not _is_there(command[1]):
            raise LaunchError(f"there is no module {command[1]!r}")
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = command, os.path.dirname(os.path.abspath(command[0]))
        runpy.run_path(command[0], run_name="__main__")


def _is_there(module: str) -> bool:
    import importlib.util

    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:  # a package around it
        if error.name is None or not module.startswith(error.name):
            raise
    except ValueError:  # no name at all
        pass
    return False


def _end_with_the_launcher() -> None:
    """Have the kernel kill this process when the launcher dies, however it dies: no orphan writes a checkpoint."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    main()
