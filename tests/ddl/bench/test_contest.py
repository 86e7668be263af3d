"""Turns are taken by fake crews whose times are chosen."""

from collections import Counter
from itertools import pairwise

import pytest

from ddl.bench.contest import STAY, hold, order


class Fake:
    """Takes `seconds` for a collective of any size, and `slow` times as long in its first `disturbed` answers; keeps
    what it was asked."""

    def __init__(
        self, name: str, seconds: float, wrong: bool = False, slow: float = 1, disturbed: int = 0, family: str = ""
    ) -> None:
        self.name, self.family = name, family
        self.seconds, self.wrong, self.slow, self.disturbed = seconds, wrong, slow, disturbed
        self.asked: list[tuple[str, int, int]] = []

    def check(self, size: int) -> float:
        if self.wrong:
            raise ValueError("wrong sum")
        self.asked.append(("check", size, 1))
        return self._seconds()

    def time(self, size: int, repeats: int) -> float:
        self.asked.append(("time", size, repeats))
        return self._seconds()

    def _seconds(self) -> float:
        return self.seconds * (self.slow if len(self.asked) <= self.disturbed else 1)


def test_a_turn_is_as_long_as_asked() -> None:
    fast, slow = Fake("fast", 1e-6), Fake("slow", 2.0)
    turns = hold([fast, slow], [1024], rounds=3, seconds=0.5)
    assert {one.name: one.repeats for one in turns} == {"fast": 525_000, "slow": 1}
    assert all(one.seconds == {0: one.median, 1: one.median, 2: one.median} for one in turns)
    assert slow.asked == [("check", 1024, 1)] + [("time", 1024, 1)] * 4  # one trial more, and three rounds


def test_trials_that_were_disturbed_do_not_shorten_the_turns() -> None:
    late = Fake("late", 1e-5, slow=1000, disturbed=4)
    (turns,) = hold([late], [1024], rounds=3, seconds=0.5)
    assert turns.repeats * 1e-5 >= 0.5


def test_only_the_best_of_a_family_stay() -> None:
    variants = [Fake(f"x{at}", 0.1 * at, family="x") for at in (5, 1, 4, 2, 3)]
    turns = hold([Fake("us", 1.0), *variants], [4096], rounds=1, seconds=0.01)
    assert [one.name for one in turns] == ["us", "x1", "x2"]
    assert len(turns) == 1 + STAY


def test_turns_go_round_so_that_nobody_is_always_first_or_after_the_same_other() -> None:
    heard: list[str] = []
    hold(
        [Fake(name, 1.0) for name in "abcd"],
        [4],
        rounds=4,
        seconds=0.1,
        tell=lambda text: heard.append(text.partition(",")[0]),
    )
    rounds = ["".join(heard[at : at + 4]) for at in range(8, 24, 4)]  # after two trials of each
    assert rounds == ["abdc", "bcad", "cdba", "dacb"]


@pytest.mark.parametrize("count", range(2, 11))
def test_each_comes_right_after_each_other_equally_often(count: int) -> None:
    orders = [order(count, at) for at in range(2 * count)]
    assert all(sorted(one) == list(range(count)) for one in orders)
    pairs = Counter(pair for one in orders for pair in pairwise(one))
    assert len(pairs) == count * (count - 1)
    assert set(pairs.values()) == {2}
    assert set(Counter(one[0] for one in orders).values()) == {2}


def test_a_wrong_sum_is_never_timed() -> None:
    wrong = Fake("wrong", 1.0, wrong=True)
    with pytest.raises(ValueError, match="wrong sum"):
        hold([wrong], [4], rounds=1, seconds=0.1)
    assert wrong.asked == []


class Broken(Fake):
    """Breaks down in its third turn."""

    def time(self, size: int, repeats: int) -> float:
        if len(self.asked) == 3:
            raise RuntimeError("a rank ended")
        return super().time(size, repeats)


def test_a_peer_that_breaks_down_is_left_out_and_keeps_its_turns() -> None:
    dropped: list[str] = []

    def drop(crew: Fake, size: int, error: RuntimeError) -> bool:
        dropped.append(f"{crew.name}, {size}: {error}")
        return True

    turns = hold([Fake("us", 1.0), Broken("them", 1.0)], [4, 16], 2, 0.1, drop=drop)
    assert dropped == ["them, 4: a rank ended"]
    assert [(one.name, one.size, sorted(one.seconds)) for one in turns] == [
        ("us", 4, [0, 1]),
        ("them", 4, [0]),
        ("us", 16, [0, 1]),
    ]


def test_what_was_measured_stays_when_the_contest_ends_early() -> None:
    entries = [Broken("us", 1.0), Fake("them", 1.0)]
    turns = hold(entries, [4, 16], 2, 0.1, drop=lambda entry, size, error: False)
    assert [(one.name, one.size, sorted(one.seconds)) for one in turns] == [("us", 4, [0]), ("them", 4, [0, 1])]


def test_who_never_gets_beyond_the_trial_ends_it_too() -> None:
    class Dead(Fake):
        def check(self, size: int) -> float:
            raise RuntimeError("gone")

    entries = [Fake("them", 1.0), Dead("us", 1.0), Fake("others", 1.0)]
    assert hold(entries, [4, 16], 2, 0.1, drop=lambda entry, size, error: False) == []


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two crews of one name"):
        hold([Fake("a", 1.0), Fake("a", 2.0)], [4], rounds=1, seconds=0.1)
