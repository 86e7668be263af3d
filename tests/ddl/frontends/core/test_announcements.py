"""Which calls every rank has announced: the table that all ranks keep alike."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from ddl.errors import MismatchError, RankTimeoutError, UnsupportedError
from ddl.frontends.core.announcements import JOIN, WITHDRAW, Announcement, Batch, Outcome, Table, decode, digest, encode


def reduction(name: str, count: int = 3, dtype: str = "float32", terms: str = "Sum") -> Announcement:
    return Announcement("allreduce", f"allreduce {name!r}", ((dtype, (count,)),), terms)


def take(table: Table, said: Sequence[Announcement | None]) -> list[Outcome]:
    """A round in which each rank says one thing, or nothing."""
    return table.take([() if its is None else (its,) for its in said])


def joined(calls: int) -> Announcement:
    return Announcement(JOIN, JOIN, per_rank=(calls,))


def test_what_every_rank_says_at_once_may_begin_at_once() -> None:
    table = Table([0, 1, 2])
    [outcome] = take(table, [reduction("a")] * 3)
    assert (outcome.key, sorted(outcome.announced), outcome.error) == ("allreduce 'a'", [0, 1, 2], None)
    assert not table.waiting


def test_calls_begin_when_the_last_rank_has_announced_them() -> None:
    table, a, b, c = Table([0, 1]), reduction("a"), reduction("b"), reduction("c")
    assert take(table, [a, b]) == []
    assert take(table, [b, None])[0].key == b.key
    assert take(table, [None, c]) == []
    assert table.missing(a.key) == [1]
    assert table.missing(c.key) == [0]
    assert [outcome.key for outcome in take(table, [c, a])] == [a.key, c.key]


def test_what_every_rank_says_at_once_begins_in_the_order_in_which_it_was_said() -> None:
    table, calls = Table([0, 1]), tuple(map(reduction, "bca"))
    outcomes = table.take([calls, calls])
    assert [(its.key, sorted(its.announced), its.error) for its in outcomes] == [
        (its.key, [0, 1], None) for its in calls
    ]


def test_of_what_ranks_say_at_once_the_calls_that_all_have_announced_begin() -> None:
    table, (a, b, c, d) = Table([0, 1]), map(reduction, "abcd")
    assert [its.key for its in table.take([(a, b, c), (c, d, a)])] == [a.key, c.key]
    assert "its last call was allreduce 'c'" in table.hindrance(d.key)
    assert [its.key for its in table.take([(d,), (b,)])] == [b.key, d.key]
    assert not table.waiting


def test_a_call_whose_name_was_given_up_is_late_among_others_too() -> None:
    table, (a, b) = Table([0, 1]), map(reduction, "ab")
    take(table, [a, None])
    take(table, [Announcement(WITHDRAW, a.key), None])
    late, begins = table.take([(b, a), (b, a)])
    assert (late.key, list(late.announced), type(late.error)) == (a.key, [1], RankTimeoutError)
    assert (begins.key, begins.error) == (b.key, None)
    assert list(table.waiting) == [a.key]


@pytest.mark.parametrize("seed", range(20))
def test_ranks_with_any_orders_begin_all_calls_in_one(seed: int) -> None:
    """Each with a table of its own, which is given the rounds encoded."""
    game = random.Random(seed)
    size, names = game.choice([2, 3, 5]), [f"call {number}" for number in range(24)]
    queues = [game.sample([reduction(name) for name in names], len(names)) for _ in range(size)]
    tables = [Table(range(size)) for _ in range(size)]
    begun: list[list[str]] = [[] for _ in range(size)]
    while any(queues):
        said: list[Batch] = []
        for queue in queues:
            count = game.choice([0, 1, 1, 2, 5])
            said.append(tuple(queue[:count]))
            del queue[:count]
        for table, order in zip(tables, begun, strict=True):
            outcomes = table.take([decode(encode(batch)) for batch in said])
            assert all(outcome.error is None for outcome in outcomes)
            order += [outcome.key for outcome in outcomes]
    assert sorted(begun[0]) == sorted(f"allreduce {name!r}" for name in names)
    assert all(order == begun[0] for order in begun)
    assert not any(table.waiting for table in tables)


def test_digests_are_the_same_for_the_same_announcements_only() -> None:
    single = [
        *(
            reduction("a"),
            reduction("b"),
            reduction("a", 4),
            reduction("a", dtype="int32"),
            reduction("a", terms="Max"),
        ),
        Announcement("allreduce", "allreduce 'a'", (("float32", (3,)), ("float32", (3,))), "Sum"),
        Announcement("allreduce", "allreduce 'a'", (("float32", (3,)),), "Sum", (1,)),
        Announcement("allreduce", "#1", (("float32", (3,)),), "Sum"),
        Announcement("broadcast", "#1", (("float32", (3,)),), "Sum"),
    ]
    a, b, c = single[:3]
    every: list[Batch] = [(), *((its,) for its in single), (a, b), (b, a), (b, c), (a, b, c)]
    for one, other in itertools.product(every, every):
        assert (digest(one) == digest(other)) == (one == other)
        assert all(0 <= number < 2**63 for number in digest(one))
        assert decode(encode(one)) == one


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        (reduction("a"), reduction("a", 4), "rank 7 called allreduce 'a' (float32 of shape (4,), Sum)"),
        (reduction("a"), reduction("a", dtype="int32"), "int32 of shape (3,)"),
        (reduction("a"), reduction("a", terms="Max"), "Max"),
        (Announcement("barrier", "#0"), Announcement("broadcast", "#0", terms="root 1"), "broadcast (root 1)"),
        (
            Announcement("allgather", "#0", (("float32", (3, 2)),)),
            Announcement("allgather", "#0", (("float32", (1, 3)),)),
            "(1, 3)",
        ),
        (Announcement("allgather", "#0", (("float32", (3,)),)), Announcement("allgather", "#0"), "called allgather:"),
    ],
)
def test_a_difference_is_an_error_of_that_call_alone(mine: Announcement, theirs: Announcement, words: str) -> None:
    table = Table([2, 7])
    [outcome] = take(table, [mine, theirs])
    assert isinstance(outcome.error, MismatchError)
    assert "rank 2 called" in str(outcome.error)
    assert words in str(outcome.error)
    assert take(table, [reduction("b")] * 2)[0].error is None


def test_rows_and_the_numbers_of_each_rank_may_differ() -> None:
    for kind in ("allgather", "alltoall"):
        said = [Announcement(kind, "#0", (("float32", (rows, 5)),), per_rank=(rows,)) for rows in (1, 3)]
        [outcome] = take(Table([0, 1]), said)
        assert outcome.error is None
        assert outcome.announced == dict(enumerate(said))


def test_a_rank_that_has_joined_is_missed_by_allreduces_no_longer_and_others_end_with_an_error() -> None:
    table = Table([0, 1, 2])
    gather = Announcement("allgather", "#4", (("float32", (3,)),))
    assert take(table, [reduction("before"), reduction("before"), joined(0)])[0].error is None
    [outcome] = take(table, [reduction("a"), reduction("a"), None])
    assert (sorted(outcome.announced), outcome.error) == ([0, 1], None)
    [outcome] = take(table, [None, gather, None])
    assert isinstance(outcome.error, UnsupportedError)
    assert "rank 1 called allgather (float32 of shape (3,)) after rank 2 had joined" in str(outcome.error)
    assert list(outcome.announced) == [1]
    assert table.last_to_join() is None


@pytest.mark.parametrize(
    ("rounds", "last"),
    [
        ([[joined(3), joined(3), joined(3)]], 2),  # at once
        ([[joined(3), None, joined(3)], [None, joined(3), None]], 1),
        ([[joined(5), None, joined(3)], [None, joined(3), None]], 0),  # it has made more calls
    ],
)
def test_the_last_to_join_has_made_the_most_calls(rounds: list[list[Announcement | None]], last: int) -> None:
    table = Table([0, 1, 2])
    for said in rounds:
        assert table.last_to_join() is None
        take(table, said)
    assert table.last_to_join() == last
    assert table.last_to_join() is None, "a new round of joins"
    assert take(table, [reduction("a"), None, reduction("a")]) == []


def test_a_call_that_was_given_up_ends_on_those_that_made_it_and_names_the_others() -> None:
    table, a = Table([4, 5, 6]), reduction("a")
    take(table, [Announcement("barrier", "#0")] * 3)
    assert take(table, [a, None, None]) == []
    assert table.hindrance(a.key) == (
        "ranks 5, 6 have not called it; rank 5's last call was barrier; rank 6's last call was barrier"
    )
    assert take(table, [None, a, None]) == []
    give_up = Announcement(WITHDRAW, a.key)
    [outcome] = take(table, [give_up, give_up, None])
    assert isinstance(outcome.error, RankTimeoutError)
    assert sorted(outcome.announced) == [0, 1]
    assert "ranks 4, 5 called allreduce 'a'" in str(outcome.error)
    assert "rank 6 has not called it; its last call was barrier" in str(outcome.error)
    assert not table.waiting


def test_a_call_that_its_last_rank_makes_as_another_gives_it_up_begins() -> None:
    table, a = Table([0, 1]), reduction("a")
    take(table, [a, None])
    [outcome] = take(table, [Announcement(WITHDRAW, a.key), a])
    assert outcome.error is None
    assert sorted(outcome.announced) == [0, 1]


def test_a_rank_that_makes_a_call_after_the_others_gave_it_up_has_an_error_and_does_not_meet_their_next() -> None:
    table, a = Table([4, 5, 6]), reduction("a")
    give_up = Announcement(WITHDRAW, a.key)
    for _ in range(2):  # rank 6 misses two
        take(table, [a, a, None])
        [outcome] = take(table, [give_up, None, None])
        assert sorted(outcome.announced) == [0, 1]
        assert take(table, [None, give_up, None]) == []
    for theirs in (a, None):
        [outcome] = take(table, [theirs, None, a])
        assert isinstance(outcome.error, RankTimeoutError)
        assert "rank 6 called allreduce 'a'" in str(outcome.error)
        assert list(outcome.announced) == [2]
    [outcome] = take(table, [None, a, a])
    assert (sorted(outcome.announced), outcome.error) == ([0, 1, 2], None)
    assert take(table, [a, a, a])[0].error is None


def test_that_holds_if_all_ranks_announce_the_same_in_one_round() -> None:
    table, a = Table([0, 1]), reduction("a")
    take(table, [a, None])
    take(table, [Announcement(WITHDRAW, a.key), None])
    [outcome] = take(table, [a, a])  # rank 0's second, rank 1's first
    assert list(outcome.announced) == [1]
    assert isinstance(outcome.error, RankTimeoutError)
    [outcome] = take(table, [None, a])
    assert (sorted(outcome.announced), outcome.error) == ([0, 1], None)


def test_a_call_is_not_given_up_by_a_rank_that_gave_up_an_earlier_one_of_its_name() -> None:
    table, a = Table([0, 1, 2]), reduction("a")
    give_up = Announcement(WITHDRAW, a.key)
    take(table, [a, a, None])
    assert len(take(table, [give_up, None, None])) == 1
    assert take(table, [a, give_up, None]) == []
    assert list(table.waiting[a.key]) == [0]


def test_after_a_call_without_a_name_was_given_up_each_further_one_is_an_error() -> None:
    table = Table([0, 1])
    first, second = Announcement("barrier", "#0"), Announcement("barrier", "#1")
    take(table, [first, None])
    take(table, [second, None])
    ended = take(table, [Announcement("withdraw", "#0"), None])
    assert [(its.key, type(its.error)) for its in ended] == [("#0", RankTimeoutError), ("#1", RankTimeoutError)]
    for said in ([None, first], [second, second]):
        outcomes = take(table, said)
        assert outcomes
        assert all(isinstance(its.error, RankTimeoutError) for its in outcomes)
    a = reduction("a")
    assert take(table, [a, a])[0].error is None


def test_what_was_given_up_is_forgotten_when_all_have_joined() -> None:
    table, call = Table([0, 1]), Announcement("barrier", "#0")
    take(table, [call, None])
    take(table, [Announcement(WITHDRAW, call.key), None])
    take(table, [joined(1), joined(0)])
    assert table.last_to_join() == 0
    assert take(table, [call, call])[0].error is None


@pytest.mark.parametrize(
    ("call", "rule"),
    [(reduction("a"), "call the same names"), (Announcement("barrier", "#0"), "without a name, in the same order")],
)
def test_the_error_of_a_call_that_was_given_up_says_how_it_was_matched(call: Announcement, rule: str) -> None:
    table = Table([0, 1])
    take(table, [call, None])
    [outcome] = take(table, [Announcement(WITHDRAW, call.key), None])
    assert rule in str(outcome.error)
