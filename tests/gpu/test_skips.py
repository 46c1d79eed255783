"""Only tests that need a GPU may be skipped: those of needs_gpu.txt, which are those marked so. See ../conftest.py."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.skips import needs_gpu


def marked_tests(file: str) -> set[str]:
    """Names of the tests of a file that are marked, or of all where the file is."""
    module = importlib.import_module(f"tests.gpu.{file}")
    functions = {name: test for name, test in vars(module).items() if name.startswith("test_") and callable(test)}
    marks = {name: [mark.name for mark in getattr(test, "pytestmark", [])] for name, test in functions.items()}
    of_file = getattr(module, "pytestmark", [])
    of_file = [mark.name for mark in (of_file if isinstance(of_file, list) else [of_file])]
    return {name for name in functions if "gpu" in marks[name] + of_file}


def test_the_list_holds_exactly_the_tests_marked_so(request: pytest.FixtureRequest) -> None:
    files = [path.stem for path in Path(__file__).parent.glob("test_*.py")]
    assert {f"tests/gpu/{file}.py::{name}" for file in files for name in marked_tests(file)} == needs_gpu()
    marked = {item.nodeid.partition("[")[0] for item in request.session.items if item.get_closest_marker("gpu")}
    assert marked <= needs_gpu()
