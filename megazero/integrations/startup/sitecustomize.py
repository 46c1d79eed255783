"""What every Python process under ``megazero launch --as-deepspeed`` does first: let megazero answer to deepspeed.

Python imports one module of this name only, so the one that it would have imported otherwise comes after.
"""

from __future__ import annotations

import os
import sys


def _start() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    root = os.path.dirname(os.path.dirname(os.path.dirname(here)))
    sys.path.insert(0, root)
    try:
        from megazero.integrations import hook

        hook.install()
    finally:
        sys.path.remove(root)
    ours = sys.modules.pop(__name__)
    try:
        import sitecustomize  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != __name__:
            raise
    sys.modules.setdefault(__name__, ours)


_start()
