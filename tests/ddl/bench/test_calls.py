"""The cost of a call: a small run of the whole benchmark."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "ddl" / "bench" / "calls.py"


def test_all_ways_are_timed_in_one_job(ranks: Callable[..., object], tmp_path: Path) -> None:
    file = tmp_path / "calls.json"
    done = ranks(2, PROGRAM, "--rounds", "2", "--calls", "3", "--json", str(file), timeout=110)
    assert done.returncode == 0, done.stdout
    assert "median microseconds a call" in done.stdout
    seconds = json.loads(file.read_text())["seconds"]
    assert {"libddl", "ddl.allreduce", "Python", "Python at once", "gloo"} <= seconds.keys()
    assert all(len(taken) == 2 and min(taken) > 0 for taken in seconds.values())
    if "C++" in seconds:
        assert "Python over C++: " in done.stdout
    else:
        assert "no backend in C++: none was compiled" in done.stdout
