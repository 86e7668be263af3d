"""`dist.shrink_group` over the backend ddl."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("how", ["told", "asks"])
def test_the_survivors_are_the_default_group(tcp_ranks: Run, how: str) -> None:
    done = tcp_ranks(3, "torch_shrink.py", how, timeout=90)
    assert sorted(line for line in done.stdout.splitlines() if "right" in line) == ["0: right", "2: right"], done.stdout


def test_to_exclude_another_than_died_is_an_error_that_names_who_died(tcp_ranks: Run) -> None:
    done = tcp_ranks(3, "torch_shrink.py", "wrong", timeout=90)
    assert done.stdout.count("but those that are gone are [1]") == 2, done.stdout
