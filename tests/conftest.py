"""What every test may rely on: one thread, and ranks."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import pytest

from tests import forked_scripts
from tests.distributed import harness
from tests.skips import needs_gpu

# Before torch is imported anywhere. Many processes share few cores; and sums are then the same from run to run.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="whole products of choices, and tests that take long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what CI has no time for."""
    if not config.getoption("whole"):
        long = [item for item in items if item.get_closest_marker("whole")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


def pytest_collection_finish() -> None:
    """Let no garbage collection go through all that test modules have imported; every engine begins with one."""
    gc.freeze()


@pytest.fixture
def ranks() -> Callable:
    """`tests.distributed.harness.run`: call a module-level function on several processes."""
    return harness.run


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where a test was skipped that need not be; a machine with a GPU may lack packages."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:  # in the processes that tests are shared out to
        return
    skipped = {report.nodeid.partition("[")[0] for report in reporter.stats.get("skipped", [])}
    if others := skipped - needs_gpu():
        import torch  # which takes seconds in a process that runs no tests, and is rarely asked

        if not torch.cuda.is_available():
            reporter.write_line(f"skipped, and not in tests/gpu/needs_gpu.txt: {', '.join(sorted(others))}", red=True)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the processes that tests share with the session."""
    harness.shutdown()
    forked_scripts.shutdown()
