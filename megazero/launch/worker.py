"""What the launcher starts in every process: the user's script, as Python itself would run it.

Run by path (``python worker.py SCRIPT ARGS…``), so that a folder called megazero in the working directory cannot
be taken for the package.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys

_TEARDOWN_LIMIT = 15
"""Seconds a failed process may take to end. Its siblings live until it has, and a collective's teardown may hang."""


def main() -> None:
    """Run SCRIPT as ``__main__`` with its own folder first on sys.path, its errors reported once per job."""
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import runpy

    from megazero.launch.errors import report_errors

    _end_with_the_launcher()
    faulthandler.enable()
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        with report_errors():
            runpy.run_path(script, run_name="__main__")
    except SystemExit as ending:
        if ending.code not in (None, 0):
            faulthandler.dump_traceback_later(_TEARDOWN_LIMIT, exit=True)
        raise


def _end_with_the_launcher() -> None:
    """Have the kernel kill this process when the launcher dies, however it dies: no orphan writes a checkpoint."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    main()
