"""docs/from-deepspeed.md shows the table of keys, row by row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.ds_config.rows import key_tables

PAGE = (Path(__file__).resolve().parents[2] / "docs/from-deepspeed.md").read_text()


@pytest.mark.parametrize("title", key_tables())
def test_rows_are_the_table_s(title):
    section = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert section, f"no section {title}"
    rows = [line for line in section[1].splitlines() if line.startswith("|")][2:]
    assert rows == key_tables()[title]
