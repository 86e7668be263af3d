"""One record's ways out, away and back, and what is counted on the way."""

from __future__ import annotations

import weakref
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lms.errors import SpillError
from lms.torch import mover as mover_module
from lms.torch.mover import Counters, Mover
from lms.torch.records import LiveRecord, State, View

CPU = torch.device("cpu")
N = 64  # bytes of a record


@pytest.fixture
def mover(tier: object, monkeypatch: pytest.MonkeyPatch) -> Mover:
    """A mover to whose clock every wait takes one second."""
    monkeypatch.setattr(mover_module, "time", SimpleNamespace(perf_counter=count(10).__next__))
    return Mover(tier, CPU)


def content(index: int) -> Tensor:
    return torch.arange(N, dtype=torch.uint8) + index


def saved(mover: Mover, index: int = 0, tensor: Tensor | None = None) -> LiveRecord:
    """A record as the swapper makes it; without `tensor` nobody else keeps its storage."""
    tensor = content(index) if tensor is None else tensor
    storage = tensor.untyped_storage()
    record = LiveRecord(index, (storage._cdata, 0), storage)
    record.origin = weakref.ref(storage)
    record.views.append(View(tensor))
    mover.hold(record)
    mover.count_present(storage)
    return record


def out(mover: Mover, index: int = 0, tensor: Tensor | None = None) -> LiveRecord:
    """A record that is out already."""
    record = saved(mover, index, tensor)
    mover.send(record)
    record.departure.over = True
    mover.settle()
    assert record.state is State.OUT
    return record


def die(mover: Mover, record: LiveRecord) -> None:
    """Its last handle ends, as in the swapper."""
    record.views.clear()
    mover.free(record)


def counted(mover: Mover) -> tuple[int, int, int, int]:
    return mover.held, mover.present, mover.leaving, mover.in_flight


# Out


def test_a_record_that_leaves_keeps_its_memory_until_its_copy_is_over(mover: Mover, tier: object) -> None:
    tier.slow = True
    record = saved(mover)
    assert counted(mover) == (N, N, 0, 0)
    mover.send(record)
    mover.settle()
    assert record.state is State.LEAVING
    assert counted(mover) == (N, N, N, 1)
    assert (mover.counters.out, mover.log) == (N, [("out", 0, record.departure)])
    record.departure.over = True
    mover.settle()
    assert record.state is State.OUT
    assert counted(mover) == (0, 0, 0, 0)


def test_only_what_is_held_and_not_on_its_way_can_be_evicted(mover: Mover, tier: object) -> None:
    tier.slow = True
    record = saved(mover)
    assert mover.evictable == {0: record}
    mover.send(record)
    assert mover.evictable == {}
    mover.keep(record)
    assert mover.evictable == {0: record}
    die(mover, record)
    assert mover.evictable == {}


def test_what_is_pinned_or_has_no_view_or_is_out_is_not_sent(mover: Mover, tier: object) -> None:
    pinned, bare, away = saved(mover, 0), saved(mover, 1), out(mover, 2)
    pinned.pinned = True
    bare.views.clear()
    tier.offloads.clear()
    for record in (pinned, bare, away):
        mover.send(record)
    assert tier.offloads == []
    assert [record.state for record in (pinned, bare, away)] == [State.HERE, State.HERE, State.OUT]


def test_memory_that_somebody_else_keeps_is_present_and_not_held(mover: Mover) -> None:
    mine = content(0)
    out(mover, tensor=mine)
    assert counted(mover) == (0, N, 0, 0)
    del mine
    assert counted(mover) == (0, 0, 0, 0)


def test_copies_out_give_their_memory_back_oldest_first(mover: Mover, tier: object) -> None:
    tier.slow = True
    first, second = saved(mover, 0), saved(mover, 1)
    for record in (first, second):
        mover.send(record)
    second.departure.over = True
    mover.settle()
    assert (first.state, second.state) == (State.LEAVING, State.LEAVING)
    first.departure.over = True
    mover.settle()
    assert (first.state, second.state) == (State.OUT, State.OUT)


def test_of_a_record_that_was_changed_in_place_nothing_is_kept(mover: Mover, tier: object) -> None:
    tensor = content(0)
    record = saved(mover, tensor=tensor)
    tensor.add_(1)
    del tensor
    mover.send(record)
    assert (record.state, tier.offloads) == (State.OUT, [])
    assert counted(mover) == (0, 0, 0, 0)
    mover.fetch(record)
    assert (record.state, tier.reloads, mover.held) == (State.OUT, [], 0)


def test_a_record_of_which_one_view_was_changed_stays_for_the_others(mover: Mover, tier: object) -> None:
    tensor = content(0)
    record = saved(mover, tensor=tensor)
    record.views.append(View(tensor.data))  # the same bytes, and a version counter of its own
    tensor.add_(1)
    mover.send(record)
    assert (record.state, tier.offloads, mover.held) == (State.HERE, [], N)


def test_a_change_in_place_while_the_copy_out_is_in_flight_keeps_the_memory(mover: Mover, tier: object) -> None:
    tier.slow = True
    tensor = content(0)
    record = saved(mover, tensor=tensor)
    mover.send(record)
    tensor.add_(1)
    record.departure.over = True
    mover.settle()
    assert record.state is State.HERE
    assert torch.equal(record.views[0].alias, tensor)
    assert mover.evictable == {0: record}


# Staying after all


def test_a_record_that_stays_after_all_is_dropped_later_without_another_copy(mover: Mover, tier: object) -> None:
    tier.slow = True
    record = saved(mover)
    mover.send(record)
    mover.keep(record)
    assert record.state is State.HERE
    assert counted(mover) == (N, N, 0, 0)
    mover.drop(record)
    assert record.state is State.HERE, "its bytes are not out yet"
    record.departure.over = True
    mover.settle()
    assert (record.state, mover.held) == (State.HERE, N)
    mover.send(record)
    assert (record.state, mover.held) == (State.OUT, 0)
    assert tier.offloads == [N]


def test_a_record_that_stayed_leaves_with_the_copy_that_is_in_flight_still(mover: Mover, tier: object) -> None:
    tier.slow = True
    record = saved(mover)
    mover.send(record)
    mover.keep(record)
    mover.send(record)
    assert counted(mover) == (N, N, N, 1)
    record.departure.over = True
    mover.settle()
    assert (record.state, tier.offloads) == (State.OUT, [N])
    die(mover, record)
    assert not mover.wait_for_dead(), "nothing of it is in flight any more"


# Back


def test_a_record_comes_back_with_its_bytes(mover: Mover, tier: object) -> None:
    record = out(mover)
    tier.slow = True
    mover.fetch(record)
    arrival = record.arrival
    assert record.state is State.COMING
    assert counted(mover) == (N, N, 0, 0)
    assert (mover.counters.back, mover.log[-1]) == (N, ("back", 0, arrival))
    mover.receive(record)
    assert (record.state, record.arrival, arrival.over) == (State.BACK, None, True)
    assert torch.equal(record.flat, content(0))
    assert mover.counters.stall_in == 1
    assert mover.evictable == {0: record}


def test_nothing_is_copied_back_while_somebody_keeps_the_original(mover: Mover, tier: object) -> None:
    mine = content(0)
    record = out(mover, tensor=mine)
    mover.fetch(record)
    assert (record.state, tier.reloads) == (State.BACK, [])
    assert record.flat.data_ptr() == mine.data_ptr()
    assert counted(mover) == (N, N, 0, 0)
    assert mover.counters.back == 0


def test_a_copy_back_that_failed_raises_for_whoever_needs_it_and_again_the_next_time(
    mover: Mover, tier: object
) -> None:
    record = out(mover)
    tier.broken = True
    mover.fetch(record)
    for _ in range(2):
        with pytest.raises(SpillError, match="broken"):
            mover.receive(record)
    assert record.state is State.COMING


def test_a_copy_back_that_is_ordered_and_not_over_is_kept_for_the_next_stream(
    mover: Mover, tier: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = out(mover)
    tier.slow = True
    mover.fetch(record)
    arrival = record.arrival
    monkeypatch.setattr(arrival, "wait", lambda: 0.0)  # as on CUDA: the stream waits, the copy goes on
    mover.receive(record)
    assert (record.state, record.arrival) == (State.BACK, arrival)
    arrival.over = True
    mover.receive(record)
    assert record.arrival is None


# Dropping


def test_a_record_whose_bytes_are_nowhere_else_is_not_dropped(mover: Mover) -> None:
    record = saved(mover)
    mover.drop(record)
    assert (record.state, mover.held) == (State.HERE, N)


def test_a_record_that_came_back_is_dropped_without_a_copy(mover: Mover, tier: object) -> None:
    record = out(mover)
    mover.fetch(record)
    mover.receive(record)
    mover.drop(record)
    assert (record.state, record.flat, tier.offloads) == (State.OUT, None, [N])
    assert counted(mover) == (0, 0, 0, 0)
    assert mover.evictable == {}


def test_a_record_that_was_brought_ahead_in_vain_is_dropped_once_it_has_arrived(mover: Mover, tier: object) -> None:
    record = out(mover)
    tier.slow = True
    mover.fetch(record)
    mover.drop(record)
    assert (record.state, mover.held) == (State.COMING, N)
    record.arrival.over = True
    mover.drop(record)
    assert (record.state, record.arrival) == (State.OUT, None)
    assert counted(mover) == (0, 0, 0, 0)


def test_a_record_whose_copy_back_failed_is_not_dropped_so_that_its_use_raises(mover: Mover, tier: object) -> None:
    record = out(mover)
    tier.broken = True
    mover.fetch(record)
    mover.drop(record)
    assert record.state is State.COMING
    with pytest.raises(SpillError):
        mover.receive(record)


def test_what_a_backward_wrote_into_is_not_dropped(mover: Mover) -> None:
    record = out(mover)
    mover.fetch(record)
    mover.receive(record)
    record.views[0].fill(record.flat)
    record.views[0].alias.add_(1)
    mover.drop(record)
    assert (record.state, mover.held) == (State.BACK, N)


# The end


@pytest.mark.parametrize("where", ["here", "out", "back"])
def test_a_record_that_nobody_needs_leaves_nothing_behind(where: str, mover: Mover, tier: object) -> None:
    record = saved(mover) if where == "here" else out(mover)
    if where == "back":
        mover.fetch(record)
        mover.receive(record)
    die(mover, record)
    assert (record.state, record.flat) == (State.DEAD, None)
    assert counted(mover) == (0, 0, 0, 0)
    assert tier.slots == {}
    assert mover.evictable == {}


@pytest.mark.parametrize("failing", [False, True], ids=["a copy", "a copy that fails"])
def test_a_record_freed_on_its_way_out_is_held_until_its_copy_is_over(
    failing: bool, mover: Mover, tier: object
) -> None:
    tier.slow, tier.full = True, failing
    record = saved(mover)
    mover.send(record)
    die(mover, record)
    mover.settle()
    assert (mover.held, mover.leaving, mover.in_flight) == (N, 0, 1)
    assert tier.slots == {}, "nobody will read it"
    record.departure.over = True
    mover.settle()  # and raises nothing
    assert (mover.held, mover.in_flight) == (0, 0)


def test_a_record_that_stayed_and_was_freed_is_held_until_its_copy_is_over(mover: Mover, tier: object) -> None:
    tier.slow = True
    record = saved(mover)
    mover.send(record)
    mover.keep(record)
    die(mover, record)
    mover.settle()
    assert mover.held == N
    record.departure.over = True
    mover.settle()
    assert mover.held == 0


def test_memory_that_is_being_written_to_outlives_its_record(mover: Mover, tier: object) -> None:
    record = out(mover)
    tier.slow = True
    mover.fetch(record)
    die(mover, record)
    mover.settle()
    assert record.flat is not None
    assert counted(mover) == (N, N, 0, 0)
    record.arrival.over = True
    mover.settle()
    assert record.flat is None
    assert counted(mover) == (0, 0, 0, 0)


# Failures


@pytest.mark.parametrize("stays", [False, True], ids=["leaving", "stayed after all"])
def test_a_copy_out_that_failed_raises_once_and_its_record_is_where_it_was(
    stays: bool, mover: Mover, tier: object
) -> None:
    tier.slow = tier.full = True
    record = saved(mover)
    mover.send(record)
    if stays:
        mover.keep(record)
    record.departure.over = True
    with pytest.raises(SpillError, match="full"):
        mover.settle()
    mover.settle()
    assert (record.state, record.slot, tier.slots) == (State.HERE, None, {})
    assert mover.evictable == {0: record}
    assert counted(mover) == (N, N, 0, 0)
    tier.full = False
    mover.send(record)
    assert tier.offloads == [N, N], "the bytes are nowhere else: they have to be copied anew"


def test_a_failed_copy_does_not_keep_those_behind_it(mover: Mover, tier: object) -> None:
    failing, fine = saved(mover, 0), saved(mover, 1)
    tier.full = True
    mover.send(failing)
    tier.full = False
    mover.send(fine)
    with pytest.raises(SpillError):
        mover.settle()
    mover.settle()
    assert (failing.state, fine.state) == (State.HERE, State.OUT)


def test_giving_up_waits_for_all_that_is_in_flight_and_loses_nothing(mover: Mover, tier: object) -> None:
    abandoned = out(mover, 0)
    tier.slow = True
    mover.fetch(abandoned)
    die(mover, abandoned)
    leaving, staying, failing = (saved(mover, index) for index in (1, 2, 3))
    for record in (leaving, staying, failing):
        tier.full = record is failing
        mover.send(record)
    mover.keep(staying)
    mover.give_up()
    assert [record.state for record in (leaving, staying, failing)] == [State.OUT, State.HERE, State.HERE]
    assert (staying.clean, failing.slot) == (True, None)
    assert abandoned.flat is None
    assert counted(mover) == (2 * N, 2 * N, 0, 0)


# Waiting


def test_waiting_for_the_oldest_copy_out_gives_back_its_memory_alone(mover: Mover, tier: object) -> None:
    tier.slow = True
    first, second = saved(mover, 0), saved(mover, 1)
    for record in (first, second):
        mover.send(record)
    departure = first.departure
    mover.wait_for_oldest()
    assert departure.over
    assert (first.state, second.state) == (State.OUT, State.LEAVING)
    assert counted(mover) == (N, N, N, 1)
    assert mover.counters.stall_out == 1


def test_waiting_for_a_copy_out_that_fails_raises_and_its_record_is_where_it_was(mover: Mover, tier: object) -> None:
    tier.slow = tier.full = True
    record = saved(mover)
    mover.send(record)
    with pytest.raises(SpillError, match="full"):
        mover.wait_for_oldest()
    assert (record.state, mover.in_flight, mover.evictable) == (State.HERE, 0, {0: record})


def test_there_is_no_dead_record_to_wait_for_while_all_are_needed(mover: Mover, tier: object) -> None:
    coming = out(mover, 0)
    tier.slow = True
    leaving, staying = saved(mover, 1), saved(mover, 2)
    for record in (leaving, staying):
        mover.send(record)
    mover.keep(staying)
    mover.fetch(coming)
    assert not mover.wait_for_dead()
    assert not any(copy.over for copy in (leaving.departure, staying.departure, coming.arrival))


@pytest.mark.parametrize("failing", [False, True], ids=["a copy", "a copy that fails"])
def test_the_copy_back_of_a_freed_record_can_be_waited_for(failing: bool, mover: Mover, tier: object) -> None:
    record = out(mover)
    tier.slow, tier.broken = True, failing
    mover.fetch(record)
    arrival = record.arrival
    die(mover, record)
    assert mover.wait_for_dead()
    assert arrival.over
    assert counted(mover) == (0, 0, 0, 0)
    assert mover.counters.stall_in == 1
    assert not mover.wait_for_dead()


@pytest.mark.parametrize("failing", [False, True], ids=["a copy", "a copy that fails"])
def test_the_copy_out_of_a_freed_record_that_had_stayed_can_be_waited_for(
    failing: bool, mover: Mover, tier: object
) -> None:
    tier.slow, tier.full = True, failing
    record = saved(mover)
    mover.send(record)
    mover.keep(record)
    departure = record.departure
    die(mover, record)
    assert mover.wait_for_dead()
    assert departure.over
    assert mover.held == 0
    assert mover.counters.stall_out == 1
    assert not mover.wait_for_dead()


# Counting


def test_a_storage_is_present_once_however_often_it_is_counted(mover: Mover) -> None:
    tensor = content(0)
    for _ in range(3):
        mover.count_present(tensor.untyped_storage())
    assert mover.present == N
    del tensor
    assert mover.present == 0


def test_a_storage_that_turned_out_to_be_somebody_elses_is_not_counted_any_more(mover: Mover) -> None:
    tensor = content(0)
    mover.count_present(tensor.untyped_storage())
    for _ in range(2):
        mover.uncount(tensor.untyped_storage())
        assert mover.present == 0
    del tensor
    assert mover.present == 0


def test_the_peak_of_what_is_held_outlives_it(mover: Mover) -> None:
    first, second = saved(mover, 0), saved(mover, 1)
    die(mover, first)
    die(mover, second)
    saved(mover, 2)
    assert (mover.held, mover.counters.held_peak) == (N, 2 * N)


def test_the_counters_of_a_stretch_are_differences_and_its_peak_is_the_peak() -> None:
    counters = Counters(1, 2, 3.0, 4.0, 5.0, 6, held_peak=7)
    before = counters.copy()
    for name, more in zip(vars(counters), (10, 20, 30.0, 40.0, 50.0, 60, 70), strict=True):
        setattr(counters, name, getattr(counters, name) + more)
    assert counters.since(before) == Counters(10, 20, 30.0, 40.0, 50.0, 60, held_peak=77)
