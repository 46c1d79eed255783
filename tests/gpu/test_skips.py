"""Only tests that need a GPU may be skipped: those of needs_gpu.txt, which are those marked so. See ../conftest.py."""

from __future__ import annotations

import pytest

from tests.gpu import test_gpu, test_huggingface
from tests.skips import needs_gpu


def test_the_list_holds_exactly_the_tests_marked_so(request: pytest.FixtureRequest) -> None:
    listed = needs_gpu()
    modules = {"test_gpu": test_gpu, "test_huggingface": test_huggingface}
    there = {(file, name) for file, module in modules.items() for name in vars(module) if name.startswith("test_")}
    assert {f"tests/gpu/{file}.py::{name}" for file, name in there - {("test_huggingface", "test_trainer")}} == listed
    marked = {item.nodeid.partition("[")[0] for item in request.session.items if item.get_closest_marker("gpu")}
    assert marked <= listed
