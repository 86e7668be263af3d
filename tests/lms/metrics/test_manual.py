"""The page about metrics names what there is, and nothing else."""

import re
from pathlib import Path

from lms.metrics.families import FAMILIES

MANUAL = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_manual_lists_every_series_with_its_kind_and_help() -> None:
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| ((?:gauge|counter) \| .*) \|$", MANUAL.read_text(), re.M))
    assert set(rows) == {one.series for one in FAMILIES}
    for one in FAMILIES:
        assert rows[one.series].startswith(f"{one.kind} | {one.help}")
