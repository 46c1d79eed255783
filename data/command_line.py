"""What every script of this room does the same way: a user's mistake is one line on stderr and exit code 2."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from megazero.errors import MegazeroError, explained


def run_script(main: Callable[[], None]) -> None:
    """Run ``main`` and exit: 0 when it returns, 2 with one line for a user's mistake, 130 when interrupted.

    A SIGTERM unwinds the stack like Ctrl-C, so that half-written files are removed; it exits with 143.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        main()
        sys.stdout.flush()
    except (MegazeroError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output has gone, e.g. `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        message: object = error
        if isinstance(error, OSError):  # of a file that was read or written; that of a full disk has no name
            message = f"{error.filename}: {error.strerror}" if error.filename else explained(error)
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
