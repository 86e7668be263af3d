"""Copies between a GPU and its host: on streams of paper, whose clock is exact."""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from lms.errors import SpillError  # noqa: E402
from lms.link import cuda  # noqa: E402
from lms.link.cuda import Pinned, gpu_copies, peer_copies, timed  # noqa: E402

SIZE = 65536


@pytest.fixture(autouse=True)
def _settled_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_SETTLED", 4 * SIZE)


@pytest.fixture
def streams(paper: ModuleType):
    return paper.PaperStreams(block=SIZE)


def host(count: int = 2):
    return [torch.zeros(SIZE, dtype=torch.uint8) for _ in range(count)]


@pytest.mark.parametrize("direction", ["out", "back", "both"])
@pytest.mark.parametrize("nbytes", [4096, SIZE])
def test_a_copy_takes_the_gpus_time_however_often_it_is_repeated(
    paper: ModuleType, streams, direction: str, nbytes: int
) -> None:
    with gpu_copies(streams, host(), direction) as copy:
        for _ in range(3):
            assert copy(nbytes) == pytest.approx(nbytes / paper.BANDWIDTH)


def test_out_moves_bytes_from_the_gpu_and_back_to_it(streams) -> None:
    memory = host()
    with gpu_copies(streams, memory, "back") as copy:
        memory[0].fill_(7)
        copy(SIZE)
        assert bytes(streams._arena[:SIZE]) == b"\x07" * SIZE
    streams._arena[:] = b"\x09" * len(streams._arena)
    with gpu_copies(streams, memory, "out") as copy:
        copy(4096)
    assert set(memory[0][:4096].tolist()) == {9}
    assert set(memory[0][4096:].tolist()) == {7}


def test_both_ways_use_memory_of_their_own(streams) -> None:
    memory = host()
    with gpu_copies(streams, memory, "both") as copy:
        memory[1].fill_(5)
        streams._arena[:SIZE] = b"\x03" * SIZE
        copy(SIZE)
    assert set(memory[0].tolist()) == {3}
    assert bytes(streams._arena[SIZE : 2 * SIZE]) == b"\x05" * SIZE


def test_the_second_way_begins_with_the_first_and_not_before(paper: ModuleType, streams) -> None:
    streams.out.clock = 100.0  # the other stream's clock lags behind, and must wait for the beginning
    with gpu_copies(streams, host(), "both") as copy:
        assert copy(SIZE) == pytest.approx(SIZE / paper.BANDWIDTH)


@pytest.mark.parametrize("direction", ["out", "back", "both"])
def test_gpus_copy_to_each_other(paper: ModuleType, streams, direction: str) -> None:
    other = paper.PaperStreams(block=SIZE)
    streams._arena[:] = b"\x01" * len(streams._arena)
    other._arena[:] = b"\x02" * len(other._arena)
    with peer_copies(streams, other, SIZE, direction) as copy:
        assert copy(SIZE) == pytest.approx(SIZE / paper.BANDWIDTH)
    arrived = bytes(other._arena[:SIZE]), bytes(streams._arena[SIZE : 2 * SIZE])
    assert (
        arrived
        == {
            "out": (b"\x01" * SIZE, b"\x01" * SIZE),
            "back": (b"\x02" * SIZE, b"\x02" * SIZE),
            "both": (b"\x01" * SIZE, b"\x02" * SIZE),
        }[direction]
    )


class Clocked:
    """Two GPUs whose copies to each other are queued as PyTorch queues them; all work runs at once, on paper clocks."""

    def __init__(self, gpu: int, current: dict[int, str], clocks: dict[tuple[int, str], float], owner: dict[int, int]):
        self.gpu, self.out, self.back = gpu, "out", "back"
        self._current, self._clocks, self._owner = current, clocks, owner

    @contextmanager
    def using(self, stream: str) -> Iterator[None]:
        before, self._current[self.gpu] = self._current[self.gpu], stream
        yield
        self._current[self.gpu] = before

    def copy(self, stream: str, destination, source) -> None:
        with self.using(stream):
            one, other = self._owner[source.data_ptr()], self._owner[destination.data_ptr()]
            here, there = (one, self._current[one]), (other, self._current[other])
            self._clocks[here] = max(self._clocks[here], self._clocks[there]) + source.nbytes
            self._clocks[there] = max(self._clocks[here], self._clocks[there])

    def empty(self, nbytes: int):
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        self._owner[tensor.data_ptr()] = self.gpu
        return tensor

    def record(self, stream: str) -> float:
        return self._clocks[self.gpu, stream]

    def wait(self, stream: str, event: float) -> None:
        self._clocks[self.gpu, stream] = max(self._clocks[self.gpu, stream], event)

    def synchronize(self, event: float) -> None:
        pass

    def seconds(self, start: float, end: float) -> float:
        return end - start


@pytest.mark.parametrize("nbytes", [4096, SIZE])
@pytest.mark.parametrize("direction", ["out", "back", "both"])
def test_the_two_ways_between_gpus_do_not_wait_for_each_other(direction: str, nbytes: int) -> None:
    clocks: dict[tuple[int, str], float] = defaultdict(float)
    current, owner = {0: "default", 1: "default"}, {}
    here, there = (Clocked(gpu, current, clocks, owner) for gpu in (0, 1))
    with peer_copies(here, there, SIZE, direction) as copy:  # type: ignore[arg-type]
        for _ in range(3):
            assert copy(nbytes) == nbytes
    assert current == {0: "default", 1: "default"}


def test_small_copies_of_both_ways_are_queued_in_turns(streams, monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[object] = []
    real = streams.copy
    monkeypatch.setattr(streams, "copy", lambda stream, *sides: (queued.append(stream.name), real(stream, *sides)))
    with gpu_copies(streams, host(), "both") as copy:
        copy(SIZE // 2)
    assert queued == ["out", "back"] * 8


def test_copies_in_flight_are_waited_for_whatever_interrupts(streams, paper: ModuleType) -> None:
    memory, other = host(), paper.PaperStreams(block=SIZE)

    def interrupted(copies: AbstractContextManager[object], stream: object) -> None:
        with copies:
            streams.copy(stream, memory[0], memory[1])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted(gpu_copies(streams, memory, "out"), streams.out)
    assert not streams.all["out"].queue
    with pytest.raises(KeyboardInterrupt):
        interrupted(peer_copies(streams, other, SIZE, "back"), streams.back)
    assert not streams.all["back"].queue


def test_timing_waits_for_all_copies(streams) -> None:
    memory = host()
    device = streams.empty(SIZE)
    timed(streams, [(streams.out, memory[0], device)])
    assert not streams.all["out"].queue


def test_pinned_memory_is_locked_once_and_unlocked_at_the_end() -> None:
    locked: dict[int, int] = {}
    pinned = Pinned(2 * mmap.PAGESIZE, register=locked.__setitem__, unregister=locked.__delitem__)
    assert [len(tensor) for tensor in pinned.tensors] == [2 * mmap.PAGESIZE] * 2
    assert sum(locked.values()) >= 4 * mmap.PAGESIZE
    pinned.close()
    assert locked == {}


def test_a_host_that_locks_no_more_is_named_and_nothing_stays_locked() -> None:
    locked: dict[int, int] = {}

    def register(address: int, nbytes: int) -> None:
        if locked:
            raise SpillError("locking failed (RLIMIT_MEMLOCK)")
        locked[address] = nbytes

    with pytest.raises(SpillError, match=r"to be locked for the GPU: locking failed"):
        Pinned(2 * mmap.PAGESIZE, register=register, unregister=locked.__delitem__)
    assert locked == {}
