"""Bugs that are put into LMS, one at a time: random graphs find each. To miss one would show that they are too weak."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from seeded_bugs import BUGS

PROGRAM = Path(__file__).with_name("seeded_bugs.py")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", [bug.__name__ for bug in BUGS])
def test_a_bug_is_found(bug: str) -> None:
    run = subprocess.run([sys.executable, PROGRAM, bug], capture_output=True, text=True, timeout=550, check=False)
    print(f"\n{bug}: {run.returncode}: {(run.stdout + run.stderr)[-300:]}")
    assert run.returncode, "no graph showed it"
    found = re.search(r"(AssertionError: LMS_FUZZ_SEED|(Corruption|Spill|Plan)Error: )", run.stdout)
    assert found or run.returncode < 0, run.stdout + run.stderr
