"""A few of the cases that fuzz.py goes through for minutes: nothing but clear errors comes out of any reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.fuzz import Fuzz

CASES = {"checkpoint": 8, "resume": 5, "dataset": 40, "config": 20, "ds_config": 30, "hostfile": 40, "hugging_face": 15}


@pytest.mark.parametrize("name", CASES)
def test_nothing_but_clear_errors(name: str, tmp_path: Path) -> None:
    fuzz = Fuzz(name, 1, tmp_path)
    for number in range(CASES[name]):
        outcome = fuzz.case(number)
        assert outcome.kind != "FAULT", (number, outcome.told)
    assert fuzz.outcomes.total() > fuzz.outcomes["accepted"], fuzz.outcomes
    fuzz.close()
