"""Copies by threads: order, errors, and an end without leftovers."""

import gc
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

import lms.memory.transfer
from lms.errors import CorruptionError, SpillError
from lms.memory.file import FileSlab, Place, address_of, page_memory
from lms.memory.meter import Meter
from lms.memory.slab import ALIGNMENT
from lms.memory.transfer import FileEngine, FileSlot, Lane, Memory, Queue, ThreadCopy

SECONDS = 30  # how long a test waits for what must come; never waited out when it comes


class GatedFile(FileSlab):
    """A slab file whose copies wait at a gate, so that a test can look while they are in flight."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.gates = {"write": threading.Event(), "read": threading.Event()}
        self.reached = {"write": threading.Event(), "read": threading.Event()}
        self.began: list[tuple[str, int]] = []
        self.fail: Exception | None = None

    def pass_by(self, kind: str, place: Place) -> None:
        self.began.append((kind, place.offset))
        self.reached[kind].set()
        assert self.gates[kind].wait(SECONDS)
        if self.fail is not None:
            raise self.fail

    def write(self, place: Place, address: int) -> None:
        self.pass_by("write", place)
        super().write(place, address)

    def read(self, place: Place, address: int) -> None:
        self.pass_by("read", place)
        super().read(place, address)

    def open(self) -> None:
        for gate in self.gates.values():
            gate.set()


class Owner:
    """Something to keep alive."""


@pytest.fixture
def file(tmp_path: Path) -> GatedFile:
    return GatedFile(tmp_path)


@pytest.fixture
def engine(file: GatedFile) -> Iterator[FileEngine]:
    engine = FileEngine(file)
    yield engine
    file.open()
    engine.close()


class Source:
    """Bytes at a known address."""

    def __init__(self, content: bytes, skew: int = 64) -> None:
        self.memory = page_memory(skew + len(content) + 1)
        self.memory[skew : skew + len(content)] = content
        self.skew, self.nbytes, self.content = skew, len(content), content
        self.address = address_of(self.memory) + skew


def write(engine: FileEngine, content: bytes, keep: object = None) -> tuple[FileSlot, ThreadCopy]:
    source = Source(content)
    return engine.write(Memory(source.address), source.nbytes, skew=source.skew, keep=(source, keep))


def read(engine: FileEngine, slot: FileSlot) -> tuple[Source, ThreadCopy]:
    destination = Source(bytes(slot.nbytes))
    return destination, engine.read(slot, Memory(destination.address), keep=destination)


def got(destination: Source) -> bytes:
    return destination.memory[destination.skew : destination.skew + destination.nbytes]


# Order


def test_a_copy_runs_beside_its_caller_and_says_when_it_is_over(engine: FileEngine, file: GatedFile) -> None:
    slot, copy = write(engine, b"x" * 10_000)
    assert file.reached["write"].wait(SECONDS)
    assert not copy.done()
    assert copy.span is None
    file.open()
    copy.wait()
    assert copy.done()
    assert copy.failed is None
    assert copy.span is not None
    assert 0 < copy.span[1] - copy.span[0] < SECONDS
    assert slot.nbytes == copy.nbytes == 10_000


def test_a_read_comes_behind_the_write_that_fills_its_slot(engine: FileEngine, file: GatedFile) -> None:
    file.gates["read"].set()
    slot, out = write(engine, b"content" * 1000)
    destination, back = read(engine, slot)
    assert file.reached["write"].wait(SECONDS)
    assert not back.done()
    assert [kind for kind, _ in file.began] == ["write"]
    file.gates["write"].set()
    back.wait()
    assert out.done()
    assert got(destination) == b"content" * 1000


def test_copies_of_one_direction_keep_their_order(engine: FileEngine, file: GatedFile) -> None:
    slots = [write(engine, bytes([i]) * 5000) for i in range(8)]
    file.open()
    for _, copy in slots:
        copy.wait()
    assert [offset for _, offset in file.began] == [slot.places[0].offset for slot, _ in slots]


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a thread waits for a copy."""
    event, hurry = threading.Event(), Queue.hurry

    def told(queue: Queue, copy: ThreadCopy) -> None:
        hurry(queue, copy)
        event.set()

    monkeypatch.setattr(Queue, "hurry", told)
    return event


def test_a_read_that_a_thread_waits_for_overtakes_those_that_none_waits_for(
    engine: FileEngine, file: GatedFile, hurried: threading.Event
) -> None:
    file.gates["write"].set()
    slots = [write(engine, bytes([i]) * 5000) for i in range(5)]
    for _, copy in slots:
        copy.wait()
    file.began.clear()
    hurried.clear()
    reads = [read(engine, slot) for slot, _ in slots]
    assert file.reached["read"].wait(SECONDS)
    waiting = threading.Thread(target=reads[3][1].wait)
    waiting.start()
    assert hurried.wait(SECONDS)
    file.open()
    waiting.join(SECONDS)
    for _, copy in reads:
        copy.wait()
    began = [offset for _, offset in file.began]
    assert [[slot.places[0].offset for slot, _ in slots].index(offset) for offset in began] == [0, 3, 1, 2, 4]
    assert [got(destination) for destination, _ in reads] == [bytes([i]) * 5000 for i in range(5)]


def test_a_write_that_a_read_waits_for_overtakes_those_that_none_waits_for(
    engine: FileEngine, file: GatedFile, hurried: threading.Event
) -> None:
    slots = [write(engine, bytes([i]) * 5000) for i in range(5)]
    assert file.reached["write"].wait(SECONDS)
    destination, back = read(engine, slots[3][0])
    assert hurried.wait(SECONDS)
    file.open()
    back.wait()
    for _, copy in slots:
        copy.wait()
    began = [offset for kind, offset in file.began if kind == "write"]
    assert [[slot.places[0].offset for slot, _ in slots].index(offset) for offset in began] == [0, 3, 1, 2, 4]
    assert got(destination) == bytes([3]) * 5000


def test_a_queue_gives_each_copy_out_once_however_often_it_is_waited_for() -> None:
    queue, lane = Queue(), Lane("lms-test")
    copies = [ThreadCopy(i, lane.meter) for i in range(4)]
    for copy in copies:
        copy.job = (int, int)
        queue.put(copy)
    queue.put(None)
    queue.hurry(copies[2])
    queue.hurry(copies[2])
    taken = []
    while (copy := queue.take()) is not None:
        copy.job = None
        queue.hurry(copy)  # too late to be of use
        taken.append(copy.nbytes)
    assert taken == [2, 0, 1, 3]
    lane.stop()


def test_a_queue_does_not_keep_the_copies_that_overtook() -> None:
    queue, meter = Queue(), Meter()
    owners = [Owner() for _ in range(10)]
    left = [weakref.ref(owner) for owner in owners]
    for owner in owners:
        copy = ThreadCopy(1, meter, keep=owner)
        copy.job = (int, int)
        queue.put(copy)
        queue.hurry(copy)
        assert queue.take() is copy
        copy.job = None
    del copy, owner, owners
    gc.collect()
    assert sum(one() is not None for one in left) <= 1


def test_the_two_directions_run_at_the_same_time(engine: FileEngine, file: GatedFile) -> None:
    file.gates["write"].set()
    slot, out = write(engine, b"a" * 5000)
    out.wait()
    file.gates["write"].clear()
    write(engine, b"b" * 5000)
    read(engine, slot)
    assert file.reached["read"].wait(SECONDS)  # while the write stands at its gate


def test_the_time_of_waiting_is_counted_and_none_for_a_copy_that_is_over(
    engine: FileEngine, file: GatedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clock() -> float:  # the waiting thread asks for the time just before it waits
        if threading.current_thread() is threading.main_thread():
            file.open()
        return time.perf_counter()

    _, copy = write(engine, b"x" * 5000)
    monkeypatch.setattr(lms.memory.transfer, "perf_counter", clock)
    copy.wait()
    stalled = engine.stalled()
    assert 0 < stalled[0] < SECONDS
    copy.wait()
    assert engine.stalled() == stalled


def test_several_threads_may_wait_for_one_copy(engine: FileEngine, file: GatedFile) -> None:
    _, copy = write(engine, b"x" * 5000)
    waiters = [threading.Thread(target=copy.wait) for _ in range(4)]
    for waiter in waiters:
        waiter.start()
    file.open()
    for waiter in waiters:
        waiter.join(SECONDS)
        assert not waiter.is_alive()


@pytest.mark.parametrize("chunk", [0, ALIGNMENT, 3 * ALIGNMENT])
def test_random_traffic_never_mixes_bytes_up(tmp_path: Path, chunk: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    engine = FileEngine(FileSlab(tmp_path, verify=True))
    live: list[tuple[FileSlot, bytes]] = []
    reads: list[tuple[Source, ThreadCopy, bytes]] = []
    for _ in range(400):
        action = rng.random()
        if action < 0.45 or not live:
            content = rng.randbytes(rng.randrange(1, 40_000))
            source = Source(content, skew=0 if chunk else rng.randrange(ALIGNMENT))
            slot, _ = engine.write(Memory(source.address), source.nbytes, skew=source.skew, chunk=chunk, keep=source)
            live.append((slot, content))
        elif action < 0.75:
            slot, content = rng.choice(live)
            destination = Source(bytes(slot.nbytes), skew=slot.places[0].skew)
            reads.append((destination, engine.read(slot, Memory(destination.address), keep=destination), content))
        else:
            slot, _ = live.pop(rng.randrange(len(live)))
            engine.discard(slot)
    for destination, copy, content in reads:
        copy.wait()
        assert got(destination) == content
    for slot, _ in live:
        engine.discard(slot)
    engine.close()
    assert engine.usage()["file"] == 0


# Slots


def test_a_slot_that_is_discarded_in_flight_is_freed_when_its_copies_are_over(
    engine: FileEngine, file: GatedFile
) -> None:
    slot, out = write(engine, b"x" * 5000)
    assert file.reached["write"].wait(SECONDS)
    destination, back = read(engine, slot)
    engine.discard(slot)
    engine.discard(slot)
    assert engine.usage()["file"] == 2 * ALIGNMENT
    other, _ = write(engine, b"y" * 5000)
    assert other.places[0].offset != slot.places[0].offset
    file.open()
    out.wait()
    back.wait()
    assert got(destination) == b"x" * 5000
    engine.discard(other)
    engine.close()
    assert engine.usage() == {"file": 0, "file_peak": 4 * ALIGNMENT}


def test_a_slot_that_is_discarded_before_its_write_began_is_never_written(engine: FileEngine, file: GatedFile) -> None:
    _, before = write(engine, b"x" * 5000)
    slot, copy = write(engine, b"y" * 5000)
    engine.discard(slot)
    file.open()
    before.wait()
    copy.wait()
    assert [offset for _, offset in file.began] == [0]
    assert copy.span is None
    assert engine.out.meter.copies == 1


def test_a_read_that_was_asked_for_gets_its_bytes_though_the_slot_is_discarded_before_the_write(
    engine: FileEngine, file: GatedFile
) -> None:
    write(engine, b"x" * 5000)
    slot, _ = write(engine, b"y" * 5000)
    destination, back = read(engine, slot)
    engine.discard(slot)
    file.open()
    back.wait()
    assert got(destination) == b"y" * 5000


def test_a_discarded_slot_cannot_be_read(engine: FileEngine, file: GatedFile) -> None:
    slot, _ = write(engine, b"x")
    engine.discard(slot)
    with pytest.raises(ValueError, match="discarded"):
        read(engine, slot)


def test_a_discard_from_inside_the_engine_is_put_off(tmp_path: Path) -> None:
    """The garbage collector may run at any allocation, and what it collects may end in a discard."""

    class Reentrant(FileSlab):
        def allocate(self, nbytes: int, skew: int) -> Place:
            place = super().allocate(nbytes, skew)
            while dying:
                engine.discard(dying.pop())
            return place

    dying: list[FileSlot] = []
    engine = FileEngine(Reentrant(tmp_path))
    first, copy = write(engine, b"x" * 5000)
    copy.wait()
    dying.append(first)
    second, _ = write(engine, b"y" * 5000)
    assert engine.usage()["file"] == 2 * ALIGNMENT
    assert second.places[0].offset != first.places[0].offset
    engine.close()


# What is kept alive


def test_the_source_lives_until_the_copy_is_over_and_no_longer(engine: FileEngine, file: GatedFile) -> None:
    owner = Owner()
    alive = weakref.ref(owner)
    _, copy = write(engine, b"x" * 5000, keep=owner)
    del owner
    assert file.reached["write"].wait(SECONDS)
    assert alive() is not None
    file.open()
    copy.wait()
    assert alive() is None


def test_a_copy_that_failed_keeps_its_source_and_its_error(engine: FileEngine, file: GatedFile) -> None:
    owner = Owner()
    alive = weakref.ref(owner)
    file.fail = SpillError("spill_dir='there': full")
    slot, copy = write(engine, b"x" * 5000, keep=owner)
    del owner
    file.open()
    for _ in range(2):
        with pytest.raises(SpillError, match="full"):
            copy.wait()
    assert copy.done()
    assert copy.failed is file.fail
    assert alive() is not None
    with pytest.raises(SpillError, match="full"):
        copy.synchronize()
    engine.discard(slot)


def test_a_read_of_what_could_not_be_written_fails_of_the_same(engine: FileEngine, file: GatedFile) -> None:
    file.fail = SpillError("spill_dir='there': full")
    slot, _ = write(engine, b"x" * 5000)
    _, back = read(engine, slot)
    file.open()
    with pytest.raises(SpillError, match="full"):
        back.wait()
    assert [kind for kind, _ in file.began] == ["write"]


def test_an_engine_goes_on_after_a_copy_that_failed(engine: FileEngine, file: GatedFile) -> None:
    file.open()
    file.fail = CorruptionError("flipped")
    _, failing = write(engine, b"x" * 5000)
    with pytest.raises(CorruptionError):
        failing.wait()
    file.fail = None
    slot, _ = write(engine, b"y" * 5000)
    destination, back = read(engine, slot)
    back.wait()
    assert got(destination) == b"y" * 5000


def test_an_unforeseen_error_ends_the_copy_too(engine: FileEngine, file: GatedFile) -> None:
    file.fail = ZeroDivisionError("what?")
    _, copy = write(engine, b"x" * 5000)
    file.open()
    with pytest.raises(SpillError, match=r"5000 bytes failed.*what\?") as caught:
        copy.wait()
    assert caught.value.__cause__ is file.fail


# The end


def test_closing_waits_for_the_copies_and_closes_the_file(engine: FileEngine, file: GatedFile) -> None:
    descriptor = file.fileno()
    copies = [write(engine, b"x" * 5000)[1] for _ in range(3)]
    closer = threading.Thread(target=engine.close)
    closer.start()
    assert file.reached["write"].wait(SECONDS)
    assert closer.is_alive()
    file.open()
    closer.join(SECONDS)
    assert all(copy.done() for copy in copies)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    engine.close()


def test_a_closed_engine_says_so(engine: FileEngine, file: GatedFile) -> None:
    file.open()
    slot, _ = write(engine, b"x")
    engine.close()
    with pytest.raises(SpillError, match="closed"):
        write(engine, b"x")
    with pytest.raises(SpillError, match="closed"):
        read(engine, slot)
    engine.discard(slot)


def test_an_engine_that_is_forgotten_ends_its_threads_and_closes_its_file(tmp_path: Path) -> None:
    engine = FileEngine(FileSlab(tmp_path))
    write(engine, b"x" * 5000)[1].wait()
    lanes, descriptor = (engine.out, engine.back), engine.file.fileno()
    alive = weakref.ref(engine)
    del engine
    gc.collect()
    assert alive() is None
    for lane in lanes:
        lane.join()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


SETTING = """
import os, sys, threading
from pathlib import Path
from lms.errors import SpillError
from lms.memory.file import FileSlab, address_of, page_memory
from lms.memory.transfer import FileEngine, Memory
gate, reached = threading.Event(), threading.Event()
class Slow(FileSlab):
    def write(self, place, address):
        reached.set(); gate.wait(); super().write(place, address)
engine = FileEngine(Slow(Path(sys.argv[1])))
memory = page_memory(1 << 20)
slot, copy = engine.write(Memory(address_of(memory)), 1 << 20)
reached.wait()
"""


def in_a_process(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(
        [sys.executable, "-c", SETTING + script, str(folder)],
        env=environment,
        timeout=SECONDS,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "del engine"])
def test_a_copy_in_flight_does_not_keep_the_interpreter_from_exiting(tmp_path: Path, end: str) -> None:
    done = in_a_process(end, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_in_a_forked_child_the_engine_does_nothing_and_waits_for_nothing(tmp_path: Path) -> None:
    done = in_a_process(
        """
import warnings
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    engine.discard(slot)
    engine.close()
    for refused in (copy.wait, lambda: engine.write(Memory(0), 1), lambda: engine.read(slot, Memory(0))):
        try: refused()
        except SpillError as error: assert "fork" in str(error)
        else: os._exit(3)
    del engine, slot
    sys.exit(7)  # as a worker does, with all that an interpreter's end brings
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
gate.set()
copy.wait()
back = page_memory(1 << 20)
engine.read(slot, Memory(address_of(back))).wait()
engine.close()
""",
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")


# Bandwidth


def test_nothing_is_known_before_the_first_copy(engine: FileEngine) -> None:
    assert engine.link() is None


def test_what_was_copied_is_measured(engine: FileEngine, file: GatedFile) -> None:
    file.open()
    slot, out = write(engine, b"x" * 100_000)
    _, back = read(engine, slot)
    back.wait()
    link = engine.link()
    assert link is not None
    assert link.name == "file"
    assert out.span is not None
    assert engine.out.meter.nbytes == engine.back.meter.nbytes == 100_000


def test_a_lane_ends_after_what_was_queued() -> None:
    lane = Lane("test")
    done: list[int] = []
    for index in range(5):
        lane.submit(ThreadCopy(0, lane.meter), lambda _, index=index: done.append(index), int)  # type: ignore[misc]
    lane.stop()
    lane.join()
    assert done == list(range(5))


def test_a_lane_goes_on_if_the_work_behind_a_copy_fails() -> None:
    lane = Lane("test")
    copies = [ThreadCopy(1, lane.meter), ThreadCopy(1, lane.meter)]

    def fail() -> None:
        raise KeyError("of the ledger")

    lane.submit(copies[0], lambda _: None, fail)
    lane.submit(copies[1], lambda _: None, lambda: None)
    with pytest.raises(SpillError, match="of the ledger"):
        copies[0].wait()
    copies[1].wait()
    lane.stop()
    lane.join()
