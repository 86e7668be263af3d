"""What ends the negotiations of a set of ranks; rounds of one rank, which has nobody to wait for."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from ddl import request
from ddl.errors import StateError
from ddl.horovod.announcements import Announcement
from ddl.horovod.negotiation import Begun, Negotiator


class Late(Exception):
    """What a handler of signals raises."""


class Round:
    """Rounds of a single rank; `interruption` is raised after the next one, as by a handler of signals."""

    interruption: BaseException | None = None

    def __call__(self, _: str, *__: object, buffers: tuple[list[int], list[int]]) -> None:
        sent, greatest = buffers
        greatest[:] = sent
        interruption, self.interruption = self.interruption, None
        if interruption is not None:
            raise interruption


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Round:
    made = Round()
    monkeypatch.setattr(request, "run", made)
    return made


@pytest.fixture
def negotiator(rounds: Round) -> Negotiator:
    comm = SimpleNamespace(rank=0, size=1, handle=None, free=lambda: None)
    return Negotiator([3], comm, comm, lambda _: pytest.fail("nobody has joined"))


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), Late("enough")])
def test_a_round_that_is_interrupted_ends_all_calls(
    negotiator: Negotiator, rounds: Round, interruption: BaseException
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


def test_no_call_begins_after_the_end(negotiator: Negotiator) -> None:
    begun = []
    call = negotiator.announce("allreduce", "a", lambda *_: begun.append("a"))
    negotiator.end()
    with pytest.raises(StateError, match="the process set was removed, or shutdown"):
        call.wait()
    assert not begun
