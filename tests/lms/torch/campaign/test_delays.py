"""Random graphs over a file tier with random delays in both directions: plain's bits, and nothing hangs.

LMS_FUZZ_SEED repeats one: `LMS_FUZZ_SEED=5017 pytest tests/lms/torch/campaign/test_delays.py -m "" -s`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable

import pytest
from torch import Tensor

from graph_runs import check, seeds_of
from random_graphs import quietly
from slow_disk import slow_disk

BATCH = 100


def compare(seeds: Iterable[int], bits: Callable[[Tensor], object]) -> None:
    gc.collect()
    gc.freeze()
    with quietly():
        for seed in seeds_of(seeds):
            check(seed, bits, delays=slow_disk(seed))


def test_random_schedules_with_delays_compute_what_plain_does(bits: Callable[[Tensor], object]) -> None:
    compare(range(20), bits)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(5000, 6000, BATCH))
def test_a_thousand_random_schedules_do(first: int, bits: Callable[[Tensor], object]) -> None:
    compare(range(first, first + BATCH), bits)
