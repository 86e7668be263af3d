"""What goes wrong on one rank is said on the others, by name and in time."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable

import pytest

PROGRAM = "torch_faults.py"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("fault", "parts"),
    [
        (
            "another call",
            ["MismatchError", "rank 1 (host ", "called broadcast", "called allreduce", "(float32, sum, 4 elements)"],
        ),
        (
            "raises",
            [
                "ValueError: this rank's own error",
                "rank 0 after ",
                "rank 2 after ",
                "ShutdownError",
                "rank 1 (host ",
                "has finalized without calling it",
            ],
        ),
        (
            "group destroyed",
            ["ShutdownError", "rank 1 (host ", "has freed the communicator without calling it"],
        ),
        (
            "destroyed",
            ["ShutdownError", "rank 1 (host ", "has freed the communicator without calling it"],
        ),
    ],
)
def test_a_rank_that_goes_astray_is_named(ranks: Run, fault: str, parts: list[str]) -> None:
    done = ranks(3, PROGRAM, fault, timeout=110)
    check(done, parts)
    if "destroyed" in fault:  # rank 1 lives on for 8 s
        assert min(seconds_of_rank_0(done)) < 6, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "parts"),
    [
        ("another shape", ["MismatchError", "35 elements", "28 elements"]),
        ("another type", ["MismatchError", "float64", "float32"]),
        ("another model", ["params[0] in this process with sizes [3, 5] appears not to match"]),
        ("dies", ["rank 1 (host ", " died"]),
        ("late", ["RankTimeoutError", "rank 1 (host ", "has not called it"]),
        ("late in a group", ["RankTimeoutError", "rank 1 (host ", "has not called it"]),
        ("silent", ["RankTimeoutError", "rank 1 (host ", "has not sent it"]),
        ("short", ["MismatchError", "receive from rank 1", "it was sent with float32, 3 elements"]),
        (
            "another block",
            ["MismatchError", "gather's receive from rank 1", "4 elements", "it was sent with float32, 3 elements"],
        ),
        (
            "another part",
            ["MismatchError: reduce_scatter of group ", ", which is made of allreduces here: rank ", "2 elements"],
        ),
        ("another root's part", ["MismatchError: reduce of group ", ", which is made of allreduces here: rank "]),
        ("another part of an alltoall", ["MismatchError", "alltoall's receive from rank 1", "(float32, 4 elements)"]),
        ("waited for", ["RankTimeoutError", "recv of group", "was not finished 1 s after it was waited for"]),
    ],
)
def test_so_is_one_in_each_other_way(ranks: Run, fault: str, parts: list[str]) -> None:
    done = ranks(3, PROGRAM, fault, timeout=110)
    check(done, parts)
    assert all(seconds < 12 for seconds in seconds_of_rank_0(done)), done.stdout


def seconds_of_rank_0(done: subprocess.CompletedProcess[str]) -> list[float]:
    return [float(seconds) for seconds in re.findall(r"^rank 0 after ([\d.]+) s", done.stdout, re.MULTILINE)]


def check(done: subprocess.CompletedProcess[str], parts: list[str]) -> None:
    assert done.returncode != 0
    for part in parts:
        assert part in done.stdout, f"{part!r} is not in: {done.stdout}"
