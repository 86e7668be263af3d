"""The collectives through Python and libddl, over MPI and over TCP, on several ranks of this host."""

import subprocess
from collections.abc import Callable

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
BOTH = pytest.mark.parametrize("ranks", ["mpi", "tcp"], indirect=True)


def right(done: subprocess.CompletedProcess[str], *lines: str) -> None:
    assert done.returncode == 0, done.stdout
    for line in lines:
        assert line in done.stdout


@pytest.mark.parametrize(
    ("ranks", "size"),
    [
        *(("mpi", size) for size in (1, 2, 3, 4, 8)),
        ("tcp", 4),
        pytest.param("mpi", 6, marks=pytest.mark.slow),  # the C++ tests reduce over each number from 1 to 8
        *(pytest.param("tcp", size, marks=pytest.mark.slow) for size in (1, 2, 3, 6, 8)),
    ],
    indirect=["ranks"],
)
def test_every_collective_is_right_and_has_the_same_bits_on_every_rank(ranks: Run, size: int) -> None:
    right(ranks(size, "sweep.py", str(size)), "-mode p: right", f"-mode r:{size}: right")


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("size", [5, 7])
def test_so_it_is_on_odd_numbers_of_ranks(ranks: Run, size: int) -> None:
    right(ranks(size, "sweep.py", str(size)), "-mode p: right")


@BOTH
@pytest.mark.parametrize("options", ["", "-mode r:2x2"])
def test_communicators_of_some_ranks_are_right_and_have_the_same_bits_on_each(ranks: Run, options: str) -> None:
    parts = ["all", "hosts", "a rank of each host", "halves", "odd and even", "all but one"]
    right(ranks(4, "parts.py", DDL_OPTIONS=options), *(f"{part}: right" for part in parts))


@BOTH
@pytest.mark.parametrize("calls", ["arguments", "requests", "communicators", "failures", "finalizing"])
def test_calls_do_what_they_say(ranks: Run, calls: str) -> None:
    right(ranks(3, "calls.py", calls), f"{calls}: right")


def test_torch_tensors_are_reduced_where_they_lie(ranks: Run) -> None:
    right(ranks(2, "calls.py", "tensors"), "tensors: right")
