"""10,000 steps of random shapes: nothing that the process holds grows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("random_shapes.py")
STEPS = 10_000
SLACK = {
    "resident": 8 << 20,
    "files": 0,
    "threads": 0,
    "objects": 5000,
    "file": 1 << 20,
}  # more than in the third quarter


def held(swap: str) -> list[dict[str, Any]]:
    """What a process of its own holds, in the order of its steps."""
    command = [sys.executable, PROGRAM, str(STEPS), "1", swap]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1100, check=False)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("swap", ["activations", "activations,optimizer"])
def test_random_shapes_grow_nothing(swap: str) -> None:
    lines = held(swap)
    assert lines[-1]["step"] == STEPS
    assert lines[-1]["swapped"]
    third, last = lines[len(lines) // 2 : 3 * len(lines) // 4], lines[3 * len(lines) // 4 :]
    most = {name: (max(line[name] for line in third), max(line[name] for line in last)) for name in SLACK}
    print(f"\n{swap}: most in the third and in the last quarter: {most}")
    assert all(after <= before + SLACK[name] for name, (before, after) in most.items()), most
