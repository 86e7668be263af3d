"""The pinned slab: what is locked, what it is carved into, and what the limit means."""

import pytest

from lms.errors import SpillError
from lms.tiers.host import HostSlab
from lms.tiers.slab import ALIGNMENT

MB = 1 << 20


class Lock:
    """What a GPU's driver would lock, and a driver that refuses past `capacity`."""

    def __init__(self, capacity: int = 1 << 40) -> None:
        self.locked: dict[int, int] = {}
        self.capacity = capacity

    def register(self, address: int, nbytes: int) -> None:
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


def test_memory_that_the_host_refuses_is_an_error_and_leaves_the_slab_as_it_was() -> None:
    slab = slab_of(Lock(capacity=4 * MB))
    block = slab.allocate(4 * MB)
    assert block is not None
    with pytest.raises(SpillError, match="locking failed"):
        slab.allocate(1)
    assert slab.reserved == 4 * MB
    slab.free(block)
    assert slab.allocate(4 * MB) is not None


def test_everything_is_unlocked_at_close_and_the_peak_remains_known() -> None:
    lock = Lock()
    slab = slab_of(lock)
    for _ in range(3):
        assert slab.allocate(3 * MB) is not None
    slab.close()
    slab.close()
    assert lock.locked == {}
    assert (slab.reserved, slab.peak) == (0, 12 * MB)
