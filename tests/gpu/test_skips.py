"""Only tests that need a GPU may be skipped: those of needs_gpu.txt, which are those marked so. See ../conftest.py."""

from __future__ import annotations

import pytest

from tests.gpu import test_gpu
from tests.skips import needs_gpu


def test_the_list_holds_exactly_the_tests_marked_so(request: pytest.FixtureRequest) -> None:
    listed = needs_gpu()
    assert {f"tests/gpu/test_gpu.py::{name}" for name in vars(test_gpu) if name.startswith("test_")} == listed
    marked = {item.nodeid.partition("[")[0] for item in request.session.items if item.get_closest_marker("gpu")}
    assert marked <= listed
