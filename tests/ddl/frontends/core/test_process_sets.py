"""Ranks and hosts, by Horovod's names, on hosts with different numbers of ranks."""

from __future__ import annotations

import pytest

import ddl
from ddl.frontends.core.process_sets import Group, ProcessSet, ProcessSets


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
    sets: ProcessSets[ProcessSet[Group]] = ProcessSets(ProcessSet, pytest.fail, pytest.fail)
    monkeypatch.setattr(sets, "_local_ranks", local_ranks)
    for rank, place in enumerate(expected):
        monkeypatch.setattr(sets, "rank", lambda rank=rank: rank)
        monkeypatch.setattr(ddl, "local_rank", lambda its=local_ranks[rank]: its, raising=False)
        assert (sets.cross_rank(), sets.cross_size()) == place
        assert sets.is_homogeneous() == even


def test_a_set_that_is_not_in_use_says_what_puts_it_to_use() -> None:
    sets: ProcessSets[ProcessSet[Group]] = ProcessSets(ProcessSet, pytest.fail, pytest.fail)
    with pytest.raises(ddl.StateError, match=r"ProcessSet\(\[\]\) is not in use: call init\(\) first"):
        sets.rank()
    with pytest.raises(ddl.StateError, match=r"ProcessSet\(\[0, 2\]\) is not in use: call add_process_set first"):
        ProcessSet([2, 0]).size()
