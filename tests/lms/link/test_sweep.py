"""Which sizes are copied how often: on a clock of paper."""

from __future__ import annotations

import pytest

from lms.link.sweep import LEAST, MOST, QUICK_SIZES, SIZES, sweep

GB = 1 << 30


class Paper:
    """A link that takes `latency` and its bytes over `rate`; `slow` times the first copy of each size."""

    def __init__(self, rate: float, latency: float = 0.0, slow: float = 1.0) -> None:
        self.rate, self.latency, self.slow = rate, latency, slow
        self.copies: list[int] = []

    def __call__(self, nbytes: int) -> float:
        first = nbytes not in self.copies
        self.copies.append(nbytes)
        return (self.latency + nbytes / self.rate) * (self.slow if first else 1.0)


def test_the_sizes_go_from_4_kib_to_1_gib() -> None:
    assert (SIZES[0], SIZES[-1]) == (4096, GB)
    assert QUICK_SIZES[0] == 4096
    assert list(SIZES) == sorted(SIZES)


def test_the_first_copy_of_each_size_warms_up_and_does_not_count() -> None:
    swept = sweep(Paper(1e9, slow=100.0), (4096, 65536), 1.0)
    assert [point.seconds for point in swept] == [4096 / 1e9, 65536 / 1e9]
    assert [point.high for point in swept] == [4096 / 1e9, 65536 / 1e9]


def test_every_size_that_fits_is_copied_often_enough_for_a_median() -> None:
    swept = sweep(Paper(10e9), SIZES, 10.0)
    assert [point.nbytes for point in swept] == list(SIZES)
    assert all(LEAST <= point.count <= MOST for point in swept)


def test_sizes_that_take_too_long_are_left_out() -> None:
    swept = sweep(Paper(0.2e9), SIZES, 10.0)
    assert swept[-1].nbytes == GB // 4


@pytest.mark.parametrize("rate", [1e6, 1e8, 1e9, 1e10, 1e11])
@pytest.mark.parametrize("seconds", [0.1, 1.0, 10.0])
def test_the_time_is_kept(rate: float, seconds: float) -> None:
    paper = Paper(rate, latency=1e-5)
    spent: list[float] = []

    def copy(nbytes: int) -> float:
        spent.append(paper(nbytes))
        return spent[-1]

    swept = sweep(copy, SIZES, seconds)
    # One copy that was tried and did not fit, or the turn that was under way, may come on top.
    assert sum(spent) <= 1.5 * seconds + (2 + LEAST) * 1.4 * ((1 << 20) / rate + 1e-4)
    assert swept


def test_the_smallest_size_is_copied_however_slow_the_link_is() -> None:
    swept = sweep(Paper(10.0), SIZES, 1.0)
    assert [point.nbytes for point in swept] == [4096]
    assert swept[0].count == LEAST


def test_a_megabyte_is_copied_though_time_is_short() -> None:
    swept = sweep(Paper(50e6), SIZES, 0.01)
    assert swept[-1].nbytes == 1 << 20


def test_sizes_take_turns() -> None:
    paper = Paper(1e9)
    sweep(paper, (4096, 65536), 1e-3)
    assert paper.copies[:6] == [4096, 65536] * 3


def test_a_figure_that_takes_longer_than_it_says_is_paid_by_the_clock() -> None:
    now = 0.0

    def copy(nbytes: int) -> float:
        nonlocal now
        now += 0.01  # many copies; the figure is that of one
        return 1e-6

    swept = sweep(copy, (4096, 65536), 1.0, clock=lambda: now)
    assert now <= 1.1
    assert swept[0].seconds == 1e-6


@pytest.mark.parametrize("rate", [5e9, 10e9])
def test_a_small_copy_that_is_repeated_does_not_make_a_larger_one_seem_long(rate: float) -> None:
    repeated = 64 << 20  # bytes of one figure at least, as copies in memory have it
    elapsed = 0.0

    def copy(nbytes: int) -> float:
        nonlocal elapsed
        elapsed += max(nbytes, repeated) / rate
        return nbytes / rate

    needed = sum((1 + LEAST) * max(nbytes, repeated) / rate for nbytes in QUICK_SIZES)
    assert len(sweep(copy, QUICK_SIZES, 1.4 * needed, clock=lambda: elapsed)) == len(QUICK_SIZES)
