"""What a rank's collectives have come to, from the engine to the page of its host, and the advice about late ranks."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import ddl
from ddl.advice import LEAST_CALLS, advice
from ddl.errors import StateError
from ddl.figures import Stats
from ddl.launch import environment, options
from ddl.launch.errors import UsageError

Run = Callable[..., subprocess.CompletedProcess[str]]

LATE = Stats(calls=120, bytes=10**9, timed=100, seconds=50.0, least_seconds=None, waited={3: 20.0}, late={3: 90})


def test_the_rank_behind_a_late_one_names_it_and_the_page_has_every_rank(
    tcp_ranks: Run, tmp_path: Path, free_port: int
) -> None:
    port = str(free_port)
    variables = {"DDL_METRICS_PORT": port, "DDL_TENSORBOARD": str(tmp_path)}
    done = tcp_ranks(3, "late.py", "1", port, **variables)
    assert done.returncode == 0, done.stdout
    nbytes = 10 * (256 << 10) + 4
    seen = dict(re.findall(r"^rank (\d): (11 .*)$", done.stdout, re.M))
    # One ring: each rank hears first from the one before it. Only the rank behind the late one waits for that.
    found = re.fullmatch(rf"11 {nbytes} 10 None late \{{.*\b1: (\d+)\}}", seen["2"])
    assert found, done.stdout
    assert int(found[1]) > 5  # on a busy machine the rest of a call may take longer than the wait
    for rank in ("0", "1"):
        assert not re.search(r"\b1: ", seen[rank]), done.stdout
    assert done.stdout.count("True True") == 3
    for rank in range(3):
        assert re.search(rf'^ddl_collectives_total\{{host=".*",rank="{rank}"\}} 11.0$', done.stdout, re.M), done.stdout
    assert re.search(r'^ddl_late_collectives_total\{.*peer="1",rank="2"\} \d+.0$', done.stdout, re.M), done.stdout
    assert sorted(one.name for one in tmp_path.iterdir()) == ["rank0", "rank1", "rank2"]


def test_a_taken_port_ends_no_job(tcp_ranks: Run) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        done = tcp_ranks(2, "init.py", DDL_METRICS_PORT=port)
    assert done.returncode == 0, done.stdout
    assert f"--metrics-port={port} at 127.0.0.1" in done.stdout


def test_before_init_there_are_no_figures() -> None:
    with pytest.raises(StateError):
        ddl.stats()
    with pytest.raises(StateError):
        ddl.watch(metrics_port=9118)


def test_a_rank_that_is_late_again_and_again_is_named_with_how_often_and_how_long() -> None:
    (one,) = advice(LATE, 100.0)
    assert (one.rule, one.figure) == ("late", pytest.approx(0.2))
    for part in ("rank 3 was late at 90 of 100 calls", "20 s of 1 min 40 s"):
        assert part in one.text


@pytest.mark.parametrize(
    "stats",
    [
        Stats(120, 10**9, 100, 50.0, None, {3: 20.0}, {3: LEAST_CALLS - 1}),  # a few long pauses
        Stats(120, 10**9, 100, 50.0, None, {3: 2.0}, {3: 90}),  # not long
        Stats(120, 10**9, LEAST_CALLS - 1, 50.0, None, {3: 20.0}, {3: LEAST_CALLS - 1}),  # too few calls to say
        Stats(0, 0, 0, 0.0, None, {}, {}),
    ],
)
def test_what_is_seldom_short_or_too_little_to_say_is_no_reason(stats: Stats) -> None:
    assert advice(stats, 100.0) == []


def test_of_several_calls_in_a_step_a_late_rank_is_late_at_the_first_and_is_named_all_the_same() -> None:
    (one,) = advice(Stats(5000, 10**10, 5000, 50.0, None, {3: 20.0}, {3: 100}), 100.0)
    assert "rank 3 was late at 100 of 5000 calls" in one.text


def test_a_short_run_gets_none() -> None:
    assert advice(LATE, 1.0) == []


def test_the_share_of_the_bound_is_known_if_the_links_were_measured() -> None:
    assert LATE.bound is None
    assert Stats(1, 1, 1, 50.0, 10.0, {}, {}).bound == pytest.approx(0.2)


def test_ddlruns_options_reach_the_ranks_and_their_sessions_of_lms() -> None:
    asked = options.parse(["--tensorboard", "runs/a", "--metrics-port", "9118", "--metrics-address", "::", "train.py"])
    assert asked is not None
    expected = {"TENSORBOARD": "runs/a", "METRICS_PORT": "9118", "METRICS_ADDRESS": "::"}
    assert environment.figures(asked) == {
        f"{part}_{name}": value for part in ("DDL", "LMS") for name, value in expected.items()
    }
    plain = options.parse(["train.py"])
    assert plain is not None
    assert environment.figures(plain) == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--metrics-port", "0"], "--metrics-port"),
        (["--metrics-port", "65536"], "at most 65,535"),
        (["--metrics-address", "here"], "expected an IP address"),
        (["--tensorboard", ""], "the value is empty"),
    ],
)
def test_a_wrong_option_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        options.parse([*words, "train.py"])
