"""Tensors as libddl takes them."""

from __future__ import annotations

import itertools
import random

import torch

from ddl.torch.tensors import any_overlap, overlap


def test_memory_that_two_lists_share_is_found_as_by_looking_at_each_pair() -> None:
    memory = torch.zeros(24)
    random.seed(5)
    found = []
    for _ in range(2000):
        lists = []
        for _ in range(2):
            starts = [random.randrange(24) for _ in range(random.randrange(4))]
            lists.append([memory[start : start + random.randrange(6)] for start in starts])
        ones, others = lists
        expected = any(overlap(one, other) for one, other in itertools.product(ones, others))
        assert any_overlap(ones, others) == expected
        found.append(expected)
    assert 300 < sum(found) < 1700


def test_neighbours_and_what_one_list_shares_with_itself_are_no_overlap() -> None:
    memory = torch.zeros(12)
    parts = list(memory.split(2))
    assert not any_overlap(parts[::2], parts[1::2])
    assert not any_overlap([memory[:8], memory[2:4], memory[:0]], [memory[8:], memory[8:]])
    assert any_overlap([memory[:8], memory[2:4]], [memory[7:8]])
