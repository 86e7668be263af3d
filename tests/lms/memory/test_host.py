"""The pinned slab: what is locked, what it is carved into, and what the limit means."""

import pytest

import lms.memory.host as module
from lms.errors import SpillError
from lms.memory.host import HostSlab
from lms.memory.slab import ALIGNMENT

MB = 1 << 20


class Lock:
    """What a GPU's driver would lock, and a driver that refuses past `capacity`."""

    def __init__(self, capacity: int = 1 << 40) -> None:
        self.locked: dict[int, int] = {}
        self.capacity = capacity
        self.attempts = 0

    def register(self, address: int, nbytes: int) -> None:
        self.attempts += 1
        assert address % ALIGNMENT == 0
        assert address not in self.locked
        if sum(self.locked.values()) + nbytes > self.capacity:
            raise SpillError("host memory: locking failed")
        self.locked[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.locked[address]

    @property
    def total(self) -> int:
        return sum(self.locked.values())


def slab_of(lock: Lock, limit: int | None = None, segment: int = 4 * MB) -> HostSlab:
    return HostSlab(lock.register, lock.unregister, limit=limit, segment=segment)


def test_nothing_is_locked_before_it_is_needed() -> None:
    lock = Lock()
    slab_of(lock, limit=64 * MB)
    assert lock.total == 0


def test_it_grows_by_segments_and_carves_each_before_it_locks_another() -> None:
    lock = Lock()
    slab = slab_of(lock)
    blocks = [slab.allocate(MB) for _ in range(4)]
    assert len(lock.locked) == 1
    assert lock.total == slab.reserved == 4 * MB
    addresses = sorted(block.address for block in blocks if block is not None)
    assert addresses == [addresses[0] + index * MB for index in range(4)]
    assert slab.allocate(MB) is not None
    assert len(lock.locked) == 2


def test_a_request_longer_than_a_segment_is_locked_byte_for_byte() -> None:
    lock = Lock()
    slab = slab_of(lock)
    assert slab.allocate(9 * MB + 1) is not None
    assert lock.total == 9 * MB + ALIGNMENT  # and no power of two


def test_blocks_are_memory_that_can_be_used() -> None:
    slab = slab_of(Lock())
    first, second = slab.allocate(5000), slab.allocate(5000)
    assert first is not None
    assert second is not None
    first.memory[first.offset : first.offset + 5000] = b"1" * 5000
    second.memory[second.offset : second.offset + 5000] = b"2" * 5000
    assert first.memory[first.offset : first.offset + 5000] == b"1" * 5000


def test_freed_blocks_are_used_again_without_locking_more() -> None:
    lock = Lock()
    slab = slab_of(lock)
    for _ in range(20):
        block = slab.allocate(3 * MB)
        assert block is not None
        slab.free(block)
    assert lock.total == 4 * MB
    assert slab.used == 0


def test_the_limit_bounds_what_is_locked_and_the_last_segment_is_cut_to_it() -> None:
    lock = Lock()
    slab = slab_of(lock, limit=6 * MB)
    assert slab.allocate(4 * MB) is not None
    assert slab.allocate(MB) is not None
    assert lock.total == 6 * MB
    assert slab.allocate(MB) is not None
    assert slab.allocate(1) is None
    assert lock.total == 6 * MB


def test_a_limit_that_is_no_whole_number_of_pages_is_not_passed() -> None:
    lock = Lock()
    slab = slab_of(lock, limit=2 * ALIGNMENT + 100)
    assert slab.allocate(2 * ALIGNMENT) is not None
    assert slab.allocate(1) is None
    assert lock.total == 2 * ALIGNMENT


def test_where_the_host_refuses_a_segment_what_is_needed_is_locked_and_no_more() -> None:
    lock = Lock(capacity=6 * MB)
    slab = slab_of(lock)
    assert slab.allocate(4 * MB) is not None
    assert slab.refused is None
    assert slab.allocate(MB) is not None
    assert slab.reserved == lock.total == 5 * MB
    assert slab.refused == "host memory: locking failed"


def test_what_the_host_refused_is_not_asked_for_again_and_less_is() -> None:
    lock = Lock(capacity=5 * MB)
    slab = slab_of(lock)
    block = slab.allocate(4 * MB)
    assert block is not None
    assert slab.allocate(3 * MB) is None
    attempts = lock.attempts
    assert slab.allocate(3 * MB) is None
    assert slab.allocate(9 * MB) is None
    assert lock.attempts == attempts
    assert slab.allocate(MB) is not None
    assert slab.reserved == 5 * MB
    slab.free(block)
    assert slab.allocate(3 * MB) is not None, "what is locked can be used again"


def test_memory_that_is_not_even_there_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: int) -> object:
        raise SpillError("no memory")

    slab = slab_of(Lock())
    monkeypatch.setattr(module, "page_memory", none)
    assert slab.allocate(MB) is None
    assert slab.refused == "no memory"


def test_what_is_not_needed_any_more_is_unlocked() -> None:
    lock = Lock()
    slab = slab_of(lock)
    blocks = [slab.allocate(4 * MB) for _ in range(10)]
    slab.trim()
    assert lock.total == 40 * MB, "all of it was used"
    for block in blocks[3:]:
        slab.free(block)
    slab.trim()
    assert lock.total == 40 * MB, "all of it was used since the last time"
    slab.trim()
    assert lock.total == slab.reserved == 16 * MB, "three blocks, and a spare segment"
    assert slab.peak == 40 * MB
    for block in blocks[:3]:
        slab.free(block)
    slab.trim()
    slab.trim()
    assert lock.total == 0


def test_nothing_is_unlocked_once_the_host_has_refused_more() -> None:
    lock = Lock(capacity=24 * MB)
    slab = slab_of(lock)
    blocks = [slab.allocate(4 * MB) for _ in range(7)]
    assert blocks[6] is None
    for block in blocks[:6]:
        slab.free(block)
    slab.trim()
    slab.trim()
    assert lock.total == 24 * MB
    assert slab.allocate(4 * MB) is not None


def test_what_had_to_be_locked_again_is_not_unlocked_again() -> None:
    lock = Lock()
    slab = slab_of(lock)
    for block in [slab.allocate(4 * MB) for _ in range(3)]:
        slab.free(block)
    slab.trim()
    slab.trim()
    for _ in range(4):
        for block in [slab.allocate(4 * MB) for _ in range(2)]:
            slab.free(block)
        slab.trim()
        slab.trim()
    assert (lock.total, lock.attempts) == (8 * MB, 5)


def test_everything_is_unlocked_at_close_and_the_peak_remains_known() -> None:
    lock = Lock()
    slab = slab_of(lock)
    for _ in range(3):
        assert slab.allocate(3 * MB) is not None
    slab.close()
    slab.close()
    assert lock.locked == {}
    assert (slab.reserved, slab.peak) == (0, 12 * MB)
