"""Buffers beyond 2 GiB."""

import subprocess
from collections.abc import Callable

import pytest

NEEDED_GIB = 8  # two ranks with 2 GiB each, what MPI keeps of messages on their way, and room for others


def available_gib() -> float:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_counts_and_messages_beyond_2_gib_are_right(ranks: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    if available_gib() < NEEDED_GIB:
        pytest.skip(f"no {NEEDED_GIB} GiB of memory are free: {available_gib():.1f}")
    done = ranks(2, "large.py", timeout=800)
    assert done.returncode == 0, done.stdout
    assert "large: right" in done.stdout
