"""Copies on streams of paper: every order that a GPU might choose, and what each wait is there for."""

import itertools
import weakref
from types import ModuleType

import pytest

from lms.torch.cuda.streams import StreamCopy

SIZE = 4096
ORDERS = list(itertools.permutations(("compute", "out", "back")))

# One pass, and every wait in it


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("limit", [None, 4 * SIZE])
def test_a_pass_sees_its_own_bytes_whatever_stream_runs_first(
    order: tuple[str, ...], limit: int | None, paper: ModuleType
) -> None:
    streams = paper.PaperStreams(order)
    engine = paper.engine_on(streams, limit=limit)
    for _ in range(3):
        assert paper.run_pass(streams, engine) == {value: bytes([value]) * SIZE for value in range(1, 5)}
    engine.close()


WAITS = {
    "a copy out waits for what makes its source": ("out", "compute"),
    "a copy back waits for the last user of its memory": ("back", "compute"),
    "a copy back waits for the copy out": ("back", "out"),
    "the memory that a copy out frees waits for the copy": ("compute", "out"),
    "the use waits for the copy back": ("compute", "back"),
}


@pytest.mark.parametrize("lost", WAITS)
def test_each_wait_is_needed(lost: str, paper: ModuleType) -> None:
    right = {value: bytes([value]) * SIZE for value in range(1, 5)}
    outcomes = []
    for order in ORDERS:
        streams = paper.PaperStreams(order, lost=WAITS[lost])
        outcomes.append(paper.run_pass(streams, paper.engine_on(streams)) == right)
    assert not all(outcomes), "no order shows that the wait is missing"


def test_memory_that_is_let_go_of_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch, paper: ModuleType) -> None:
    """The fake itself: without rule 4 a pass goes wrong on it."""
    real = StreamCopy.__init__

    def forget(self: StreamCopy, *arguments: object) -> None:
        real(self, *arguments)  # type: ignore[arg-type]
        self.keep = None

    def wrong() -> bool:
        streams = paper.PaperStreams(("compute", "out", "back"))
        engine = paper.engine_on(streams)
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


def test_a_source_lives_until_the_computation_is_ordered_behind_its_copy(paper: ModuleType) -> None:
    streams = paper.PaperStreams()
    engine = paper.engine_on(streams)
    x = streams.empty(SIZE)
    alive = weakref.ref(x)
    _, copy = engine.offload(x)
    del x
    assert alive() is not None
    assert not copy.done()
    copy.wait()
    assert alive() is None
    assert not copy.done()  # the host never waited


def test_a_source_is_let_go_of_at_a_later_call_when_its_copy_is_over(paper: ModuleType) -> None:
    streams = paper.PaperStreams()
    engine = paper.engine_on(streams)
    x = streams.empty(SIZE)
    alive = weakref.ref(x)
    engine.offload(x)
    del x
    streams.finish()
    assert alive() is not None
    engine.offload(streams.empty(SIZE))
    assert alive() is None


def test_another_streams_wait_does_not_let_go(paper: ModuleType) -> None:
    streams = paper.PaperStreams()
    engine = paper.engine_on(streams)
    x = streams.empty(SIZE)
    alive = weakref.ref(x)
    _, copy = engine.offload(x)
    del x
    with streams.on("side"):
        copy.wait()
    assert alive() is not None, "the pool's own stream may not have come so far"
    copy.wait()
    assert alive() is None


def test_what_was_brought_back_and_dropped_unused_keeps_its_memory_until_the_copy_is_over(paper: ModuleType) -> None:
    streams = paper.PaperStreams(("compute", "out", "back"))
    engine = paper.engine_on(streams)
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
    assert bytes(paper.memory_of(z)) == bytes([9]) * SIZE


def test_the_backward_may_wait_on_a_stream_of_its_own(paper: ModuleType) -> None:
    for order in ORDERS:
        streams = paper.PaperStreams(("side", *order))
        engine = paper.engine_on(streams)
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
