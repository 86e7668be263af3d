"""The CUDA engine on streams of paper: pinned memory and its limits, the file past them, time, and the end."""

import itertools
import os
import re
import warnings
import weakref
from pathlib import Path
from types import ModuleType

import pytest

from lms.errors import CorruptionError, SpillError, UsageError
from lms.memory.file import FileSlab
from lms.memory.host import HostSlab
from lms.memory.transfer import ThreadCopy
from lms.torch.cuda.engine import STAGE, CudaEngine, HostSlot
from lms.torch.cuda.streams import StreamCopy

SIZE = 4096
ORDERS = list(itertools.permutations(("compute", "out", "back")))

# Slots


def test_host_memory_is_not_used_again_while_a_copy_back_reads_it(paper: ModuleType) -> None:
    for order in ORDERS:
        streams = paper.PaperStreams(order)
        engine = paper.engine_on(streams, limit=2 * SIZE)
        x, y = streams.empty(SIZE), streams.empty(SIZE)
        streams.fill(x, 1)
        streams.fill(y, 2)
        first, _ = engine.offload(x)
        back, copy = engine.reload(first)
        engine.discard(first)
        second, _ = engine.offload(y)
        third, _ = engine.offload(y)  # needs the first's place: the only time that the host waits
        copy.wait()
        seen: dict[int, bytes] = {}
        streams.look(back, seen, 1)
        streams.finish()
        assert seen == {1: bytes([1]) * SIZE}
        for slot in (second, third):
            again, copy = engine.reload(slot)
            copy.synchronize()
            assert bytes(paper.memory_of(again)) == bytes([2]) * SIZE
        engine.close()


def test_a_slot_keeps_its_memory_until_it_is_discarded_and_its_last_copy_is_over(paper: ModuleType) -> None:
    streams = paper.PaperStreams()
    engine = paper.engine_on(streams)

    def next_address() -> int:
        slot, _ = engine.offload(streams.empty(SIZE))
        assert isinstance(slot, HostSlot)
        streams.finish()
        engine.discard(slot)
        return slot.block.address

    slot, _ = engine.offload(streams.empty(SIZE))
    assert isinstance(slot, HostSlot)
    streams.finish()
    for _ in range(3):
        engine.reload(slot)
        streams.finish()
    assert next_address() != slot.block.address
    _, copy = engine.reload(slot)
    engine.discard(slot)
    other, _ = engine.offload(streams.empty(SIZE))
    assert isinstance(other, HostSlot)
    assert not copy.done()
    assert other.block.address != slot.block.address
    streams.finish()
    engine.link()
    assert next_address() == slot.block.address


def test_host_memory_is_unlocked_only_after_the_last_copy_that_uses_it(paper: ModuleType) -> None:
    locked: set[int] = set()
    streams = paper.PaperStreams()
    host = HostSlab(lambda address, _: locked.add(address), locked.remove, segment=SIZE)
    engine = CudaEngine(streams, host, None)
    slots = [engine.offload(streams.empty(SIZE))[0] for _ in range(3)]
    streams.finish()
    engine.reload(slots[0])
    for slot in slots:
        engine.discard(slot)
    for _ in range(3):
        engine.trim()
    assert len(locked) == 2, "a copy back reads the first one's, and a tenth is spare"
    assert slots[0].block.address in locked
    streams.finish()
    for _ in range(2):
        engine.trim()
    assert not locked
    engine.close()


def test_in_a_forked_child_the_engine_does_nothing(monkeypatch: pytest.MonkeyPatch, paper: ModuleType) -> None:
    locked: set[int] = set()
    streams = paper.PaperStreams()
    engine = CudaEngine(streams, HostSlab(lambda address, _: locked.add(address), locked.remove), None)
    slot, copy = engine.offload(streams.empty(SIZE))
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        engine.discard(slot)
        engine.close()
        with pytest.raises(SpillError, match="fork"):
            engine.offload(streams.empty(SIZE))
        with pytest.raises(SpillError, match="fork"):
            engine.reload(slot)
    assert not copy.done()
    assert locked
    back, copy = engine.reload(slot)
    copy.synchronize()
    assert back.nbytes == SIZE
    engine.close()
    assert locked == set()


def test_discarding_never_blocks_and_may_be_repeated(paper: ModuleType) -> None:
    streams = paper.PaperStreams()
    engine = paper.engine_on(streams)
    slot, copy = engine.offload(streams.empty(SIZE))
    assert isinstance(slot, HostSlot)
    engine.discard(slot)
    engine.discard(slot)
    assert not copy.done()
    with pytest.raises(ValueError, match="discarded"):
        engine.reload(slot)
    streams.finish()
    engine.close()


# Time


def test_bandwidth_is_that_of_the_copies_alone(paper: ModuleType) -> None:
    streams = paper.PaperStreams()
    engine = paper.engine_on(streams)
    assert engine.link() is None
    paper.run_pass(streams, engine)
    link = engine.link()
    assert link is not None
    assert link.name == "host"
    assert link.seconds_out(SIZE) == pytest.approx(SIZE / paper.BANDWIDTH)
    assert link.seconds_back(SIZE) == pytest.approx(SIZE / paper.BANDWIDTH)
    assert "4 copies out, 4 back" in link.source


def test_stalls_are_known_when_their_events_were_reached(paper: ModuleType) -> None:
    streams = paper.PaperStreams()
    engine = paper.engine_on(streams)
    x = streams.empty(SIZE)
    slot, out = engine.offload(x)
    streams.launch(paper.nothing, seconds=0.001)  # the copy takes 0.004096: the rest of it is waited for
    out.wait()
    assert engine.stalled() == (0.0, 0.0)
    streams.finish()
    assert engine.stalled() == (pytest.approx(0.003096), 0.0)
    _, back = engine.reload(slot)
    back.wait()
    back.wait()
    streams.finish()
    assert engine.stalled() == (pytest.approx(0.003096), pytest.approx(0.004096))


def test_a_copy_that_was_hidden_stalls_nothing(paper: ModuleType) -> None:
    streams = paper.PaperStreams()
    engine = paper.engine_on(streams)
    _, out = engine.offload(streams.empty(SIZE))
    streams.launch(paper.nothing, seconds=1.0)
    out.wait()
    streams.finish()
    assert engine.stalled() == (0.0, 0.0)
    assert out.span is None
    assert out.marks is not None
    assert streams.seconds(*out.marks) == pytest.approx(SIZE / paper.BANDWIDTH)


def test_calibration_moves_its_bytes_and_leaves_nothing_behind(paper: ModuleType) -> None:
    streams = paper.PaperStreams()
    engine = paper.engine_on(streams)
    link = engine.calibrate(SIZE)
    assert link.seconds_out(SIZE) == pytest.approx(SIZE / paper.BANDWIDTH)
    assert engine._host.used == 0
    assert engine.usage() == {"host": 8 * SIZE, "host_peak": 8 * SIZE}


# Limits


def test_past_the_limit_an_error_names_it_and_what_to_do(paper: ModuleType) -> None:
    streams = paper.PaperStreams()
    engine = paper.engine_on(streams, limit=2 * SIZE)
    kept = [engine.offload(streams.empty(SIZE)) for _ in range(2)]
    with pytest.raises(SpillError, match=r"host_limit: 4.1 KB .* 8.19 KB .*raise host_limit, give a spill_dir"):
        engine.offload(streams.empty(SIZE))
    engine.discard(kept[0][0])
    engine.offload(streams.empty(SIZE))


@pytest.mark.parametrize("order", ORDERS)
def test_past_the_limit_bytes_go_through_a_stage_to_the_file(
    order: tuple[str, ...], tmp_path: Path, paper: ModuleType
) -> None:
    size = 5 * SIZE + 100  # in pieces of one block, the stage's size here
    streams = paper.PaperStreams(order, block=size)
    engine = CudaEngine(streams, paper.host_slab(limit=2 * SIZE), FileSlab(tmp_path))
    slots = []
    for value in (1, 2, 3):
        x = streams.empty(size)
        streams.fill(x, value)
        slot, copy = engine.offload(x)
        assert isinstance(copy, ThreadCopy)
        slots.append((value, slot))
        del x
        copy.wait()
    usage = engine.usage()
    assert usage["host"] == 2 * SIZE
    assert usage["file"] == 3 * 6 * SIZE
    seen: dict[int, bytes] = {}
    for value, slot in reversed(slots):
        streams.fill(streams.empty(size), 99)
        y, copy = engine.reload(slot)
        copy.wait()
        streams.look(y, seen, value)
        engine.discard(slot)
        del y, copy
    streams.finish()
    assert seen == {value: bytes([value]) * size for value in (1, 2, 3)}
    engine.close()
    assert engine.usage()["file"] == 0


@pytest.mark.parametrize("lost", [("out", "compute"), ("back", "compute")])
def test_the_stages_copies_wait_for_the_computation_too(
    lost: tuple[str, str], tmp_path: Path, paper: ModuleType
) -> None:
    def right(lost: tuple[str, str] | None) -> bool:
        streams = paper.PaperStreams(("out", "back", "compute"), lost=lost)
        engine = CudaEngine(streams, paper.host_slab(limit=2 * SIZE), FileSlab(tmp_path))
        x = streams.empty(SIZE)
        streams.fill(x, 1)
        slot, copy = engine.offload(x)
        copy.wait()
        del x, copy
        streams.fill(streams.empty(SIZE), 99)
        y, copy = engine.reload(slot)
        copy.wait()
        seen: dict[int, bytes] = {}
        streams.look(y, seen, 0)
        streams.finish()
        engine.close()
        return seen[0] == bytes([1]) * SIZE

    assert right(None)
    assert not right(lost)


def test_host_memory_is_used_before_the_file(tmp_path: Path, paper: ModuleType) -> None:
    streams = paper.PaperStreams()
    engine = CudaEngine(streams, paper.host_slab(limit=STAGE * 2 + 2 * SIZE, segment=1 << 20), FileSlab(tmp_path))
    kinds = [type(engine.offload(streams.empty(SIZE))[1]) for _ in range(3)]
    assert kinds == [StreamCopy, StreamCopy, ThreadCopy]
    streams.finish()
    engine.close()


def test_a_limit_without_room_for_the_stages_is_refused(tmp_path: Path, paper: ModuleType) -> None:
    with pytest.raises(UsageError, match=r"host_limit=5000.*at least 8192"):
        CudaEngine(paper.PaperStreams(), paper.host_slab(limit=5000), FileSlab(tmp_path))


# A host that locks no more


class Lock:
    """A driver that refuses past `capacity` bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.locked: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> None:
        if sum(self.locked.values()) + nbytes > self.capacity:
            raise SpillError(f"locking {nbytes} bytes failed")
        self.locked[address] = nbytes

    def slab(self) -> HostSlab:
        return HostSlab(self.register, self.locked.__delitem__, segment=8 * SIZE)


def test_what_cannot_be_locked_goes_to_the_file_with_one_warning(tmp_path: Path, paper: ModuleType) -> None:
    streams = paper.PaperStreams()
    lock = Lock(2 * STAGE + 2 * SIZE)
    engine = CudaEngine(streams, lock.slab(), FileSlab(tmp_path))
    slots = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for value in range(1, 6):
            x = streams.empty(SIZE)
            streams.fill(x, value)
            slot, copy = engine.offload(x)
            copy.wait()
            slots.append((value, slot, type(copy)))
            del x, copy
    (warning,) = caught
    assert warning.category is RuntimeWarning
    assert re.search(r"33.6 MB could be locked.*spill_dir='.*'.*more host memory", str(warning.message))
    assert [kind for _, _, kind in slots] == [StreamCopy, StreamCopy, ThreadCopy, ThreadCopy, ThreadCopy]
    seen: dict[int, bytes] = {}
    for value, slot, _ in reversed(slots):
        y, copy = engine.reload(slot)
        copy.wait()
        streams.look(y, seen, value)
        engine.discard(slot)
        del y, copy
    streams.finish()
    assert seen == {value: bytes([value]) * SIZE for value in range(1, 6)}
    engine.close()
    assert lock.locked == {}


def test_without_a_file_what_cannot_be_locked_is_an_error_that_says_what_to_do(paper: ModuleType) -> None:
    streams = paper.PaperStreams()
    engine = CudaEngine(streams, Lock(2 * SIZE).slab(), None)
    kept = [engine.offload(streams.empty(SIZE)) for _ in range(2)]
    with pytest.raises(
        SpillError, match=r"host memory: 4.1 KB more were asked .* 8.19 KB are locked .* failed; .* give a spill_dir"
    ):
        engine.offload(streams.empty(SIZE))
    engine.discard(kept[0][0])
    engine.offload(streams.empty(SIZE))
    engine.close()


def test_stages_that_cannot_be_locked_are_an_error_and_nothing_stays_behind(tmp_path: Path, paper: ModuleType) -> None:
    lock, file = Lock(STAGE), FileSlab(tmp_path)
    with pytest.raises(SpillError, match=r"host memory: the file tier needs 33.6 MB locked .*more host memory"):
        CudaEngine(paper.PaperStreams(), lock.slab(), file)
    assert lock.locked == {}
    with pytest.raises(ValueError, match="closed"):
        file.fileno()


# The disk


def test_a_full_disk_fails_the_copy_and_keeps_the_source(tmp_path: Path, paper: ModuleType) -> None:
    streams = paper.PaperStreams()
    file = FileSlab(tmp_path)
    engine = CudaEngine(streams, paper.host_slab(limit=2 * SIZE), file)
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, file.fileno())
    os.close(full)
    x = streams.empty(SIZE)
    alive = weakref.ref(x)
    _, copy = engine.offload(x)
    del x
    with pytest.raises(SpillError, match="spill_dir"):
        copy.wait()
    assert alive() is not None
    engine.close()


# Verification, and the end


def test_a_flipped_byte_in_host_memory_is_found_out(paper: ModuleType) -> None:
    streams = paper.PaperStreams()
    engine = paper.engine_on(streams, verify=True)
    x = streams.empty(SIZE)
    streams.fill(x, 7)
    slot, _ = engine.offload(x)
    assert isinstance(slot, HostSlot)
    _, copy = engine.reload(slot)
    copy.wait()
    slot.block.memory[slot.block.offset + 100] ^= 1
    _, copy = engine.reload(slot)
    with pytest.raises(CorruptionError, match="host memory"):
        copy.wait()
    with pytest.raises(CorruptionError):
        copy.synchronize()


def test_closing_waits_for_the_copies_and_unlocks_the_memory(paper: ModuleType) -> None:
    locked: set[int] = set()
    streams = paper.PaperStreams()
    host = HostSlab(lambda address, _: locked.add(address), locked.remove)
    engine = CudaEngine(streams, host, None)
    _, copy = engine.offload(streams.empty(SIZE))
    assert len(locked) == 1
    engine.close()
    engine.close()
    assert copy.done()
    assert locked == set()
    with pytest.raises(SpillError, match="closed"):
        engine.offload(streams.empty(SIZE))


def test_an_engine_that_is_forgotten_unlocks_its_memory_after_its_copies(paper: ModuleType) -> None:
    locked: set[int] = set()
    streams = paper.PaperStreams()
    engine = CudaEngine(streams, HostSlab(lambda address, _: locked.add(address), locked.remove), None)
    _, copy = engine.offload(streams.empty(SIZE))
    del engine
    assert locked == set()
    assert copy.done()
