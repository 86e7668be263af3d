"""Who is where, by Horovod's names, on hosts with different numbers of ranks."""

from __future__ import annotations

import pytest

import ddl
from ddl.horovod.torch import job


@pytest.mark.parametrize(
    ("local_ranks", "expected", "even"),
    [
        ([0, 1, 0, 1], [(0, 2), (0, 2), (1, 2), (1, 2)], True),
        ([0, 1, 2, 0], [(0, 2), (0, 1), (0, 1), (1, 2)], False),  # the second host has one
        ([0, 0, 0], [(0, 3), (1, 3), (2, 3)], True),
    ],
)
def test_a_ranks_place_among_hosts_counts_those_of_its_number_there(
    monkeypatch: pytest.MonkeyPatch, local_ranks: list[int], expected: list[tuple[int, int]], even: bool
) -> None:
    monkeypatch.setattr(job, "_local_ranks", local_ranks)
    for rank, place in enumerate(expected):
        monkeypatch.setattr(job, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(ddl, "local_rank", lambda its=local_ranks[rank]: its, raising=False)
        assert (job.cross_rank(), job.cross_size()) == place
        assert job.is_homogeneous() == even
