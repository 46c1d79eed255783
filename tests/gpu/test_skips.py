"""Only tests that need a GPU may be skipped: those of needs_gpu.txt, which are those marked so. Runs last."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu import test_gpu

LISTED = set(Path(__file__).with_name("needs_gpu.txt").read_text().split())


def test_the_list_holds_exactly_the_tests_marked_so(request: pytest.FixtureRequest) -> None:
    assert {f"tests/gpu/test_gpu.py::{name}" for name in vars(test_gpu) if name.startswith("test_")} == LISTED
    marked = {item.nodeid.partition("[")[0] for item in request.session.items if item.get_closest_marker("gpu")}
    assert marked <= LISTED


def test_nothing_else_was_skipped(request: pytest.FixtureRequest) -> None:
    """On a machine without a GPU, that is; one with a GPU may lack packages."""
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    skipped = {report.nodeid.partition("[")[0] for report in reporter.stats.get("skipped", [])}
    assert torch.cuda.is_available() or skipped <= LISTED, skipped - LISTED
