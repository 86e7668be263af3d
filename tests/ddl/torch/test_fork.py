"""Processes that a rank forks: they are no ranks, and disturb none."""

from __future__ import annotations

import subprocess
from collections.abc import Callable


def test_workers_of_data_loaders_and_children_that_call_disturb_no_rank(
    ranks: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = ranks(2, "torch_fork.py", timeout=100)
    assert done.returncode == 0, done.stdout
    for rank in range(2):
        assert f"rank {rank}: right" in done.stdout
