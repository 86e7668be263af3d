"""Who uses a slot, and when its room is free."""

import gc
import random
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest

from lms.memory.slots import Ledger, Slot


@pytest.fixture
def freed() -> list[Slot]:
    return []


@pytest.fixture
def ledger(freed: list[Slot]) -> Ledger[Slot]:
    return Ledger(freed.append)


def test_a_slot_is_freed_once_its_last_user_has_left(ledger: Ledger[Slot], freed: list[Slot]) -> None:
    slot = Slot(10)
    with ledger.lock:
        ledger.use(slot)
        ledger.use(slot)
    ledger.leave(slot)
    ledger.drop(slot)
    assert freed == []
    ledger.leave(slot)
    assert freed == [slot]


def test_dropping_may_be_repeated_and_counts_once(ledger: Ledger[Slot], freed: list[Slot]) -> None:
    slot = Slot(10)
    with ledger.lock:
        ledger.use(slot)
    ledger.drop(slot)
    ledger.drop(slot)
    assert freed == []
    ledger.leave(slot)
    assert freed == [slot]


def test_a_dropped_slot_takes_no_user(ledger: Ledger[Slot]) -> None:
    slot = Slot(10)
    ledger.drop(slot)
    with ledger.lock, pytest.raises(ValueError, match="discarded"):
        ledger.use(slot)


def test_a_user_that_leaves_while_the_lock_is_held_is_counted_by_the_next_holder(
    ledger: Ledger[Slot], freed: list[Slot]
) -> None:
    first, second = Slot(1), Slot(2)
    with ledger.lock:
        ledger.drop(first)
        assert freed == []
        ledger.count()
        assert freed == [first]
        ledger.drop(second)
    assert freed == [first]
    ledger.settle()
    assert freed == [first, second]


def test_a_drop_from_inside_a_free_is_counted_too(freed: list[Slot]) -> None:
    """What is freed may end another slot, as the collector does in the middle of anything."""
    inner, outer = Slot(1), Slot(2)

    def free(slot: Slot) -> None:
        if slot is outer:
            ledger.drop(inner)
        freed.append(slot)

    ledger = Ledger(free)
    ledger.drop(outer)
    assert freed == [outer, inner]


def test_settling_does_first_what_it_is_given_and_nothing_while_the_lock_is_held(
    ledger: Ledger[Slot], freed: list[Slot]
) -> None:
    slot = Slot(1)
    ledger.settle(lambda: ledger.leave(slot))
    assert freed == [slot]
    called: list[int] = []
    with ledger.lock:
        ledger.settle(lambda: called.append(1))
    assert called == []


def test_an_error_on_the_way_lets_go_of_the_lock(ledger: Ledger[Slot]) -> None:
    with pytest.raises(ZeroDivisionError):
        ledger.settle(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    assert not ledger.lock.locked()


def test_a_ledger_does_not_keep_its_owner_alive(freed: list[Slot]) -> None:
    ledger = Ledger(freed.append)
    alive = weakref.ref(ledger)
    gc.disable()
    try:
        del ledger
        assert alive() is None
    finally:
        gc.enable()


@pytest.fixture
def _quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_quick_switches")
def test_threads_that_leave_at_once_free_each_slot_once(ledger: Ledger[Slot], freed: list[Slot]) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    slots = [Slot(index) for index in range(500)]
    with ledger.lock:
        for slot in slots:
            for _ in range(3):
                ledger.use(slot)
    orders = [random.Random(seed + index).sample(slots, len(slots)) for index in range(4)]

    def leave(order: list[Slot], last: bool) -> None:
        for slot in order:
            (ledger.drop if last else ledger.leave)(slot)

    threads = [threading.Thread(target=leave, args=(order, index == 3)) for index, order in enumerate(orders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger.settle()
    assert sorted(slot.nbytes for slot in freed) == list(range(500))
