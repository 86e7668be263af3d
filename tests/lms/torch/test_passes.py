"""A pass access by access: what leaves and comes back by the rule, by a plan, and when a plan turns out wrong."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from lms.core.guide import Guide, Key
from lms.core.plan import Plan
from lms.core.schedule import Swap
from lms.core.turns import Rounds
from lms.memory.device import CpuDevice
from lms.runtime.recorder import Recorder
from lms.torch.mover import Mover
from lms.torch.passes import AHEAD, Pass
from lms.torch.records import LiveRecord, State, View

CPU = torch.device("cpu")
N = 64  # bytes of a record
ROOM = 1000 * N
HERE, LEAVING, OUT, COMING, BACK = State.HERE, State.LEAVING, State.OUT, State.COMING, State.BACK


class Run:
    """A pass of records by number, saved, used and freed as the swapper does it. `budget` may change on the way."""

    def __init__(
        self,
        tier: object,
        budget: int = ROOM,
        guide: Guide | None = None,
        choose: Callable[[list[Key]], Guide | None] = lambda keys: None,
        write_ahead: int | None = None,
    ) -> None:
        self.budget = budget
        self.mover = Mover(tier, CPU)
        self.begin(guide, choose, write_ahead)

    def begin(
        self,
        guide: Guide | None = None,
        choose: Callable[[list[Key]], Guide | None] = lambda keys: None,
        write_ahead: int | None = None,
    ) -> None:
        recorder = Recorder(CpuDevice(), measure=False, timed=True)
        self.under_way = Pass(
            self.mover,
            recorder,
            guide,
            budget=lambda _: self.budget,
            choose=choose,
            write_ahead=write_ahead,
            rounds=Rounds(),
        )

    def save(self, nbytes: int = N) -> LiveRecord:
        self.mover.settle()
        self.under_way.recorder.enter()
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        storage = tensor.untyped_storage()
        record = LiveRecord(len(self.under_way.records), (storage._cdata, 0), storage)
        record.origin = weakref.ref(storage)
        record.views.append(View(tensor))
        del tensor, storage
        self.under_way.add(record, ("", "uint8", (nbytes,)))
        self.under_way.save(record)
        self.under_way.recorder.leave(self.mover.held, self.mover.present)
        return record

    def use(self, index: int, *, last: bool = False) -> None:
        self.mover.settle()
        self.under_way.recorder.enter()
        record = self.under_way.records[index]
        self.under_way.bring(record)
        if record.flat is not None:
            record.views[0].fill(record.flat)
        self.under_way.use(record, 1)
        self.under_way.recorder.leave(self.mover.held, self.mover.present)
        if last:
            self.free(index)

    def free(self, index: int) -> None:
        record = self.under_way.records[index]
        record.views.clear()
        self.under_way.free(record)

    def states(self) -> list[State]:
        self.mover.settle()
        return [record.state for record in self.under_way.records]


def keys_of(accesses: str) -> list[Key]:
    """`s0 s1 u1` is: save record 0, save record 1, use record 1."""
    kinds = {"s": "save", "u": "use"}
    return [(kinds[access[0]], int(access[1:]), N) for access in accesses.split()]


@pytest.fixture
def guide_of(traces: ModuleType) -> Callable[..., Guide]:
    """A guide for these accesses with these moves: (record, after, before, fetch, write)."""

    def make(
        accesses: str,
        *moves: tuple[int, int, int, int, bool],
        cap: tuple[int, ...] = (),
        held_peak: int = ROOM,
        pinned: frozenset[int] = frozenset(),
        write_ahead: int | None = None,
    ) -> Guide:
        keys = keys_of(accesses)
        tape = traces.Tape([N] * (1 + max(index for _, index, _ in keys)), pinned=set(pinned))
        for kind, index, _ in keys:
            tape.access(kind, index, 1.0)
        plan = Plan(tuple(Swap(*move) for move in moves), cap or (ROOM,) * len(keys), write_ahead)
        return Guide(keys, tape.trace(), replace(plan, forecast=replace(plan.forecast, held_peak=held_peak)))

    return make


# By the rule


def test_the_oldest_leave_first_and_the_newest_stay(tier: object) -> None:
    run = Run(tier, budget=4 * N)
    for _ in range(6):
        run.save()
    assert run.states() == [OUT, OUT, OUT, HERE, HERE, HERE]


def test_nothing_moves_while_there_is_room(tier: object) -> None:
    run = Run(tier, budget=8 * N)
    for _ in range(6):
        run.save()
    for index in reversed(range(6)):
        run.use(index, last=True)
    assert (tier.offloads, tier.reloads) == ([], [])


@pytest.mark.parametrize("records", [0, 1, 3, 5])
def test_no_more_than_the_budget_is_held_though_no_copy_is_over_by_itself(records: int, tier: object) -> None:
    tier.slow = True
    run = Run(tier, budget=records * N)
    for _ in range(8):
        run.save()
        assert run.mover.held <= records * N
    run.mover.counters.held_peak = 0
    for index in reversed(range(8)):
        run.use(index, last=True)
    assert run.mover.counters.held_peak <= max(records, 1) * N


def test_copies_out_start_before_the_budget_is_full_so_that_nobody_waits(tier: object) -> None:
    tier.slow = True
    run = Run(tier, budget=8 * N)
    for _ in range(7):
        run.save()
    assert run.states() == [LEAVING, *[HERE] * 6]
    assert run.mover.held < run.budget


def test_what_the_backward_has_in_hand_stays_until_its_next_access(tier: object) -> None:
    run = Run(tier, budget=0)
    for _ in range(3):
        run.save()
    assert run.states() == [OUT, OUT, OUT]
    run.use(1)
    assert run.states() == [OUT, BACK, OUT]
    run.use(2)
    assert run.states() == [OUT, OUT, BACK]
    assert run.mover.counters.misses == 2


def test_the_newest_come_back_first_and_only_some_ahead(tier: object) -> None:
    sizes = [N + 16 * index for index in range(AHEAD + 4)]
    run = Run(tier, budget=0)
    for nbytes in sizes:
        run.save(nbytes)
    run.budget = ROOM
    run.use(len(sizes) - 1)
    assert tier.reloads == sizes[::-1][: 1 + AHEAD]
    run.use(len(sizes) - 2)
    assert tier.reloads == sizes[::-1][: 2 + AHEAD]
    assert run.mover.counters.misses == 1


def test_nothing_comes_back_ahead_beyond_the_room_that_copies_out_keep_free(tier: object) -> None:
    run = Run(tier, budget=4 * N)
    for _ in range(8):
        run.save()
    run.use(7, last=True)
    assert tier.reloads == []
    run.use(6, last=True)
    assert tier.reloads == [N]
    assert run.states()[3:6] == [OUT, COMING, HERE]
    run.use(5, last=True)
    assert run.states()[2:5] == [OUT, COMING, COMING]


def test_in_the_backward_too_the_one_that_is_needed_last_leaves_first(tier: object) -> None:
    run = Run(tier, budget=0)
    for _ in range(3):
        run.save()
    run.budget = ROOM
    run.use(2)
    assert run.states() == [COMING, COMING, BACK]
    run.budget = 3 * N
    run.use(1)
    assert run.states() == [OUT, BACK, BACK]


def test_a_record_that_is_needed_on_its_way_out_stays(tier: object) -> None:
    tier.slow = True
    run = Run(tier, budget=4 * N)
    for _ in range(4):
        run.save()
    assert run.states()[0] is LEAVING
    run.budget = ROOM
    run.use(0)
    assert run.states()[0] is HERE
    assert tier.reloads == []
    assert run.mover.counters.misses == 0


@pytest.mark.parametrize("most", [0, 1, 3])
def test_no_more_copies_out_are_in_flight_than_are_allowed(most: int, tier: object) -> None:
    tier.slow = True
    run = Run(tier, budget=40 * N, write_ahead=most)
    seen = []
    for _ in range(40):
        run.save()
        seen.append(run.mover.in_flight)
    assert max(seen) == most
    assert tier.offloads, "nothing left: the test tests nothing"


def test_the_memory_of_freed_records_is_waited_for_before_that_of_living_ones(tier: object) -> None:
    run = Run(tier, budget=0)
    for _ in range(2):
        run.save()
    tier.slow, run.budget = True, 4 * N
    run.use(1)
    assert run.states()[0] is COMING
    run.free(0)
    run.free(1)
    assert run.mover.held == N
    run.budget = N
    assert run.save().state is LEAVING
    assert run.mover.held == N


# By a plan


def test_each_move_starts_with_its_access(tier: object, guide_of: Callable[..., Guide]) -> None:
    guide = guide_of("s0 s1 s2 u2 u1 u0", (0, 1, 5, 4, True))
    run = Run(tier, budget=0, guide=guide)  # the budget is the rule's
    found = []
    for _ in range(3):
        run.save()
        found.append(run.states())
    for index in (2, 1, 0):
        run.use(index)
        found.append(run.states())
    assert [states[0] for states in found] == [HERE, OUT, OUT, OUT, COMING, BACK]
    assert all(state is HERE for states in found for state in states[1:])
    assert (tier.offloads, tier.reloads, run.mover.counters.misses) == ([N], [N], 0)


def test_a_move_that_was_to_come_back_at_its_use_is_no_miss(tier: object, guide_of: Callable[..., Guide]) -> None:
    run = Run(tier, guide=guide_of("s0 s1 u1 u0", (0, 0, 3, 3, True)))
    for _ in range(2):
        run.save()
    run.use(1)
    assert run.states() == [OUT, HERE]
    run.use(0)
    assert run.states() == [BACK, HERE]
    assert run.mover.counters.misses == 0


def test_a_return_waits_for_room_under_the_cap_and_those_behind_it_wait_too(
    tier: object, guide_of: Callable[..., Guide]
) -> None:
    moves = [(1, 1, 6, 4, True), (0, 0, 7, 4, True)]
    guide = guide_of("s0 s1 s2 s3 u3 u2 u1 u0", *moves, cap=(ROOM,) * 4 + (2 * N, 2 * N, 3 * N, ROOM))
    run = Run(tier, guide=guide)
    for _ in range(4):
        run.save()
    run.use(3)
    assert run.states() == [OUT, OUT, HERE, HERE]
    run.free(3)
    run.use(2)
    assert run.states()[:3] == [OUT, COMING, HERE]
    run.use(1)
    assert run.states()[:3] == [COMING, BACK, HERE]
    assert run.mover.counters.misses == 0


def test_a_record_that_is_due_back_before_it_is_gone_stays(tier: object, guide_of: Callable[..., Guide]) -> None:
    tier.slow = True
    run = Run(tier, guide=guide_of("s0 s1 s2 u2 u1 u0", (0, 1, 5, 3, True)))
    for _ in range(3):
        run.save()
    assert run.states()[0] is LEAVING
    run.use(2)
    assert run.states()[0] is HERE
    assert tier.reloads == []


def test_a_record_that_the_tier_has_already_is_dropped_once_the_operation_that_uses_it_is_over(
    tier: object, guide_of: Callable[..., Guide]
) -> None:
    guide = guide_of("s0 s1 u0 u1 u0 u1 u0", (0, 0, 2, 2, True), (0, 2, 4, 4, False))
    run = Run(tier, guide=guide)
    for _ in range(2):
        run.save()
    run.use(0)
    assert run.states() == [BACK, HERE]
    run.use(1)
    assert run.states() == [OUT, HERE]
    for index in (0, 1, 0):
        run.use(index)
        assert run.states() == [BACK, HERE]
    assert (tier.offloads, tier.reloads, run.mover.counters.misses) == ([N], [N, N], 0)


def test_what_is_saved_in_the_middle_of_a_backward_ends_an_operation_too(
    tier: object, guide_of: Callable[..., Guide]
) -> None:
    run = Run(tier, guide=guide_of("s0 u0 s1 u1 u0", (0, 0, 1, 1, True), (0, 1, 4, 4, False)))
    run.save()
    run.use(0)
    assert run.states() == [BACK]
    run.save()
    assert run.states() == [OUT, HERE]


def test_copies_are_waited_for_when_more_than_the_cap_is_held(tier: object, guide_of: Callable[..., Guide]) -> None:
    tier.slow = True
    moves = [(0, 0, 5, 5, True), (1, 1, 4, 4, True)]
    run = Run(tier, guide=guide_of("s0 s1 s2 u2 u1 u0", *moves, cap=(ROOM, ROOM, 2 * N, ROOM, ROOM, ROOM)))
    for _ in range(2):
        run.save()
    assert run.states() == [LEAVING, LEAVING]
    run.save()
    assert run.states() == [OUT, LEAVING, HERE]


def test_room_under_the_cap_is_made_before_a_record_comes_back(tier: object, guide_of: Callable[..., Guide]) -> None:
    tier.slow = True
    moves = [(0, 0, 3, 3, True), (1, 2, 4, 4, True)]
    run = Run(tier, guide=guide_of("s0 s1 s2 u0 u1", *moves, cap=(0, ROOM, ROOM, 2 * N, 2 * N)))
    for _ in range(3):
        run.save()
    assert run.states() == [OUT, LEAVING, HERE]
    run.mover.counters.held_peak = 0
    run.use(0)
    assert run.states() == [BACK, OUT, HERE]
    assert run.mover.counters.held_peak == 2 * N


def test_a_plan_says_how_many_copies_out_may_be_in_flight(tier: object, guide_of: Callable[..., Guide]) -> None:
    tier.slow = True
    moves = [(index, index, 7, 8, True) for index in range(4)]
    run = Run(tier, guide=guide_of("s0 s1 s2 s3 u3 u2 u1 u0", *moves, write_ahead=2))
    seen = []
    for _ in range(4):
        run.save()
        seen.append(run.mover.in_flight)
    assert seen == [1, 2, 2, 2]


@pytest.mark.parametrize(("foreseen", "held"), [(4 * N, 3 * N), (2 * N, 2 * N)], ids=["as foreseen", "late"])
def test_a_pass_that_holds_more_than_was_foreseen_makes_room_by_the_rule(
    foreseen: int, held: int, tier: object, guide_of: Callable[..., Guide]
) -> None:
    run = Run(tier, guide=guide_of("s0 s1 s2 u2 u1 u0", cap=(2 * N,) * 6, held_peak=foreseen))
    for _ in range(3):
        run.save()
    assert run.mover.held == held
    assert run.states() == [HERE if held == 3 * N else OUT, HERE, HERE]


# Pinned


def test_what_the_plan_knows_to_be_pinned_is_neither_held_nor_moved(
    tier: object, guide_of: Callable[..., Guide]
) -> None:
    run = Run(tier, budget=0, guide=guide_of("s0 s1 u1 u0", pinned=frozenset({0})))
    run.save()
    assert (run.mover.held, run.under_way.largest) == (0, 0)
    run.save()
    assert run.mover.held == N
    run.use(0)  # not as the plan has it: by the rule from here on, which leaves no room
    assert run.states() == [HERE, OUT]
    assert run.under_way.recorder.foreseen == [True, False]


def test_a_record_in_the_place_of_a_pinned_one_is_none(tier: object, guide_of: Callable[..., Guide]) -> None:
    run = Run(tier, budget=0, guide=guide_of("s0 u0", pinned=frozenset({0})))
    run.save(2 * N)
    assert run.states() == [OUT]


# Another way than the plan's


def test_a_pass_that_does_something_else_goes_on_by_the_rule(tier: object, guide_of: Callable[..., Guide]) -> None:
    asked: list[list[Key]] = []
    guide = guide_of("s0 s1 s2 u2 u1 u0")
    run = Run(tier, budget=0, guide=guide, choose=lambda keys: asked.append(keys))
    for _ in range(2):
        run.save()
    assert run.states() == [HERE, HERE]
    run.use(1)
    assert asked == [keys_of("s0 s1 u1")]
    assert run.states() == [OUT, HERE]
    run.use(0)
    assert len(asked) == 1
    assert run.under_way.finish().guide is None


def test_another_plan_that_began_alike_takes_over_with_what_it_would_have_started(
    tier: object, guide_of: Callable[..., Guide]
) -> None:
    first = guide_of("s0 s1 s2 u2 u1 u0", (0, 2, 5, 4, True))
    second = guide_of("s0 s1 u1 u0", (0, 0, 3, 3, True), (1, 2, 3, 4, True))
    run = Run(tier, guide=first, choose=lambda keys: second)
    for _ in range(2):
        run.save()
    assert run.states() == [HERE, HERE]
    run.use(1)
    assert run.states() == [OUT, OUT]
    run.use(0)
    assert run.under_way.finish().guide is second


def test_returns_of_the_plan_that_takes_over_are_its_own(tier: object, guide_of: Callable[..., Guide]) -> None:
    first = guide_of("s0 s1 s2 u0 u2 u1", (0, 0, 3, 2, True))
    second = guide_of("s0 s1 s2 u2 u1 u0", (1, 1, 4, 3, True))
    run = Run(tier, guide=first, choose=lambda keys: second)
    for _ in range(3):
        run.save()
    assert run.states() == [COMING, HERE, HERE]
    run.use(2)
    assert run.states()[1] is HERE, "it left too late to be gone by its return"
    assert tier.offloads == [N, N]


def test_a_pass_that_came_late_to_its_plan_makes_room_by_the_rule(tier: object, guide_of: Callable[..., Guide]) -> None:
    first = guide_of("s0 s1 s2 u2 u1 u0")
    second = guide_of("s0 s1 u1 u0", cap=(N,) * 4)
    run = Run(tier, guide=first, choose=lambda keys: second)
    for _ in range(2):
        run.save()
    run.use(1)
    assert run.states() == [OUT, HERE]


# The end


def test_a_pass_that_followed_its_plan_to_the_end_says_so_and_what_it_moved(
    tier: object, guide_of: Callable[..., Guide]
) -> None:
    guide = guide_of("s0 s1 u1 u0", (0, 0, 3, 2, True))
    run = Run(tier, guide=guide)
    for _ in range(2):
        for _ in range(2):
            run.save()
        for index in (1, 0):
            run.use(index, last=True)
        finished = run.under_way.finish()
        assert finished.guide is guide
        assert (finished.counters.out, finished.counters.back, finished.counters.held_peak) == (N, N, 2 * N)
        assert [direction for direction, _, _ in finished.recorder.copies] == ["out", "back"]
        assert finished.recorder.keys() == keys_of("s0 s1 u1 u0")
        assert len(finished.recorder.gaps()) == 5, "before each access, and the tail"
        assert finished.seconds > 0
        run.begin(guide)


def test_the_peak_of_a_pass_is_its_own(tier: object) -> None:
    run = Run(tier)
    for records in (3, 1, 2):
        for _ in range(records):
            run.save()
        for index in reversed(range(records)):
            run.use(index, last=True)
        assert run.under_way.finish().counters.held_peak == records * N
        run.begin()


def test_a_pass_that_ends_early_has_followed_no_plan(tier: object, guide_of: Callable[..., Guide]) -> None:
    run = Run(tier, guide=guide_of("s0 s1 u1 u0"))
    for _ in range(2):
        run.save()
    run.use(1)
    assert run.under_way.finish().guide is None
