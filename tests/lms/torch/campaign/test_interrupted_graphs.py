"""Ctrl-C at random moments of random graphs: a graph that runs again has plain's bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("interrupted_graphs.py")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_graph_that_was_interrupted_has_plains_bits_the_next_time() -> None:
    command = [sys.executable, PROGRAM, "200", "9000"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1100, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    print(f"\n{found}")
    assert found["interrupts"] == 600
    assert found["wrong"] == []
    assert found["lost"] <= 6  # 1 was, and we do not know why: a destructor that drops it would explain it
