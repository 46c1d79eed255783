"""One preprocessed corpus for all tests of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine import tiny


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_corpus(tmp_path_factory.mktemp("corpus"))
