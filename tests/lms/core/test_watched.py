"""A stepper that has only the items that move, and is called only if it must be, does what one with all items does."""

from __future__ import annotations

from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lms.core.items import Item
from lms.core.link import Link
from lms.core.plan import Plan, make_plan
from lms.core.replay import replay
from lms.core.schedule import Course
from lms.core.stepper import Stepper
from lms.core.trace import Access, Tensor, Trace


class Copy:
    """It is over `delay` accesses after it began."""

    failed = None

    def __init__(self, mover: Mover) -> None:
        self.mover, self.end = mover, mover.now + mover.delay

    def done(self) -> bool:
        return self.end <= self.mover.now

    def wait(self) -> None:
        self.end = self.mover.now

    synchronize = wait


class Mover:
    """Notes what is moved at which access."""

    def __init__(self, delay: int) -> None:
        self.delay = delay
        self.now = 0
        self.moved: list[tuple[int, str, int]] = []

    def offload(self, item: Item) -> Copy:
        self.moved.append((self.now, "out", item.index))
        return Copy(self)

    def reload(self, item: Item) -> Copy:
        self.moved.append((self.now, "back", item.index))
        return Copy(self)

    def wait(self, item: Item, lane: str) -> None:
        copy = item.departure if lane == "out" else item.arrival
        assert copy is not None
        copy.wait()

    def release(self, item: Item) -> None:
        pass

    def discard(self, item: Item) -> None:
        pass

    def forget(self, item: Item) -> None:
        pass


def all_items(trace: Trace, course: Course, delay: int) -> tuple[Mover, Stepper[Item]]:
    mover = Mover(delay)
    stepper: Stepper[Item] = Stepper(mover, room=lambda _: 0)

    def reach(access: int) -> None:
        mover.now = access

    replay(trace, course, stepper, reach)
    return mover, stepper


def those_that_move(trace: Trace, plan: Plan, course: Course, delay: int) -> tuple[Mover, Stepper[Item], int]:
    """The rest is watched, as C++ does it."""
    mover = Mover(delay)
    stepper: Stepper[Item] = Stepper(mover, room=lambda _: 0)
    stepper.begin(course)
    moving = {move.tensor for move in plan.moves}
    nbytes = due = calls = 0
    for position, access in enumerate(trace.accesses):
        mover.now = position
        for index, tensor in enumerate(trace.tensors):
            if tensor.freed == position and index in moving:
                stepper.holdings.free(stepper.items[index])
            elif tensor.freed == position and not tensor.pinned:
                nbytes -= tensor.nbytes
        before, index = nbytes, access.tensor
        is_new = trace.touches[index][0] == position
        if index not in moving and is_new and not trace.tensors[index].pinned:
            nbytes += trace.tensors[index].nbytes
        fits = stepper.holdings.own + nbytes <= course.cap[position]
        if index not in moving and position < due and fits:
            continue
        calls += 1
        stepper.skip_to(position, before)
        stepper.holdings.settle()
        stepper.drop_due()
        item = None
        if index in moving:
            if is_new:
                stepper.add(Item(index, trace.tensors[index].nbytes))
            item = stepper.items[index]
            if access.kind == "read":
                stepper.require(item)
        stepper.skip_to(position, nbytes)
        stepper.access(item, read=access.kind == "read")
        assert stepper.holdings.held <= max(course.cap[position], course.most_held or 0)
        due = stepper.next_due
    return mover, stepper, calls


@settings(max_examples=500)
@given(st.data())
def test_it_moves_the_same_at_the_same_accesses(traces: ModuleType, data: st.DataObject) -> None:
    trace: Trace = data.draw(traces.passes())
    budget, ahead = data.draw(st.integers(0, trace.saved)), data.draw(st.sampled_from([None, None, 0, 1, 2]))
    plan = make_plan(trace, data.draw(traces.LINKS), budget=budget, write_ahead=ahead)
    course = Course(plan, plan.forecast.held_peak)
    delay = data.draw(st.sampled_from([0, 1, 3, len(trace.accesses)]))
    mover, stepper = all_items(trace, course, delay)
    expected, misses = mover.moved, stepper.misses
    mover, stepper, calls = those_that_move(trace, plan, course, delay)
    assert mover.moved == expected
    assert stepper.misses == misses
    if not plan.moves and plan.forecast.held_peak <= budget:
        assert calls == 1, "the first access, and no other"


@pytest.mark.parametrize("delay", [0, 1, 3, 9])
def test_a_copy_out_that_is_slower_than_forecast_is_waited_for_and_nothing_else_leaves(delay: int) -> None:
    tensors = (Tensor(1, 9, let_go=4), Tensor(1, 4), Tensor(2, 4), Tensor(2, 5), Tensor(1, 8))
    order = [("write", 0), ("write", 1), ("hold", 0), ("write", 2), ("write", 3), ("read", 0), ("write", 4)]
    accesses = tuple(
        Access(kind, tensor, 2.0 if tensor == 2 else 0.0, 0)  # type: ignore[arg-type]
        for kind, tensor in [*order, ("read", 4), ("read", 0)]
    )
    trace = Trace(tensors, accesses, tail=0.0, tail_other=0)
    plan = make_plan(trace, Link("slow", 0.5, 0.5, 0.0), budget=2)
    mover, _ = all_items(trace, Course(plan, plan.forecast.held_peak), delay)
    assert mover.moved == [(1, "out", 1)] == [(move.after, "out", move.tensor) for move in plan.moves]
