"""`ddl.shrink`: the survivors of a death go on, and every sum is right."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples/numpy_average/survivors.py"
Run = Callable[..., subprocess.CompletedProcess[str]]


def slow(*values: tuple[object, ...]) -> list[object]:
    return [pytest.param(*value, marks=pytest.mark.slow) for value in values]


def ends(output: str) -> list[str]:
    """What the ranks that came to the end say."""
    return sorted(re.findall(r"\d+: right to the end, with .*", output))


@pytest.mark.parametrize(
    ("shared_memory", "victim"), [("1", 0), ("1", 1), ("1", 3), ("0", 0), *slow(("0", 1), ("0", 3))]
)
def test_whoever_dies_the_others_go_on_with_right_sums(tcp_ranks: Run, victim: int, shared_memory: str) -> None:
    options = f"-shared_memory {shared_memory}"
    done = tcp_ranks(4, "shrink.py", f"7:{victim}", timeout=60, DDL_OPTIONS=options)
    left = [rank for rank in range(4) if rank != victim]
    assert ends(done.stdout) == [f"{rank}: right to the end, with {left}" for rank in left], done.stdout


def test_ranks_may_die_one_after_the_other_until_one_is_left(tcp_ranks: Run) -> None:
    done = tcp_ranks(4, "shrink.py", "3:0", "5:2", "5:3", timeout=60)
    assert ends(done.stdout) == ["1: right to the end, with [1]"], done.stdout


@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_the_last_rank_goes_on_alone_though_all_others_died_at_once(
    tcp_ranks: Run, tmp_path: Path, shared_memory: str
) -> None:
    done = tcp_ranks(8, "last_rank.py", str(tmp_path), timeout=120, DDL_OPTIONS=f"-shared_memory {shared_memory}")
    assert "rank 0 goes on alone" in done.stdout, done.stdout


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0.005, 0.01), *slow((0.001, 0.002), (0.02, 0.03))])
def test_ranks_may_die_while_the_others_shrink(tcp_ranks: Run, first: float, second: float) -> None:
    done = tcp_ranks(6, "shrink.py", "4:2", f"{first}+0", f"{second}+3", timeout=60)
    assert ends(done.stdout) == [f"{rank}: right to the end, with [1, 4, 5]" for rank in (1, 4, 5)], done.stdout


def test_the_example_trains_what_one_rank_trains_though_ranks_die(tcp_ranks: Run) -> None:
    done = tcp_ranks(4, str(EXAMPLE), "--die", "50:0", "--die", "120:2", timeout=60)
    (apart,) = re.findall(r"2 ranks are left: .*\non one rank the same, at most (\S+) apart", done.stdout)
    assert float(apart) < 1e-12, done.stdout


def test_under_mpi_it_says_how_to_start_and_nothing_has_changed(ranks: Run) -> None:
    done = ranks(2, "shrink_mpi.py", timeout=60)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("UnsupportedError: ddl_shrink: MPI connects this job") == 2, done.stdout
    assert done.stdout.count("still 2.0") == 2, done.stdout
