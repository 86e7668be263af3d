"""Joining a job: ranks and hosts, and errors in the options."""

import subprocess
from collections.abc import Callable

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
BOTH = pytest.mark.parametrize("ranks", ["mpi", "tcp"], indirect=True)
BOTH_IN_THE_END = pytest.mark.parametrize("ranks", ["mpi", pytest.param("tcp", marks=pytest.mark.slow)], indirect=True)


@BOTH
def test_ranks_know_their_places_and_leave_without_finalize(ranks: Run) -> None:
    done = ranks(3, "init.py", DDL_OPTIONS="-dbg_level 1")
    assert done.returncode == 0, done.stdout
    assert {"0/3 0/3 1", "1/3 1/3 1", "2/3 2/3 1"} <= set(done.stdout.splitlines())
    assert "ddl: 3 ranks on 1 host, plan r:3: " in done.stdout


@BOTH
def test_a_child_that_a_rank_forks_is_no_rank_and_disturbs_none(ranks: Run) -> None:
    done = ranks(2, "fork.py")
    assert done.returncode == 0, done.stdout
    assert "right" in done.stdout.splitlines()


@BOTH_IN_THE_END
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("-mode r:2x2", "ArgumentError: dimensions 2x2 multiply to 4, but there are 2 ranks"),
        ("-mode x", "ArgumentError: DDL_OPTIONS: unknown mode 'x'"),
        ("-mode c", "ArgumentError: DDL_OPTIONS: mode 'c' (RCS) of the original is not built"),
        ("-mode n", "UnsupportedError: DDL_OPTIONS: modes b and n cannot be used: rank 0"),
    ],
)
def test_options_that_cannot_be_followed_are_errors_on_every_rank(ranks: Run, options: str, message: str) -> None:
    done = ranks(2, "init.py", DDL_OPTIONS=options)
    assert done.returncode == 1
    assert done.stdout.count(message) >= 1, done.stdout


@BOTH
def test_options_that_differ_between_ranks_are_named(ranks: Run) -> None:
    done = ranks(2, "init.py", "-mode r:2", DDL_OPTIONS="-mode p")
    assert done.returncode == 1
    assert "have different options, '-mode p' and '-mode r:2'" in done.stdout


def test_options_of_the_original_that_do_nothing_are_named_once(ranks: Run) -> None:
    done = ranks(2, "init.py", DDL_OPTIONS="-mode r:2 -rebind_iter 3")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("warning: DDL_OPTIONS: ignored, because only PowerAI's DDL used it: -rebind_iter 3") == 1


def test_a_timeout_that_is_no_number_is_an_error(ranks: Run) -> None:
    done = ranks(1, "init.py", DDL_TIMEOUT="soon")
    assert done.returncode == 1
    assert "DDL_TIMEOUT is 'soon', but must be a number of seconds above 0" in done.stdout
