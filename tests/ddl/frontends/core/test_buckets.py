"""Which gradients travel together, and in which order."""

from __future__ import annotations

import random

import pytest

from ddl.frontends.core import buckets


def test_the_last_parameters_go_first_and_buckets_are_filled() -> None:
    assert buckets.plan([4, 4, 4, 4, 4], "fffff", limit=8) == [[4, 3], [2, 1], [0]]
    assert buckets.plan([4, 100, 4], "fff", limit=8) == [[2], [1], [0]]
    assert buckets.plan([4, 4], "ff", limit=0) == [[1], [0]]
    assert buckets.plan([], "", limit=8) == []


def test_each_type_has_buckets_of_its_own() -> None:
    assert buckets.plan([4, 4, 4, 4], "fhfh", limit=100) == [[3, 1], [2, 0]]


def test_groups_stay_together_whatever_their_size() -> None:
    assert buckets.plan([9, 9, 9, 9], "ffff", limit=1, groups=[[0, 3]]) == [[2], [1], [3, 0]]
    assert buckets.plan([9, 9, 9], "fhf", limit=100, groups=[[0, 1, 2]]) == [[1], [2, 0]]


def test_every_parameter_is_in_one_bucket() -> None:
    seed = random.randrange(10**6)
    draw = random.Random(seed)
    for _ in range(200):
        count = draw.randrange(30)
        nbytes = [draw.randrange(100) for _ in range(count)]
        kinds = [draw.choice("fh") for _ in range(count)]
        groups = buckets.even_groups(count, draw.randrange(1, 5)) if draw.random() < 0.3 else []
        made = buckets.plan(nbytes, kinds, draw.randrange(200), groups)
        assert sorted(number for bucket in made for number in bucket) == list(range(count)), f"seed {seed}"
        assert all(len({kinds[number] for number in bucket}) == 1 for bucket in made), f"seed {seed}"


def test_even_groups_are_almost_of_one_length() -> None:
    assert buckets.even_groups(7, 3) == [[0, 1], [2, 3], [4, 5, 6]]
    assert buckets.even_groups(2, 3) == [[0], [1]]


def test_the_limit_is_horovods_variable() -> None:
    assert buckets.limit_of({}) == buckets.DEFAULT_BYTES
    assert buckets.limit_of({"HOROVOD_FUSION_THRESHOLD": "1000"}) == 1000
    with pytest.raises(ValueError, match="HOROVOD_FUSION_THRESHOLD is '64 MB'"):
        buckets.limit_of({"HOROVOD_FUSION_THRESHOLD": "64 MB"})
