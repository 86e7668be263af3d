"""The page about starts, from figures as the tests leave them."""

from __future__ import annotations

from pathlib import Path

import machine
import pytest
from start import PARTS, main

TOPOLOGIES = [
    {"seed": 7, "racks": [2, 1], "ranks": 2, "found": True, "measuring": 1.0, "joining": 1.25},
    {"seed": 8, "racks": [1, 2], "ranks": 1, "found": True, "measuring": 1.5, "joining": 1.75},
    {"seed": 9, "racks": [3], "ranks": 1, "found": False, "why": "seed 9: two racks were said"},
]
PLANS = [{"size": "4KiB", "processor": 0.5, "seconds": 0.625}]


def test_the_page_has_what_was_found_and_missed_and_where_it_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.keep("topologies", {"seed": 5, "link": 200_000_000, "topologies": TOPOLOGIES}, tmp_path)
    machine.keep("init", {"racks": [4, 4], "ranks": 1, "joining": [1.5, 2, 3], "measuring": [1, 1.25, 2]}, tmp_path)
    machine.keep("plan", {"command": "ddlrun plan x", "ranks": 1024, "plans": PLANS}, tmp_path)
    assert main(["--output", str(tmp_path)]) == 0
    text = (tmp_path / "start.md").read_text()
    assert "The racks of **2 of 3** topologies were found, drawn from the seed 5." in text
    assert "| 3 | 3 | 2 | 1+2, 2+1, 3 | 1.25 s, at most 1.5 s | 1.5 s, at most 1.75 s |" in text
    assert "Missed, seed 9: seed 9: two racks were said" in text
    assert "## ddl_init on 8 hosts in racks of 4+4" in text
    assert "| all of ddl_init | 2 s, at most 3 s |" in text
    assert "## `ddlrun plan` for 1,024 ranks" in text
    assert "| 4KiB | 500 ms | 625 ms |" in text
    assert text.count("load average") == 3
    assert text.count(machine.processor()) == 3


def test_what_no_test_has_measured_yet_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine.keep("init", {}, tmp_path)
    assert main(["--output", str(tmp_path)]) == 1
    assert f"{tmp_path} has no topologies.json, plan.json; run the tests" in capsys.readouterr().err
    assert len(PARTS) == 3
