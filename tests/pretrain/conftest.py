"""What all tests of the training script start from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.engine import tiny

GPT2 = tiny.ROOT / "tests" / "fixtures" / "oracle" / "gpt2-tied" / "hf_init"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def place(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with data, a finished run of one step in run/, and a Hugging Face model in hf/: to be copied."""
    directory = tmp_path_factory.mktemp("place")
    shutil.copytree(corpus, directory, dirs_exist_ok=True)
    shutil.copytree(GPT2, directory / "hf")
    tiny.run_script(tiny.tiny(directory, {"train.steps": 1, "checkpoint.dir": directory / "run"}))
    return directory
