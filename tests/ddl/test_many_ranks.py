"""Jobs of many processes over TCP, by the C program of that name: sums, deaths and a shrink, and what they cost."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from ddl import library

HERE = Path(__file__).parent


@pytest.mark.parametrize("ranks", [24, pytest.param(256, marks=pytest.mark.slow)])
def test_many_ranks_need_few_connections_and_one_store_operation_each(ranks: int, tmp_path: Path) -> None:
    built = library.find().resolve()
    for name in ("libddl.so", "libddl.so.0"):
        (tmp_path / name).symlink_to(built)
    program = tmp_path / "many_ranks"
    flags = [f"-I{HERE.parents[1] / 'ddl/include'}", f"-L{tmp_path}", f"-Wl,-rpath,{tmp_path}", "-lddl"]
    subprocess.run(["cc", HERE / "programs/many_ranks.c", "-o", program, *flags], check=True, timeout=60)
    done = subprocess.run([program, str(ranks), "3"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["sets"], found["gets"]) == (1, ranks - 1)
    assert (found["right"], found["failed"]) == (ranks - 3, 0)
    assert found["met"]["connections"] < ranks * 2 * ranks.bit_length()
