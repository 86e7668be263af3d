"""Records' bytes on their ways out and back, under a stepper, and what is counted of them."""

from __future__ import annotations

import weakref
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lms.core.items import State
from lms.core.stepper import Stepper
from lms.errors import SpillError
from lms.runtime.recorder import Counters
from lms.torch import mover as mover_module
from lms.torch.mover import Mover
from lms.torch.records import LiveRecord, View

CPU = torch.device("cpu")
N = 64  # bytes of a record


class Run:
    """One record at a time, moved by the rule within a room that changes."""

    def __init__(self, tier: object) -> None:
        self.mover = Mover(tier, CPU)
        self.stepper: Stepper[LiveRecord] = Stepper(self.mover, room=lambda _: self.room)
        self.room = 1000 * N

    def saved(self, tensor: Tensor | None = None) -> LiveRecord:
        """A record as the swapper makes it; without `tensor` nobody else keeps its storage."""
        tensor = content() if tensor is None else tensor
        storage = tensor.untyped_storage()
        record = LiveRecord(len(self.stepper.items), (storage._cdata, 0), storage.nbytes())
        record.origin = weakref.ref(storage)
        record.views.append(View(tensor))
        self.stepper.add(record)
        self.mover.storages.count_made(storage)
        return record

    def send(self, record: LiveRecord) -> None:
        """The rule has the record leave, and does not wait for it."""
        self.room = self.stepper.holdings.held
        self.stepper.access(record, read=False)

    def away(self, tensor: Tensor | None = None) -> LiveRecord:
        record = self.saved(tensor)
        self.send(record)
        self.stepper.holdings.settle()
        assert record.state is State.AWAY
        return record

    def back(self, tensor: Tensor | None = None) -> LiveRecord:
        record = self.away(tensor)
        self.stepper.require(record)
        assert record.state is State.HERE
        return record

    def die(self, record: LiveRecord) -> None:
        """The record's last handle ends, as in the swapper."""
        record.views.clear()
        self.stepper.holdings.free(record)

    @property
    def counted(self) -> tuple[int, int]:
        return self.stepper.holdings.held, self.mover.storages.present


@pytest.fixture
def run(tier: object, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run to whose clock every wait takes one second."""
    monkeypatch.setattr(mover_module, "time", SimpleNamespace(perf_counter=count(10).__next__))
    return Run(tier)


def content() -> Tensor:
    return torch.arange(N, dtype=torch.uint8)


# Out


def test_a_record_that_leaves_keeps_its_memory_until_its_copy_is_over(run: Run, tier: object) -> None:
    tier.slow = True
    record = run.saved()
    run.send(record)
    assert (record.state, run.counted) == (State.LEAVING, (N, N))
    assert (run.mover.counters.out, run.mover.log) == (N, [("out", 0, record.departure)])
    record.departure.over = True
    run.stepper.holdings.settle()
    assert (record.state, run.counted) == (State.AWAY, (0, 0))


def test_memory_that_somebody_else_keeps_is_present_and_not_held(run: Run) -> None:
    mine = content()
    run.away(mine)
    assert run.counted == (0, N)
    del mine
    assert run.counted == (0, 0)


@pytest.mark.parametrize("others", [0, 1], ids=["its only view", "one of its views"])
def test_a_record_that_was_changed_in_place_stays(others: int, run: Run, tier: object) -> None:
    tensor = content()
    record = run.saved(tensor)
    record.views += [View(tensor.data)] * others  # the same bytes, and a version counter of its own
    tensor.add_(1)
    run.send(record)
    assert (record.state, tier.offloads, run.stepper.holdings.held) == (State.HERE, [], N)


def test_a_record_without_a_view_stays(run: Run, tier: object) -> None:
    record = run.saved()
    record.views.clear()  # an interrupt came before the first
    run.send(record)
    assert (record.state, tier.offloads) == (State.HERE, [])


def test_what_changes_in_place_while_its_copy_out_is_in_flight_leaves_and_its_use_raises(
    run: Run, tier: object
) -> None:
    tier.slow = True
    tensor = content()
    record = run.saved(tensor)
    run.send(record)
    tensor.add_(1)
    record.departure.over = True
    run.stepper.holdings.settle()
    assert (record.state, run.stepper.holdings.held) == (State.AWAY, 0)
    with pytest.raises(RuntimeError, match=r"ByteTensor \[64\]\] is at version 1; expected version 0"):
        record.views[0].check()


# Back


def test_a_record_comes_back_with_its_bytes(run: Run, tier: object) -> None:
    record = run.away()
    tier.slow = True
    run.stepper.require(record)
    assert (record.state, record.arrival, run.counted) == (State.HERE, None, (N, N))
    assert torch.equal(record.flat, content())
    assert (run.mover.counters.back, run.mover.counters.stall_in) == (N, 1)
    assert [(lane, index, copy.over) for lane, index, copy in run.mover.log] == [("out", 0, True), ("back", 0, True)]


def test_nothing_is_copied_back_while_somebody_keeps_the_original(run: Run, tier: object) -> None:
    mine = content()
    record = run.back(mine)
    assert record.flat.data_ptr() == mine.data_ptr()
    assert (tier.reloads, run.mover.counters.back, run.counted) == ([], 0, (N, N))


def test_a_record_that_came_back_is_dropped_without_a_copy(run: Run, tier: object) -> None:
    record = run.back()
    run.send(record)
    assert (record.state, record.flat, tier.offloads, run.counted) == (State.AWAY, None, [N], (0, 0))


def test_copies_of_records_that_were_left_behind_are_no_part_of_the_pass(run: Run) -> None:
    record = run.saved()
    run.stepper.holdings.leave_behind(record)
    run.send(record)
    run.stepper.holdings.settle()
    run.stepper.require(record)
    assert (run.mover.counters.out, run.mover.counters.back, run.mover.log) == (N, N, [])


# The end


@pytest.mark.parametrize("where", ["saved", "away", "back"])
def test_a_record_that_nobody_needs_leaves_nothing_behind(where: str, run: Run, tier: object) -> None:
    record = getattr(run, where)()
    run.die(record)
    assert (record.state, record.flat, tier.slots, run.counted) == (State.DEAD, None, {}, (0, 0))


def test_the_wait_for_a_copy_out_is_counted_even_if_it_fails(run: Run, tier: object) -> None:
    tier.slow = tier.full = True
    run.room = 0
    record = run.saved()
    with pytest.raises(SpillError, match="full"):
        run.stepper.access(record, read=False)
    assert (record.state, record.slot) == (State.HERE, None)
    assert (run.mover.counters.stall_out, run.mover.counters.stall_in, tier.slots) == (1, 0, {})


# Counting


def test_a_storage_is_present_once_however_often_it_is_counted(run: Run) -> None:
    tensor = content()
    for _ in range(3):
        run.mover.storages.count_made(tensor.untyped_storage())
    assert run.mover.storages.present == N
    del tensor
    assert run.mover.storages.present == 0


def test_a_storage_that_turned_out_to_be_somebody_elses_is_not_counted_any_more(run: Run) -> None:
    tensor = content()
    run.mover.storages.count_made(tensor.untyped_storage())
    for _ in range(2):
        run.mover.storages.uncount(tensor.untyped_storage())
        assert run.mover.storages.present == 0
    del tensor
    assert run.mover.storages.present == 0


def test_the_counters_of_a_stretch_are_differences() -> None:
    counters = Counters(1, 2, 3.0, 4.0, 5.0)
    before = replace(counters)
    for name, more in zip(vars(counters), (10, 20, 30.0, 40.0, 50.0), strict=True):
        setattr(counters, name, getattr(counters, name) + more)
    assert counters.since(before) == Counters(10, 20, 30.0, 40.0, 50.0)
