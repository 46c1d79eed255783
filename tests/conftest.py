"""What every test may rely on: one thread, and ranks."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests import script_help
from tests.distributed import harness

# Before torch is imported anywhere. Many processes share few cores; and sums are then the same from run to run.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="whole products of choices where a part is the default")


@pytest.fixture
def ranks() -> Callable:
    """`tests.distributed.harness.run`: call a module-level function on several processes."""
    return harness.run


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the processes that tests share with the session."""
    harness.shutdown()
    script_help.shutdown()
