"""How calls begin, and what ends the negotiations, in rounds of one rank, which waits for no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import pytest

from ddl.errors import ArgumentError, RankTimeoutError, StateError
from ddl.frontends.core import negotiation
from ddl.frontends.core.announcements import Announcement, Batch, encode
from ddl.frontends.core.negotiation import Begun, Negotiator


class Late(Exception):
    """Raised by a signal handler."""


class SoleRounds:
    """Rounds of a single rank; `interruption` is raised after the next one, as by a handler of signals."""

    rank = 0
    count = 0
    interruption: BaseException | None = None

    def take_part(self, mine: Batch) -> tuple[list[Batch], Batch]:
        self.count += 1
        interruption, self.interruption = self.interruption, None
        if interruption is not None:
            raise interruption
        return [mine], ()

    busy = False  # a request of theirs is in flight
    freed = 0

    def free(self) -> bool:
        self.freed += not self.busy
        return not self.busy


@pytest.fixture
def rounds() -> SoleRounds:
    return SoleRounds()


@pytest.fixture
def negotiator(rounds: SoleRounds) -> Negotiator:
    return Negotiator([3], rounds, lambda _: pytest.fail("no rank has joined"), lambda: True)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), Late("enough")])
def test_a_round_that_is_interrupted_ends_all_calls(
    negotiator: Negotiator, rounds: SoleRounds, interruption: BaseException
) -> None:
    rounds.interruption = interruption
    first, second = (negotiator.announce("allreduce", name, lambda *_: None) for name in ("a", "b"))
    with pytest.raises(type(interruption)):
        first.wait()
    for call in (first, second):
        with pytest.raises(StateError, match=f"interrupted in a round of rank 3: {type(interruption).__name__}"):
            call.wait()
    with pytest.raises(StateError, match="interrupted in a round"):
        negotiator.announce("allreduce", "c", lambda *_: None)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), Late("enough"), MemoryError()])
def test_a_call_that_one_rank_could_not_begin_is_the_last(negotiator: Negotiator, interruption: BaseException) -> None:
    def start(_: Mapping[int, Announcement], __: bool) -> Begun:
        raise interruption

    first, second = (negotiator.announce("allreduce", name, start) for name in ("a", "b"))
    with pytest.raises(type(interruption)):
        first.wait()
    with pytest.raises(StateError, match=type(interruption).__name__):
        second.wait()
    with pytest.raises(StateError, match=type(interruption).__name__):
        negotiator.announce("allreduce", "c", start)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_rank_that_is_stopped_in_a_round_is_known_to_have_left_when_the_round_is_over(
    negotiator: Negotiator, rounds: SoleRounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    others_come = threading.Event()

    def take_part(mine: Batch) -> tuple[list[Batch], Batch]:
        rounds.busy = True
        assert others_come.wait(20)
        rounds.busy = False
        return [mine], ()

    monkeypatch.setattr(rounds, "take_part", take_part)
    negotiator.announce("allreduce", "a", lambda *_: None).in_background()
    until(lambda: rounds.busy)
    negotiator.end()
    assert rounds.freed == 0
    others_come.set()
    until(lambda: rounds.freed > 0)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), ArgumentError("it is too large")])
def test_an_error_of_this_rank_alone_tells_the_others_that_it_has_left(
    rounds: SoleRounds, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(negotiation.job, "is_initialized", lambda: True)
    answers = iter([False, False, True])  # what the calls go through is in use for a while
    left = []

    def leave() -> bool:
        left.append(next(answers))
        return left[-1]

    def start(_: Mapping[int, Announcement], __: bool) -> Begun:
        raise error

    negotiator = Negotiator([3], rounds, lambda _: pytest.fail("no rank has joined"), leave)
    with pytest.raises(type(error)):
        negotiator.announce("allreduce", "a", start).wait()
    until(lambda: len(left) == 3)
    assert rounds.freed > 0
    negotiator.end()


def test_an_error_that_all_ranks_find_is_reported_by_each_in_its_own_words(
    negotiator: Negotiator, rounds: SoleRounds
) -> None:
    rounds.interruption = RankTimeoutError("rank 5 has made no call")
    with pytest.raises(RankTimeoutError):
        negotiator.announce("allreduce", "a", lambda *_: None).wait()
    time.sleep(0.05)
    assert rounds.freed == 0  # else others could be told that this rank is the one that left


def test_no_call_begins_after_the_end(negotiator: Negotiator) -> None:
    begun = []
    call = negotiator.announce("allreduce", "a", lambda *_: begun.append("a"))
    negotiator.end()
    with pytest.raises(StateError, match="the process set was removed, or shutdown"):
        call.wait()
    assert not begun


class Begin:
    """Starts calls: keeps their names, and whether each may block."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, bool]] = []

    def __call__(self, announced: Mapping[int, Announcement], may_block: bool) -> Begun | None:
        self.begun.append((announced[0].key, may_block))
        return None


def test_all_calls_that_were_announced_begin_in_one_round(negotiator: Negotiator, rounds: SoleRounds) -> None:
    start = Begin()
    calls = [negotiator.announce("allreduce", name, start) for name in "bca"]
    for call in calls:
        call.wait()
    assert [key for key, _ in start.begun] == ["allreduce 'b'", "allreduce 'c'", "allreduce 'a'"]
    assert rounds.count == 1


def test_a_call_that_is_waited_for_blocks_only_if_no_other_begins_after_it(negotiator: Negotiator) -> None:
    start = Begin()
    first, last = (negotiator.announce("allreduce", name, start) for name in "ab")
    first.wait()
    last.wait()
    negotiator.announce("allreduce", "c", start).wait()
    assert [may_block for _, may_block in start.begun] == [False, False, True]


def test_a_round_has_a_bounded_number_of_calls(
    negotiator: Negotiator, rounds: SoleRounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(negotiation, "_MOST", 4)
    calls = [negotiator.announce("allreduce", None, lambda *_: None) for _ in range(9)]
    calls[-1].wait()
    assert rounds.count == 3


def test_a_round_has_a_bounded_number_of_bytes_of_each_rank(
    negotiator: Negotiator, rounds: SoleRounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def take_part(mine: Batch) -> tuple[list[Batch], Batch]:
        sizes.append(len(encode(mine)))
        return [mine], ()

    monkeypatch.setattr(rounds, "take_part", take_part)
    names = [f"layer {number}" + "é" * 1000 for number in range(30)]
    calls = [negotiator.announce("allreduce", name, lambda *_: None, (("float32", (4, 4)),)) for name in names]
    for call in calls:
        call.wait()
    assert max(sizes) <= 64 << 10
    assert len(sizes) == 3
    negotiator.announce("allreduce", "é" * 20_000, lambda *_: None).wait()  # one that is larger goes alone


def test_a_join_is_said_after_the_calls_before_it(negotiator: Negotiator, rounds: SoleRounds) -> None:
    call = negotiator.announce("allreduce", "a", lambda *_: None)
    negotiator.join().wait()
    call.wait()
    assert negotiator.joined() == 0
    assert rounds.count == 2


def test_calls_that_are_put_off_are_announced_before_later_ones(
    negotiator: Negotiator, rounds: SoleRounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "take_part", lambda mine: ([mine[:2]], mine[2:]))
    start = Begin()
    early = [negotiator.announce("allreduce", name, start) for name in "abcd"]
    early[0].wait()
    negotiator.announce("allreduce", "e", start).wait()
    assert [key[-2] for key, _ in start.begun] == list("abcde")
