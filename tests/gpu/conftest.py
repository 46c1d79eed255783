"""Tests marked ``gpu(count)`` run where there are that many CUDA devices, or one that NCCL is told to share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megazero.launch.devices import shares_gpus
from tests.engine import tiny


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    devices = torch.cuda.device_count()
    for item in items:
        marker = item.get_closest_marker("gpu")
        shares = devices and shares_gpus() and not item.get_closest_marker("own_gpus")
        if marker is not None and devices < marker.args[0] and not shares:
            item.add_marker(pytest.mark.skip(f"needs {marker.args[0]} CUDA devices, there are {devices}"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_corpus(tmp_path_factory.mktemp("corpus"))
