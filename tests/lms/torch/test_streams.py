"""The CUDA engine on streams of paper: every order that a GPU might choose, and what each wait is there for."""

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import lms.torch.engine as module
from lms.errors import CorruptionError, SpillError, UsageError
from lms.tiers.file import FileSlab
from lms.tiers.host import HostSlab
from lms.torch.engine import CudaEngine, HostSlot
from lms.torch.streams import Event, Stream, StreamCopy
from lms.transfer import ThreadCopy

SIZE = 4096
BANDWIDTH = 1e6  # bytes in a logical second
NAMES = ("compute", "out", "back")
ORDERS = list(itertools.permutations(NAMES))


@dataclass(eq=False)
class PaperEvent:
    stream: str
    time: float | None = None  # None: not reached


@dataclass(eq=False)
class PaperStream:
    name: str
    clock: float = 0.0
    queue: deque[tuple[str, object, float]] = field(default_factory=deque)


class PaperStreams:
    """Streams that do nothing until the host blocks, and then run in the order that is worst.

    `order` says which stream runs first of those that can; `lost` are waits that are left out, each as
    (stream that waits, stream that is waited for). Memory comes from a pool that gives a block out again as soon as its
    tensor is gone, as the real one does for work of the stream that the block belongs to.
    """

    def __init__(
        self, order: tuple[str, ...] = NAMES, lost: tuple[str, str] | None = None, blocks: int = 8, block: int = SIZE
    ) -> None:
        self.device = torch.device("cpu")
        self.order, self.lost = order, lost
        self.all = {name: PaperStream(name) for name in (*NAMES, "side")}
        self.out: Stream = self.all["out"]
        self.back: Stream = self.all["back"]
        self._current = "compute"
        self._lock = threading.RLock()  # the file's threads use streams too
        self._block = block
        self._arena = bytearray(blocks * block)
        self._free = list(range(blocks))

    # What the engine asks of a GPU

    def current(self) -> Stream:
        return self.all[self._current]

    def record(self, stream: Stream) -> Event:
        assert isinstance(stream, PaperStream)
        event = PaperEvent(stream.name)
        with self._lock:
            stream.queue.append(("event", event, 0.0))
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        assert isinstance(stream, PaperStream)
        assert isinstance(event, PaperEvent)
        with self._lock:
            if (stream.name, event.stream) != self.lost:
                stream.queue.append(("wait", event, 0.0))

    def copy(self, stream: Stream, destination: torch.Tensor, source: torch.Tensor) -> None:
        # By address: a queued copy on a GPU keeps nothing alive.
        assert isinstance(stream, PaperStream)
        there, here = memory_of(destination), memory_of(source)

        def copy() -> None:
            there[:] = here

        with self._lock:
            stream.queue.append(("run", copy, source.nbytes / BANDWIDTH))

    def empty(self, nbytes: int) -> torch.Tensor:
        assert nbytes <= self._block
        at = min(self._free)
        self._free.remove(at)
        view = memoryview(self._arena)[at * self._block : at * self._block + nbytes]
        tensor = torch.frombuffer(view, dtype=torch.uint8)
        weakref.finalize(tensor.untyped_storage(), self._free.append, at)
        return tensor

    def done(self, event: Event) -> bool:
        assert isinstance(event, PaperEvent)
        return event.time is not None

    def synchronize(self, event: Event) -> None:
        assert isinstance(event, PaperEvent)
        with self._lock:
            while event.time is None:
                assert self._step(), "a deadlock"

    def seconds(self, start: Event, end: Event) -> float:
        assert isinstance(start, PaperEvent)
        assert isinstance(end, PaperEvent)
        assert start.time is not None
        assert end.time is not None
        return end.time - start.time

    # What a model would do

    def launch(self, work: Callable[[], None], seconds: float = 0.001) -> None:
        with self._lock:
            self.all[self._current].queue.append(("run", work, seconds))

    def fill(self, tensor: torch.Tensor, value: int) -> None:
        memory = memory_of(tensor)

        def fill() -> None:
            memory[:] = bytes([value]) * len(memory)

        self.launch(fill)

    def look(self, tensor: torch.Tensor, seen: dict[int, bytes], key: int) -> None:
        memory = memory_of(tensor)

        def look() -> None:
            seen[key] = bytes(memory)

        self.launch(look)

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        before, self._current = self._current, name
        yield
        self._current = before

    def finish(self) -> None:
        with self._lock:
            while self._step():
                pass
            assert all(not stream.queue for stream in self.all.values()), "a deadlock"

    def _step(self) -> bool:
        for name in (*self.order, "side"):
            stream = self.all[name]
            if not stream.queue:
                continue
            kind, what, seconds = stream.queue[0]
            if kind == "wait":
                assert isinstance(what, PaperEvent)
                if what.time is None:
                    continue
                stream.clock = max(stream.clock, what.time)
            elif kind == "event":
                assert isinstance(what, PaperEvent)
                what.time = stream.clock
            else:
                assert callable(what)
                what()
                stream.clock += seconds
            stream.queue.popleft()
            return True
        return False


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's memory, without the tensor: what a queued operation holds."""
    import ctypes

    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def nothing(*_: object) -> None:
    pass


def host_slab(limit: int | None = None, segment: int = 8 * SIZE) -> HostSlab:
    return HostSlab(nothing, nothing, limit=limit, segment=segment)


def engine_on(streams: PaperStreams, *, limit: int | None = None, verify: bool = False) -> CudaEngine:
    return CudaEngine(streams, host_slab(limit), None, verify=verify)


# One pass, and every wait in it


def run_pass(streams: PaperStreams, engine: CudaEngine, *, records: int = 4) -> dict[int, bytes]:
    """A forward and a backward in as little memory as can be; what the backward saw of each record."""
    seen: dict[int, bytes] = {}
    slots = []
    for value in range(1, records + 1):
        x = streams.empty(SIZE)
        streams.fill(x, value)
        slot, copy = engine.offload(x)
        slots.append((value, slot))
        del x
        if value < records:  # the last one is still in flight when the backward asks for it
            copy.wait()  # from here on the memory may serve what comes next
        del copy
        scratch = streams.empty(SIZE)
        streams.fill(scratch, 200 + value)
        del scratch
    for value, slot in reversed(slots):
        scratch = streams.empty(SIZE)
        streams.fill(scratch, 100 + value)
        del scratch  # the next tensor is given this block, while the fill may still be queued
        y, copy = engine.reload(slot)
        copy.wait()
        streams.look(y, seen, value)
        engine.discard(slot)
        del y, copy
    streams.finish()
    return seen


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("limit", [None, 4 * SIZE])
def test_a_pass_sees_its_own_bytes_whatever_stream_runs_first(order: tuple[str, ...], limit: int | None) -> None:
    streams = PaperStreams(order)
    engine = engine_on(streams, limit=limit)
    for _ in range(3):
        assert run_pass(streams, engine) == {value: bytes([value]) * SIZE for value in range(1, 5)}
    engine.close()


WAITS = {
    "a copy out waits for what makes its source": ("out", "compute"),
    "a copy back waits for the last user of its memory": ("back", "compute"),
    "a copy back waits for the copy out": ("back", "out"),
    "the memory that a copy out frees waits for the copy": ("compute", "out"),
    "the use waits for the copy back": ("compute", "back"),
}


@pytest.mark.parametrize("lost", WAITS)
def test_each_wait_is_needed(lost: str) -> None:
    right = {value: bytes([value]) * SIZE for value in range(1, 5)}
    outcomes = []
    for order in ORDERS:
        streams = PaperStreams(order, lost=WAITS[lost])
        outcomes.append(run_pass(streams, engine_on(streams)) == right)
    assert not all(outcomes), "no order shows that the wait is missing"


def test_memory_that_is_let_go_of_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake itself: without rule 4 a pass goes wrong on it."""
    real = StreamCopy.__init__

    def forget(self: StreamCopy, *arguments: object) -> None:
        real(self, *arguments)  # type: ignore[arg-type]
        self.keep = None

    def wrong() -> bool:
        streams = PaperStreams(("compute", "out", "back"))
        engine = engine_on(streams)
        x = streams.empty(SIZE)
        streams.fill(x, 1)
        slot, _ = engine.offload(x)
        del x
        streams.fill(streams.empty(SIZE), 2)  # never waited for the copy
        seen: dict[int, bytes] = {}
        y, copy = engine.reload(slot)
        copy.wait()
        streams.look(y, seen, 1)
        streams.finish()
        return seen[1] != bytes([1]) * SIZE

    assert not wrong()
    monkeypatch.setattr(StreamCopy, "__init__", forget)
    assert wrong()


# What is kept, and until when


def test_a_source_lives_until_the_computation_is_ordered_behind_its_copy() -> None:
    streams = PaperStreams()
    engine = engine_on(streams)
    x = streams.empty(SIZE)
    alive = weakref.ref(x)
    _, copy = engine.offload(x)
    del x
    assert alive() is not None
    assert not copy.done()
    assert copy.wait() == 0.0
    assert alive() is None
    assert not copy.done()  # the host never waited


def test_a_source_is_let_go_of_at_a_later_call_when_its_copy_is_over() -> None:
    streams = PaperStreams()
    engine = engine_on(streams)
    x = streams.empty(SIZE)
    alive = weakref.ref(x)
    engine.offload(x)
    del x
    streams.finish()
    assert alive() is not None
    engine.offload(streams.empty(SIZE))
    assert alive() is None


def test_another_streams_wait_does_not_let_go() -> None:
    streams = PaperStreams()
    engine = engine_on(streams)
    x = streams.empty(SIZE)
    alive = weakref.ref(x)
    _, copy = engine.offload(x)
    del x
    with streams.on("side"):
        copy.wait()
    assert alive() is not None, "the pool's own stream may not have come so far"
    copy.wait()
    assert alive() is None


def test_what_was_brought_back_and_dropped_unused_keeps_its_memory_until_the_copy_is_over() -> None:
    streams = PaperStreams(("compute", "out", "back"))
    engine = engine_on(streams)
    x = streams.empty(SIZE)
    streams.fill(x, 1)
    slot, _ = engine.offload(x)
    y, copy = engine.reload(slot)
    at = y.data_ptr()
    del x, y, copy
    engine.discard(slot)
    z = streams.empty(SIZE)
    assert z.data_ptr() != at
    streams.fill(z, 9)
    streams.finish()
    assert bytes(memory_of(z)) == bytes([9]) * SIZE


def test_the_backward_may_wait_on_a_stream_of_its_own() -> None:
    for order in ORDERS:
        streams = PaperStreams(("side", *order))
        engine = engine_on(streams)
        x = streams.empty(SIZE)
        streams.fill(x, 5)
        slot, _ = engine.offload(x)
        seen: dict[int, bytes] = {}
        with streams.on("side"):
            y, copy = engine.reload(slot)
            copy.wait()
            streams.look(y, seen, 0)
        streams.finish()
        assert seen == {0: bytes([5]) * SIZE}


def test_host_memory_is_not_used_again_while_a_copy_back_reads_it() -> None:
    for order in ORDERS:
        streams = PaperStreams(order)
        engine = engine_on(streams, limit=2 * SIZE)
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
            assert bytes(memory_of(again)) == bytes([2]) * SIZE
        engine.close()


def test_a_slot_keeps_its_memory_until_it_is_discarded_and_its_last_copy_is_over() -> None:
    streams = PaperStreams()
    engine = engine_on(streams)

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


def test_in_a_forked_child_the_engine_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: set[int] = set()
    streams = PaperStreams()
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


def test_discarding_never_blocks_and_may_be_repeated() -> None:
    streams = PaperStreams()
    engine = engine_on(streams)
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


def test_bandwidth_is_that_of_the_copies_alone() -> None:
    streams = PaperStreams()
    engine = engine_on(streams)
    assert engine.link() is None
    run_pass(streams, engine)
    link = engine.link()
    assert link is not None
    assert link.name == "host"
    assert link.seconds_out(SIZE) == pytest.approx(SIZE / BANDWIDTH)
    assert link.seconds_back(SIZE) == pytest.approx(SIZE / BANDWIDTH)
    assert "4 copies out, 4 back" in link.source


def test_stalls_are_known_when_their_events_were_reached() -> None:
    streams = PaperStreams()
    engine = engine_on(streams)
    x = streams.empty(SIZE)
    slot, out = engine.offload(x)
    streams.launch(nothing, seconds=0.001)  # the copy takes 0.004096: the rest of it is waited for
    out.wait()
    assert engine.stalled() == (0.0, 0.0)
    streams.finish()
    assert engine.stalled() == (pytest.approx(0.003096), 0.0)
    _, back = engine.reload(slot)
    back.wait()
    back.wait()
    streams.finish()
    assert engine.stalled() == (pytest.approx(0.003096), pytest.approx(0.004096))


def test_a_copy_that_was_hidden_stalls_nothing() -> None:
    streams = PaperStreams()
    engine = engine_on(streams)
    _, out = engine.offload(streams.empty(SIZE))
    streams.launch(nothing, seconds=1.0)
    out.wait()
    streams.finish()
    assert engine.stalled() == (0.0, 0.0)
    assert out.span is None
    assert out.marks is not None
    assert streams.seconds(*out.marks) == pytest.approx(SIZE / BANDWIDTH)


def test_calibration_moves_its_bytes_and_leaves_nothing_behind() -> None:
    streams = PaperStreams()
    engine = engine_on(streams)
    link = engine.calibrate(SIZE)
    assert link.seconds_out(SIZE) == pytest.approx(SIZE / BANDWIDTH)
    assert engine._host.used == 0
    assert engine.usage() == {"host": 8 * SIZE, "host_peak": 8 * SIZE, "file": 0, "file_peak": 0}


# Limits


def test_past_the_limit_an_error_names_it_and_what_to_do() -> None:
    streams = PaperStreams()
    engine = engine_on(streams, limit=2 * SIZE)
    kept = [engine.offload(streams.empty(SIZE)) for _ in range(2)]
    with pytest.raises(SpillError, match=r"host_limit: 4.1 KB .* 8.19 KB .*raise host_limit, give a spill_dir"):
        engine.offload(streams.empty(SIZE))
    engine.discard(kept[0][0])
    engine.offload(streams.empty(SIZE))


@pytest.mark.parametrize("order", ORDERS)
def test_past_the_limit_bytes_go_through_a_stage_to_the_file(order: tuple[str, ...], tmp_path: Path) -> None:
    size = 5 * SIZE + 100  # in pieces of one block, the stage's size here
    streams = PaperStreams(order, block=size)
    engine = CudaEngine(streams, host_slab(limit=2 * SIZE), FileSlab(tmp_path))
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
def test_the_stages_copies_wait_for_the_computation_too(lost: tuple[str, str], tmp_path: Path) -> None:
    def right(lost: tuple[str, str] | None) -> bool:
        streams = PaperStreams(("out", "back", "compute"), lost=lost)
        engine = CudaEngine(streams, host_slab(limit=2 * SIZE), FileSlab(tmp_path))
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


def test_host_memory_is_used_before_the_file(tmp_path: Path) -> None:
    streams = PaperStreams()
    engine = CudaEngine(streams, host_slab(limit=module.STAGE * 2 + 2 * SIZE, segment=1 << 20), FileSlab(tmp_path))
    kinds = [type(engine.offload(streams.empty(SIZE))[1]) for _ in range(3)]
    assert kinds == [StreamCopy, StreamCopy, ThreadCopy]
    streams.finish()
    engine.close()


def test_a_limit_without_room_for_the_stages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"host_limit=5000.*at least 8192"):
        CudaEngine(PaperStreams(), host_slab(limit=5000), FileSlab(tmp_path))


def test_a_full_disk_fails_the_copy_and_keeps_the_source(tmp_path: Path) -> None:
    streams = PaperStreams()
    file = FileSlab(tmp_path)
    engine = CudaEngine(streams, host_slab(limit=2 * SIZE), file)
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


def test_a_flipped_byte_in_host_memory_is_found_out() -> None:
    streams = PaperStreams()
    engine = engine_on(streams, verify=True)
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


def test_closing_waits_for_the_copies_and_unlocks_the_memory() -> None:
    locked: set[int] = set()
    streams = PaperStreams()
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


def test_an_engine_that_is_forgotten_unlocks_its_memory_after_its_copies() -> None:
    locked: set[int] = set()
    streams = PaperStreams()
    engine = CudaEngine(streams, HostSlab(lambda address, _: locked.add(address), locked.remove), None)
    _, copy = engine.offload(streams.empty(SIZE))
    del engine
    assert locked == set()
    assert copy.done()
