"""The rules of a step, with a mover that only takes note of what it is asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lms.core.items import DeviceFull, Item, State
from lms.core.schedule import Course, Schedule, Swap
from lms.core.stepper import AHEAD, Stepper
from lms.errors import SpillError, afresh

N = 64  # bytes of an item
ROOM = 1000 * N


class FakeCopy:
    """A copy that is over when somebody says so: at once, or when it is waited for."""

    def __init__(self, *, over: bool, failed: SpillError | None) -> None:
        self.over = over
        self.failed = failed

    def done(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.over = True
        if self.failed is not None:
            raise afresh(self.failed)

    wait = synchronize


class FakeMover:
    """Moves nothing. Fails, refuses or dawdles if it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []  # in order: "out 3", "back 3", "wait out 3", "wait back 3"
        self.stored: set[Item] = set()  # those that have room in the tier below
        self.forgotten: list[int] = []
        self.slow = False  # copies are over when they are waited for
        self.failing = False  # copies fail
        self.ordered = False  # waiting puts the computation behind the copy, and does not block
        self.firm: set[int] = set()  # items that must stay
        self.is_full: Callable[[], bool] = lambda: False

    def offload(self, item: Item) -> FakeCopy | None:
        if item.index in self.firm:
            return None
        self.stored.add(item)
        return self._copy(f"out {item.index}")

    def reload(self, item: Item) -> FakeCopy | None:
        assert item in self.stored, "it was nowhere else"
        if self.is_full():
            raise DeviceFull from MemoryError("the device is full")
        return self._copy(f"back {item.index}")

    def _copy(self, name: str) -> FakeCopy:
        self.asked.append(name)
        return FakeCopy(over=not self.slow, failed=SpillError("the tier is broken") if self.failing else None)

    def wait(self, item: Item, lane: str) -> None:
        self.asked.append(f"wait {lane} {item.index}")
        copy = item.departure if lane == "out" else item.arrival
        assert copy is not None
        if not self.ordered:
            copy.wait()

    def release(self, item: Item) -> None:
        pass

    def discard(self, item: Item) -> None:
        self.stored.remove(item)

    def forget(self, item: Item) -> None:
        self.forgotten.append(item.index)


class Run:
    """Steps of items by number. `room` may change on the way."""

    def __init__(self, course: Course | None = None, *, room: int = ROOM, write_ahead: int | None = None) -> None:
        self.room = room
        self.mover = FakeMover()
        self.stepper: Stepper[Item] = Stepper(self.mover, room=lambda _: self.room, write_ahead=write_ahead)
        self.pinned: set[int] = set()
        self.stepper.begin(course)

    def go(self, accesses: str) -> list[str]:
        """`w0 h0 r0 f0` is: write, hold, read and free item 0. Where all items are after each of these."""
        stepper, found = self.stepper, []
        for kind, index in ((one[0], int(one[1:])) for one in accesses.split()):
            if kind == "f":
                stepper.holdings.free(stepper.items[index])
                found.append(self.where)
                continue
            stepper.holdings.settle()
            stepper.drop_due()
            if new := index == len(stepper.items):
                item = Item(index, N)
                item.pinned = index in self.pinned
                stepper.add(item)
            item = stepper.items[index]
            if kind == "r" or (kind == "w" and not new):
                stepper.require(item)
            if kind == "w" and not new:
                stepper.holdings.write(item)
            stepper.access(item, read=kind == "r")
            found.append(self.where)
        return found

    def next_step(self, course: Course | None = None, *, lives_on: bool = True) -> None:
        """Another step begins, with the items of this one if they live on."""
        items = self.stepper.items if lives_on else {}
        self.stepper.begin(course)
        for item in items.values():
            self.stepper.add(item)

    def over(self, index: int) -> None:
        """The item's copy is over."""
        copy = self.stepper.items[index].departure or self.stepper.items[index].arrival
        assert isinstance(copy, FakeCopy)
        copy.over = True

    @property
    def where(self) -> str:
        """The first letter of each item's state: here, leaving, away, coming, dead."""
        self.stepper.holdings.settle()
        return "".join(item.state.name[0] for item in self.stepper.items.values())

    @property
    def copies(self) -> list[str]:
        return [what for what in self.mover.asked if not what.startswith("wait")]


def course(
    accesses: int,
    *moves: Swap,
    cap: dict[int, int] | int = ROOM,
    most_held: int | None = None,
    write_ahead: int | None = None,
) -> Course:
    """Moves and caps (one for all accesses, or for those that are named; the rest have room) laid out by access."""
    caps = cap if isinstance(cap, dict) else dict.fromkeys(range(accesses), cap)
    return Course(Schedule(moves, tuple(caps.get(at, ROOM) for at in range(accesses)), write_ahead), most_held)


def swap(tensor: int, after: int, before: int, reload: int | None = None, *, write: bool = True) -> Swap:
    """A move whose way back starts with the read, unless `reload` says otherwise."""
    return Swap(tensor, after, before, before if reload is None else reload, write)


def out(tensor: int, after: int, *, write: bool = True) -> Swap:
    """A move that need not come back."""
    return Swap(tensor, after, after + 1, None, write)


def early(tensor: int, after: int, before: int) -> Swap:
    """A move that only writes the tensor's bytes."""
    return Swap(tensor, after, before, after, write=True)


def leaving(*, stays: bool = False) -> Run:
    """A run whose only item is on its way out, or stays after all with its copy out in flight."""
    run = Run(course(4, out(0, 0)))
    run.mover.slow = True
    run.go("w0 r0" if stays else "w0")
    return run


def coming(*, failing: bool = False) -> Run:
    """A run whose only item is on its way back."""
    run = Run(course(9, swap(0, 0, 8, 1)))
    run.go("w0")
    run.mover.slow, run.mover.failing = True, failing
    assert run.go("w1")[-1] == "CH"
    run.mover.failing = False
    return run


# By the rule


def test_the_oldest_leave_first_and_the_newest_stay() -> None:
    assert Run(room=4 * N).go("w0 w1 w2 w3 w4 w5")[-1] == "AAAHHH"


def test_nothing_moves_while_there_is_room() -> None:
    run = Run(room=8 * N)
    run.go("w0 w1 w2 w3 w4 w5 r5 f5 r4 f4 r3 f3 r2 f2 r1 f1 r0 f0")
    assert run.mover.asked == []
    assert (run.stepper.holdings.held, run.stepper.holdings.held_peak, run.mover.forgotten) == (
        0,
        6 * N,
        [5, 4, 3, 2, 1, 0],
    )


@pytest.mark.parametrize("most", [0, 1, 3, 5])
def test_no_more_than_the_room_is_held_though_no_copy_is_over_by_itself(most: int) -> None:
    run = Run(room=most * N)
    run.mover.slow = True
    for index in range(8):
        run.go(f"w{index}")
        assert run.stepper.holdings.held <= most * N
    run.stepper.holdings.held_peak = 0
    run.go(" ".join(f"r{index} f{index}" for index in reversed(range(8))))
    assert run.stepper.holdings.held_peak <= max(most, 1) * N


def test_copies_out_start_before_the_room_is_full_so_that_none_is_waited_for() -> None:
    run = Run(room=8 * N)
    run.mover.slow = True
    assert run.go("w0 w1 w2 w3 w4 w5 w6")[-1] == "LHHHHHH"
    assert run.mover.asked == ["out 0"]
    assert (run.stepper.holdings.held, run.stepper.holdings.leaving) == (7 * N, N)


def test_what_was_read_last_stays_until_the_next_access() -> None:
    run = Run(room=0)
    assert run.go("w0 w1 w2 r1 r2")[2:] == ["AAA", "AHA", "AAH"]
    assert run.stepper.misses == 2


def test_the_newest_come_back_first_and_only_some_ahead() -> None:
    run = Run(room=0)
    last = AHEAD + 3
    run.go(" ".join(f"w{index}" for index in range(last + 1)))
    run.room = ROOM
    run.mover.asked.clear()
    run.go(f"r{last}")
    assert run.copies == [f"back {index}" for index in range(last, 2, -1)]
    run.go(f"r{last - 1}")
    assert run.copies[1 + AHEAD :] == ["back 2"]
    assert run.stepper.misses == 1


def test_nothing_comes_back_ahead_into_the_room_that_copies_out_keep_free() -> None:
    run = Run(room=4 * N)
    run.go("w0 w1 w2 w3 w4 w5 w6 w7")
    assert run.go("r7 f7 r6 f6 r5 f5")[::2] == ["AAAAAHHH", "AAAACHHD", "AAACCHDD"]


def test_after_the_forward_too_the_one_that_is_needed_last_leaves_first() -> None:
    run = Run(room=0)
    run.go("w0 w1 w2")
    run.room = ROOM
    assert run.go("r2") == ["CCH"]
    run.room = 3 * N
    assert run.go("r1") == ["AHH"]


def test_an_item_that_is_read_on_its_way_out_stays() -> None:
    run = Run(room=4 * N)
    run.mover.slow = True
    assert run.go("w0 w1 w2 w3")[-1] == "LHHH"
    run.room = ROOM
    assert run.go("r0") == ["HHHH"]
    assert (run.copies, run.stepper.misses) == (["out 0"], 0)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_no_more_copies_out_are_in_flight_than_are_allowed(most: int) -> None:
    run = Run(room=40 * N, write_ahead=most)
    run.mover.slow = True
    states = run.go(" ".join(f"w{index}" for index in range(40)))
    assert max(state.count("L") for state in states) == most
    assert run.copies, "nothing left: the test tests nothing"


def test_the_memory_of_freed_items_is_waited_for_before_that_of_others() -> None:
    run = Run(room=0)
    run.go("w0 w1")
    run.mover.slow, run.room = True, 4 * N
    assert run.go("r1 f0 f1")[-1] == "DD"
    assert run.stepper.holdings.held == N, "item 0's memory is being written to"
    run.room = N
    assert run.go("w2") == ["DDL"]
    assert (run.stepper.holdings.held, run.mover.asked[-2:]) == (N, ["out 2", "wait back 0"])


def test_what_is_pinned_is_neither_held_nor_moved() -> None:
    run = Run(room=0)
    run.pinned = {0}
    assert run.go("w0 w1 r0 r1")[1:] == ["HA", "HA", "HH"]
    assert (run.stepper.holdings.held_peak, run.stepper.largest, run.stepper.holdings.evictable.keys()) == (N, N, {1})
    by_schedule = Run(course(2, early(0, 0, 2), swap(0, 0, 2)))
    by_schedule.pinned = {0}
    assert by_schedule.go("w0 w1") == ["H", "HH"]
    assert by_schedule.copies == []


# By a schedule


def test_each_move_starts_with_its_access() -> None:
    run = Run(course(6, swap(0, 1, 5, 4)), room=0)  # the room is the rule's
    assert run.go("w0 w1 w2 r2 r1 r0") == ["H", "AH", "AHH", "AHH", "CHH", "HHH"]
    assert (run.mover.asked, run.stepper.misses) == (["out 0", "back 0", "wait back 0"], 0)


def test_what_was_to_come_back_with_its_read_is_no_miss_and_what_had_no_room_before_is_one() -> None:
    planned = Run(course(4, swap(0, 0, 3)))
    assert planned.go("w0 w1 r1 r0") == ["A", "AH", "AH", "HH"]
    assert planned.stepper.misses == 0
    crowded = Run(course(4, swap(0, 0, 3, 2), cap={2: N, 3: N}))
    assert crowded.go("w0 w1 r1 r0") == ["A", "AH", "AH", "HH"]
    assert crowded.stepper.misses == 1


def test_a_return_waits_for_room_under_the_cap_and_those_behind_it_wait_too() -> None:
    caps = {4: 2 * N, 5: 2 * N, 6: 3 * N}
    run = Run(course(8, swap(1, 1, 6, 4), swap(0, 0, 7, 4), cap=caps))
    assert run.go("w0 w1 w2 w3 r3 f3 r2 r1")[4:] == ["AAHH", "AAHD", "ACHD", "CHHD"]
    assert run.stepper.misses == 0


def test_an_item_that_is_due_back_before_it_is_gone_stays() -> None:
    run = Run(course(6, swap(0, 1, 5, 3)))
    run.mover.slow = True
    assert run.go("w0 w1 w2 r2")[1:] == ["LH", "LHH", "HHH"]
    assert run.copies == ["out 0"]


@pytest.mark.parametrize("after_the_read", ["r1", "h1", "w2"])
def test_a_clean_item_is_dropped_without_a_copy_once_the_operation_that_reads_it_is_over(after_the_read: str) -> None:
    run = Run(course(5, swap(0, 0, 2), swap(0, 2, 4, write=False)))
    assert run.go(f"w0 w1 r0 {after_the_read} r0")[2:4] == ["HH", "AH" + "H" * (after_the_read == "w2")]
    assert (run.copies, run.stepper.misses) == (["out 0", "back 0", "back 0"], 0)


def test_a_copy_back_that_no_one_has_waited_for_is_dropped_once_it_has_arrived() -> None:
    run = Run(course(6, swap(0, 0, 6, 1), out(0, 2, write=False), out(0, 4, write=False)))
    run.go("w0")
    run.mover.slow = True
    assert run.go("w1 w2 w3")[-1] == "CHHH"
    run.over(0)
    assert run.go("w4 w5")[-1] == "AHHHHH"
    assert (run.stepper.holdings.held, run.stepper.holdings.evictable.keys()) == (5 * N, {1, 2, 3, 4, 5})


def test_an_item_that_was_to_be_clean_and_is_not_leaves_by_a_copy() -> None:
    run = Run(course(2, out(0, 0, write=False)))
    assert run.go("w0 w1") == ["H", "AH"]
    assert run.copies == ["out 0"]


def test_what_is_written_early_stays_though_a_return_waits_for_room_and_leaves_later_without_a_copy() -> None:
    moves = swap(0, 0, 3, 1), early(1, 1, 4), swap(1, 4, 6, write=False)
    run = Run(course(7, *moves, cap={1: N, 2: N}))
    assert run.go("w0 w1 h1 r0 r1 r0 r1") == ["A", "AH", "AH", "HH", "HH", "HA", "HH"]
    assert run.copies == ["out 0", "out 1", "back 0", "back 1"]


def test_what_is_to_be_written_early_and_must_stay_is_not_written() -> None:
    run = Run(course(3, early(0, 0, 1), out(0, 1, write=False)))
    run.mover.firm = {0}
    assert run.go("w0 r0 h0")[-1] == "H"
    assert (run.copies, run.stepper.holdings.held) == ([], N)


def test_copies_out_are_waited_for_oldest_first_while_more_than_the_cap_is_held() -> None:
    run = Run(course(6, swap(0, 0, 5), swap(1, 1, 4), cap={2: 2 * N}))
    run.mover.slow = True
    assert run.go("w0 w1 w2")[1:] == ["LL", "ALH"]
    assert run.mover.asked[-1] == "wait out 0"


def test_room_under_the_cap_is_made_before_an_item_comes_back() -> None:
    run = Run(course(5, swap(0, 0, 3), swap(1, 2, 4), cap={0: 0, 3: 2 * N, 4: 2 * N}))
    run.mover.slow = True
    assert run.go("w0 w1 w2")[-1] == "ALH"
    run.stepper.holdings.held_peak = 0
    assert run.go("r0") == ["HAH"]
    assert run.stepper.holdings.held_peak == 2 * N


def test_a_schedule_says_how_many_copies_out_may_be_in_flight() -> None:
    run = Run(course(8, *(swap(index, index, 7, 8) for index in range(4)), write_ahead=2))
    run.mover.slow = True
    assert run.go("w0 w1 w2 w3") == ["L", "LL", "ALL", "AALL"]


@pytest.mark.parametrize(("most_held", "where"), [(4 * N, "HHH"), (2 * N, "AHH")], ids=["as foreseen", "late"])
def test_a_step_that_holds_more_than_was_foreseen_makes_room_by_the_rule(most_held: int, where: str) -> None:
    assert Run(course(6, cap=2 * N, most_held=most_held)).go("w0 w1 w2")[-1] == where


# Another schedule, or none


@pytest.mark.parametrize("other", [None, course(4, cap=N)], ids=["none", "another"])
def test_a_step_that_left_its_schedule_makes_room_by_the_rule(other: Course | None) -> None:
    run = Run(course(6), room=0)
    assert run.go("w0 w1")[-1] == "HH"
    run.stepper.divert(other)
    assert run.go("r1 r0") == ["AH", "HA"]


def test_the_schedule_that_takes_over_starts_what_it_would_have_by_now() -> None:
    run = Run(course(6, swap(0, 2, 5, 4)))
    run.go("w0 w1")
    run.stepper.divert(course(4, swap(0, 0, 3), swap(1, 2, 4)))
    assert run.go("r1 r0") == ["AA", "HA"]
    assert run.stepper.misses == 0


def test_the_schedule_that_takes_over_writes_what_it_would_have_written_early_once() -> None:
    run = Run(course(7, early(0, 0, 4)))
    run.go("w0 w1 w2 f2")
    moves = early(0, 0, 4), early(1, 1, 3), early(2, 2, 5), out(1, 3, write=False), out(0, 4, write=False)
    run.stepper.divert(course(7, *moves))
    assert run.go("r1 r0 h1") == ["HHD", "HAD", "AAD"]
    assert run.copies == ["out 0", "out 1"]


def test_returns_of_the_schedule_that_takes_over_are_its_own() -> None:
    run = Run(course(6, swap(0, 0, 3, 2)))
    assert run.go("w0 w1 w2")[-1] == "CHH"
    run.mover.slow = True
    run.stepper.divert(course(6, swap(1, 1, 4, 3)))
    assert run.go("r2") == ["CHH"], "item 1 left too late to be gone by its return"
    assert run.copies == ["out 0", "back 0", "out 1"]


# What an earlier step has left behind


def test_what_was_left_behind_is_the_first_to_leave_and_the_only_one_in_a_step_with_a_schedule() -> None:
    run = Run()
    run.go("w0 w1")
    old = list(run.stepper.items.values())
    for item in old:
        run.stepper.holdings.leave_behind(item)
    assert run.stepper.holdings.left == 2 * N
    run.next_step(course(4, cap=2 * N), lives_on=False)
    assert run.go("w0 w1 w2")[-1] == "HHH"
    assert [item.state for item in old] == [State.AWAY, State.AWAY]
    assert (run.stepper.holdings.left, run.stepper.holdings.held) == (0, 3 * N)
    run.stepper.require(old[1])
    assert (run.stepper.holdings.left, run.stepper.misses) == (N, 1)
    run.stepper.holdings.free(old[1])
    assert (run.stepper.holdings.left, run.stepper.holdings.held, run.stepper.holdings.evictable.keys()) == (
        0,
        3 * N,
        {0, 1, 2},
    )


def test_what_was_left_behind_makes_room_for_what_comes_back() -> None:
    run = Run()
    run.go("w0")
    old = run.stepper.items[0]
    run.stepper.holdings.leave_behind(old)
    run.next_step(course(4, swap(0, 0, 3, 2), cap={2: 2 * N}), lives_on=False)
    assert run.go("w0 w1 r1") == ["A", "AH", "CH"]
    assert old.state is State.AWAY


def test_the_peak_of_a_step_is_its_own() -> None:
    run = Run()
    run.go("w0 w1 w2 f0 f1")
    run.next_step(lives_on=False)
    assert run.stepper.holdings.held_peak == N
    run.go("w0")
    assert run.stepper.holdings.held_peak == 2 * N


# On the way out


def test_an_item_keeps_its_memory_until_its_copy_out_is_over() -> None:
    run = leaving()
    assert (run.where, run.stepper.holdings.held, run.stepper.holdings.leaving, run.stepper.holdings.evictable) == (
        "L",
        N,
        N,
        {},
    )
    run.over(0)
    assert (run.where, run.stepper.holdings.held, run.stepper.holdings.leaving, run.stepper.holdings.evictable) == (
        "A",
        0,
        0,
        {},
    )


def test_an_item_that_stays_after_all_is_dropped_later_without_another_copy() -> None:
    run = leaving(stays=True)
    assert (run.where, run.stepper.holdings.leaving, run.stepper.holdings.evictable.keys()) == ("H", 0, {0})
    run.over(0)
    assert (run.where, run.stepper.holdings.held) == ("H", N)
    run.stepper.divert(None)
    run.room = 0
    assert run.go("w1") == ["AA"]
    assert run.copies == ["out 0", "out 1"]


def test_an_item_that_stayed_leaves_with_the_copy_that_is_in_flight_still() -> None:
    run = Run(course(4, out(0, 0), out(0, 2)))
    run.mover.slow = True
    assert run.go("w0 r0 r0") == ["L", "H", "L"]
    run.over(0)
    assert (run.where, run.copies, run.stepper.holdings.held) == ("A", ["out 0"], 0)


def test_an_item_that_must_stay_is_passed_over_by_the_rule() -> None:
    run = Run(room=N)
    run.mover.firm = {0}
    assert run.go("w0 w1 w2")[-1] == "HAA"


# On the way back


def test_a_copy_back_that_failed_raises_for_each_that_reads_it_and_is_not_dropped() -> None:
    run = coming(failing=True)
    run.over(0)
    for _ in range(2):
        with pytest.raises(SpillError, match="broken"):
            run.go("r0")
    run.stepper.divert(course(9, out(0, 0)))
    assert run.where == "CH"


def test_a_copy_back_that_is_ordered_and_not_over_is_waited_for_by_each_that_reads_it() -> None:
    run = coming()
    run.mover.ordered = True
    assert run.go("r0 r0") == ["HH", "HH"]
    run.over(0)
    run.go("r0 r0")
    assert run.mover.asked.count("wait back 0") == 3, "the last of the reads knows that it is over"


# The end of an item


@pytest.mark.parametrize("failing", [False, True], ids=["a copy", "a copy that fails"])
@pytest.mark.parametrize("stays", [False, True], ids=["leaving", "stayed after all"])
def test_an_item_that_is_freed_on_its_way_out_is_held_until_its_copy_is_over(stays: bool, failing: bool) -> None:
    run = Run(course(4, out(0, 0)))
    run.mover.slow, run.mover.failing = True, failing
    run.go("w0 r0 f0" if stays else "w0 f0")
    assert (run.where, run.stepper.holdings.held, run.stepper.holdings.leaving) == ("D", N, 0)
    assert run.mover.stored == set(), "no one will read it"
    run.over(0)
    assert (run.where, run.stepper.holdings.held, run.mover.forgotten) == ("D", 0, [0])


def test_what_was_freed_does_not_wait_for_older_copies_out() -> None:
    run = Run(course(4, out(0, 0), out(1, 1)))
    run.mover.slow = True
    assert run.go("w0 w1 r1 f1")[-1] == "LD"
    run.over(1)
    assert (run.where, run.stepper.holdings.held, run.mover.forgotten) == ("LD", N, [1])


def test_memory_that_is_being_written_to_outlives_its_item() -> None:
    run = coming()
    assert run.go("f0") == ["DH"]
    assert (run.stepper.holdings.held, run.stepper.holdings.evictable.keys(), run.mover.forgotten) == (2 * N, {1}, [])
    run.over(0)
    assert (run.where, run.stepper.holdings.held, run.mover.forgotten) == ("DH", N, [0])


@pytest.mark.parametrize("failing", [False, True], ids=["a copy", "a copy that fails"])
@pytest.mark.parametrize("lane", ["out", "back"])
def test_room_is_made_by_waiting_for_the_copy_of_an_item_that_was_freed(lane: str, failing: bool) -> None:
    if lane == "back":
        run = coming(failing=failing)
    else:
        run = Run(course(9, out(0, 0)))
        run.mover.slow, run.mover.failing = True, failing
        run.go("w0 r0")
    run.go("f0")
    run.stepper.divert(course(9, cap=N))
    run.go("w2" if lane == "back" else "w1")
    assert run.mover.asked.count(f"wait {lane} 0") == 1
    assert run.mover.forgotten == [0]


def test_if_there_is_no_room_to_make_the_copies_of_what_stays_are_waited_for_so_that_it_can_go_once_it_is_freed() -> (
    None
):
    run = Run(course(9, swap(0, 0, 8, 2), swap(1, 1, 8, 7), cap={3: N}))
    run.go("w0")
    run.mover.slow = True
    assert run.go("w1 r1 w2") == ["AL", "CH", "CHH"]
    assert run.mover.asked == ["out 0", "out 1", "back 0", "wait out 1"]


# Failures


@pytest.mark.parametrize("stays", [False, True], ids=["leaving", "stayed after all"])
def test_a_copy_out_that_failed_raises_once_and_its_item_is_where_it_was(stays: bool) -> None:
    run = Run(course(4, out(0, 0), out(0, 2)))
    run.mover.slow = run.mover.failing = True
    run.go("w0 r0" if stays else "w0")
    run.over(0)
    with pytest.raises(SpillError, match="broken"):
        run.stepper.holdings.settle()
    assert (run.where, run.stepper.holdings.held, run.stepper.holdings.evictable.keys(), run.mover.stored) == (
        "H",
        N,
        {0},
        set(),
    )
    run.mover.failing = False
    run.go("w1 r0")
    assert run.copies == ["out 0", "out 0"], "the bytes are nowhere else: they have to be copied anew"


def test_a_copy_out_that_fails_while_it_is_waited_for_raises_and_its_item_is_where_it_was() -> None:
    run = Run(course(2, out(0, 0), cap=0))
    run.mover.slow = run.mover.failing = True
    with pytest.raises(SpillError, match="broken"):
        run.go("w0")
    assert (run.where, run.stepper.holdings.held, run.stepper.holdings.evictable.keys()) == ("H", N, {0})


def test_copies_out_give_their_memory_back_in_their_order_and_one_that_failed_does_not_keep_those_behind_it() -> None:
    run = Run(course(2, out(0, 0), out(1, 1)))
    run.mover.slow = run.mover.failing = True
    run.go("w0")
    run.mover.failing = False
    run.go("w1")
    run.over(1)
    assert run.where == "LL"
    run.over(0)
    with pytest.raises(SpillError):
        run.stepper.holdings.settle()
    assert run.where == "HA"


def test_giving_up_waits_for_all_that_is_in_flight_and_loses_nothing() -> None:
    run = Run(course(9, swap(0, 0, 8, 1), out(1, 1), out(2, 2), out(3, 4)))
    run.go("w0")
    run.mover.slow = run.mover.ordered = True
    run.go("w1 w2 r2 f0")
    run.mover.failing = True
    assert run.go("w3") == ["DLHL"]
    run.stepper.holdings.give_up()
    assert (run.where, run.mover.forgotten, run.stepper.holdings.held) == ("DAHH", [0], 2 * N)
    assert run.stepper.items[2].stored
    assert not run.stepper.items[3].stored


# State that lives on in the next step


@pytest.mark.parametrize("write", [True, False], ids=["written", "only read"])
def test_state_is_away_from_its_last_access_to_its_first_of_the_next_step(write: bool) -> None:
    run = Run()
    run.go("w0 r0 w1")  # the step that was recorded
    cycle = course(3, swap(1, 2, 5, 4, write=write))
    step = "w0 r0 w1" if write else "w0 r0 r1"
    leaves = "HA" if write else "HH"  # at once, or with the step's end
    run.next_step(cycle)
    assert run.go(step) == ["HH", "HH", leaves]
    for _ in range(2):
        run.next_step(cycle)
        assert (run.where, run.stepper.holdings.held) == ("HA", N)
        assert run.go(step) == ["HA", "HC", leaves]
    assert run.copies == ["out 1", *(["back 1", "out 1"] if write else ["back 1"]) * 2]
    assert run.stepper.misses == 0


def test_state_that_found_no_room_before_its_write_is_a_miss_and_leaves_again() -> None:
    run = Run()
    run.go("w0 r0 w1")
    for _ in range(2):
        run.next_step(course(3, swap(1, 2, 5, 4), cap={1: N}))
        assert run.go("w0 r0 w1")[-1] == "HA"
    assert (run.copies, run.stepper.misses) == (["out 1", "back 1", "out 1"], 1)


@pytest.mark.parametrize("failing", [False, True], ids=["a copy", "a copy that fails"])
def test_a_write_waits_for_the_copy_out_that_is_in_flight_and_throws_it_away(failing: bool) -> None:
    run = Run(course(9, out(0, 0)))
    run.mover.slow, run.mover.failing = True, failing
    assert run.go("w0 w0") == ["L", "H"]
    assert (run.mover.asked, run.mover.stored, run.stepper.items[0].stored) == (["out 0", "wait out 0"], set(), False)


# A device that is full before the cap is reached


def full_at(run: Run, most: int) -> Run:
    """The device takes nothing back while `most` items are held."""
    run.mover.is_full = lambda: run.stepper.holdings.held >= most * N
    return run


@pytest.mark.parametrize("slow", [False, True])
def test_others_leave_for_what_is_read_if_the_device_is_full(slow: bool) -> None:
    run = full_at(Run(course(8, swap(0, 0, 5))), 2)
    run.mover.slow = slow
    run.go("w0 w1")
    if slow:
        run.over(0)
    assert run.go("w2 w3 w4")[-1] == "AHHHH"
    run.go("r0")
    assert run.stepper.items[0].state in (State.HERE, State.COMING)
    assert (run.where[1:], run.stepper.made_room, run.stepper.misses) == ("AAAH", 1, 0)
    assert run.go("r1 r2")[-1][:3] == "AAH", "the rest of the step is read, one after the other"


def test_what_is_on_its_way_back_arrives_and_leaves_for_what_is_read() -> None:
    run = full_at(Run(course(9, swap(0, 0, 7, 3), swap(1, 1, 4))), 2)
    run.mover.firm.add(3)
    assert run.go("w0 w1 w2 f2")[-1] == "AAD"
    run.mover.slow = True
    assert run.go("w3")[-1] == "CADH"
    assert run.go("r1")[-1] in ("ACDH", "AHDH")
    assert run.stepper.made_room == 1


def test_what_is_read_later_is_not_asked_for_again_while_no_less_is_held() -> None:
    run = Run(course(9, swap(0, 0, 8, 2)))
    asked: list[int] = []
    run.mover.is_full = lambda: asked.append(run.stepper.holdings.held) or True
    run.go("w0 w1 w2 w3 w4 h1 h2")
    assert asked == [2 * N]


def test_what_is_read_later_waits_until_the_device_has_room() -> None:
    run = full_at(Run(course(8, swap(0, 0, 6, 3))), 2)
    assert run.go("w0 w1 w2 w3 f1")[-1] == "ADHH"
    assert run.go("f2 h3")[-1] == "CDDH"
    assert run.stepper.made_room == 0


def test_if_nothing_can_leave_the_devices_own_error_is_raised() -> None:
    run = full_at(Run(course(4, swap(0, 0, 2))), 1)
    run.pinned.add(2)
    run.mover.firm.add(1)
    run.go("w0 w1")
    with pytest.raises(MemoryError, match="the device is full"):
        run.go("r0")
    run.go("f1 r0")
    assert run.where == "HD"
