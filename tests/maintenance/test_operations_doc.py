"""The document of operations has every finding, of the core and of casstore's record systems."""

from __future__ import annotations

import re
from pathlib import Path

from casstore.maintenance import salvage
from casstore.maintenance.check import LEVELS
from tests.maintenance.test_check_records import ALL_CODES

TEXT = (Path(__file__).parent.parent.parent / "docs" / "guides" / "operations.md").read_text()


def test_the_table_of_findings_is_that_of_the_code() -> None:
    section = TEXT.split("### Findings")[1].split("## After damage")[0]
    listed = re.findall(r"^\| `(\w+)` \| (\w+) \| (.+?) \| (.+?) \|$", section, re.MULTILINE)
    assert listed == [(code, *meaning) for code, meaning in ALL_CODES.items()]


def test_every_level_and_outcome_is_described() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)
    outcomes = {salvage.WHOLE, salvage.PARTIAL, salvage.LOST, salvage.DELETED, salvage.EXISTS}
    assert set(LEVELS) | outcomes <= set(rows)
