"""How much state stays: against all that could."""

from __future__ import annotations

import random

import pytest

from lms.core.link import Link
from lms.core.state_share import state_that_stays
from lms.errors import LimitError

LINK = Link("", 10.0, 20.0, latency=0.0)  # bytes a second


def test_it_stays_if_the_pass_hides_the_copies_of_what_leaves_instead() -> None:
    assert state_that_stays(1000, LINK, lambda _: 5.0) == 1000


def test_it_leaves_if_the_pass_becomes_longer_by_more_than_its_copies_take() -> None:
    assert state_that_stays(1000, LINK, lambda stay: 5.0 + stay / 9) == 0
    assert state_that_stays(1000, LINK, lambda stay: 5.0 + stay / 11) == 1000


def test_no_more_stays_than_the_pass_has_room_for() -> None:
    def seconds(stay: int) -> float:
        if stay > 600:
            raise LimitError("")
        return 5.0

    assert state_that_stays(1000, LINK, seconds) == 500


def test_without_state_no_pass_is_simulated() -> None:
    assert state_that_stays(0, LINK, lambda stay: 1 / stay) == 0


def test_no_other_share_gives_a_shorter_step() -> None:
    chance = random.Random(8)
    for _ in range(100):
        wanted = chance.randrange(4, 1000)
        passes = {wanted * part // 4: chance.random() * 200 for part in range(5)}
        link = Link("", chance.uniform(5, 20), chance.uniform(5, 20), latency=0.0)
        found = state_that_stays(wanted, link, passes.__getitem__)
        step = {stay: seconds + (wanted - stay) / min(link.out, link.back) for stay, seconds in passes.items()}
        assert step[found] == pytest.approx(min(step.values()))
