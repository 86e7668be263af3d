"""A pass: what it records, which plan it follows, and what it does when it turns out to be another."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lms.core.guide import Guide, Key
from lms.core.plan import Plan
from lms.core.schedule import Swap
from lms.core.stepper import Stepper
from lms.core.turns import Rounds
from lms.memory.device import CpuDevice
from lms.runtime.recorder import Finished, Recorder
from lms.torch.mover import Mover
from lms.torch.passes import AT_ONCE, Pass
from lms.torch.records import LiveRecord, View

CPU = torch.device("cpu")
N = 64  # bytes of a record
ROOM = 1000 * N
KINDS = {"w": "write", "h": "hold", "r": "read"}
Choose = Callable[[list[Key]], Guide | None]


class Run:
    """Passes of records by number, saved, used and freed as the swapper does it."""

    def __init__(self, tier: object, *, room: int = ROOM, measure: bool = False) -> None:
        self.mover = Mover(tier, CPU)
        self.stepper: Stepper[LiveRecord] = Stepper(self.mover, room=lambda _: room)
        self.measure = measure
        self.begin()

    def begin(self, guide: Guide | None = None, choose: Choose = lambda keys: None) -> None:
        recorder = Recorder(CpuDevice(), measure=self.measure, timed=True)
        self.under_way = Pass(self.stepper, self.mover, recorder, guide, choose=choose, rounds=Rounds())

    def go(self, accesses: str) -> list[str]:
        """`w0 h0 r0 f0`: save record 0, save it again, use and free it. Where all records are after each of these."""
        return [self._one(access[0], int(access[1:])) for access in accesses.split()]

    def save(self, tensor: Tensor) -> LiveRecord:
        """A view of a record, its first one if the pass has none of this storage."""
        run, storage = self.under_way, tensor.untyped_storage()
        run.recorder.enter()
        record = next((one for one in run.records.values() if one.holds(storage, None)), None)
        if is_new := record is None:
            record = LiveRecord(len(run.records), (storage._cdata, 0), storage.nbytes())
            record.origin = weakref.ref(storage)
            run.add(record, lambda: ("", "uint8", (record.nbytes,)))
        record.views.append(View(tensor))
        del tensor, storage
        run.save(record, writes=is_new)
        run.recorder.leave(self.stepper.holdings.held, self.mover.storages.present)
        return record

    def _one(self, kind: str, index: int) -> str:
        self.stepper.holdings.settle()
        run = self.under_way
        if kind == "w":
            self.save(torch.zeros(N, dtype=torch.uint8))
        elif kind == "h":
            self.save(run.records[index].views[0].alias)
        elif kind == "r":
            run.recorder.enter()
            record = run.records[index]
            run.require(record)
            if record.flat is not None:
                record.views[0].fill(record.flat)
            run.use(record, 1)
            run.recorder.leave(self.stepper.holdings.held, self.mover.storages.present)
        else:
            run.records[index].views.clear()
            run.free(run.records[index])
        self.stepper.holdings.settle()
        return "".join(record.state.name[0] for record in run.records.values())

    def finish(self) -> Finished:
        finished = self.under_way.finish()
        self.begin()
        return finished


@pytest.fixture
def run(tier: object) -> Run:
    return Run(tier)


def keys_of(accesses: str) -> list[Key]:
    return [(KINDS[access[0]], int(access[1:]), N) for access in accesses.split()]


@pytest.fixture
def guide_of(traces: ModuleType) -> Callable[..., Guide]:
    """A guide for these accesses with these moves: (tensor, after, before, reload, write)."""

    def make(accesses: str, *moves: tuple[int, int, int, int, bool], pinned: frozenset[int] = frozenset()) -> Guide:
        keys = keys_of(accesses)
        tape = traces.Tape([N] * (1 + max(index for _, index, _ in keys)), pinned=set(pinned))
        for kind, index, _ in keys:
            tape.access(kind, index, 1.0)
        plan = Plan(tuple(Swap(*move) for move in moves), (ROOM,) * len(keys))
        return Guide(keys, tape.trace(), replace(plan, forecast=replace(plan.forecast, held_peak=ROOM)))

    return make


# What it records


def test_a_pass_that_followed_its_plan_to_the_end_says_so_and_what_it_moved(
    run: Run, guide_of: Callable[..., Guide]
) -> None:
    accesses = "w0 w1 h0 r1 r0"
    guide = guide_of(accesses, (0, 2, 4, 3, True))
    for _ in range(2):
        run.begin(guide)
        assert run.go("w0 w1 h0 r1 f1 r0 f0") == ["H", "HH", "AH", "CH", "CD", "HD", "DD"]
        finished = run.finish()
        assert finished.guide is guide
        assert (finished.counters.out, finished.counters.back, finished.held_peak) == (N, N, 2 * N)
        recorder = finished.recorder
        assert [direction for direction, _, _ in recorder.copies] == ["out", "back"]
        assert recorder.keys() == keys_of(accesses)
        assert recorder.freed == [5, 4]
        assert len(recorder.gaps()) == 6, "before each access, and the tail"
        assert recorder.seconds > 0


@pytest.mark.parametrize("used", [False, True], ids=["the forward goes on", "the backward begins"])
def test_a_pass_notes_when_the_forward_let_go_of_what_it_saved(used: bool, tier: object) -> None:
    run = Run(tier, measure=True)
    kept = torch.zeros(N, dtype=torch.uint8)
    run.save(kept)
    run.go("w1 w2")
    if used:
        run.go("r2")
    del kept
    run.go("r1" if used else "w3 w4")
    let_go = 3  # the first access after it, or the forward's end
    assert run.under_way.recorder.let_go == [let_go, *[None] * (2 if used else 4)]
    assert let_go > AT_ONCE, "what the forward lets go of at once is not noted"


def test_what_the_plan_knows_to_be_pinned_is_not_held_and_another_in_its_place_is(
    tier: object, guide_of: Callable[..., Guide]
) -> None:
    run = Run(tier, room=0)
    run.begin(guide_of("w0 w1 r1 r0", pinned=frozenset({0})))
    run.go("w0 w1")
    assert run.stepper.holdings.held == N
    assert run.go("r0") == ["HA"], "not as the plan has it: by the rule from here on, which leaves no room"
    assert run.under_way.recorder.foreseen == [True, False]
    run.begin(guide_of("w0 r0", pinned=frozenset({0})))
    assert not run.save(torch.zeros(2 * N, dtype=torch.uint8)).pinned
    assert run.under_way.recorder.foreseen == [False]


# Another way than the plan's


def test_a_pass_that_does_something_else_asks_once_for_another_plan_and_goes_on_by_the_rule(
    tier: object, guide_of: Callable[..., Guide]
) -> None:
    asked: list[list[Key]] = []
    run = Run(tier, room=0)
    run.begin(guide_of("w0 w1 w2 r2 r1 r0"), choose=asked.append)
    assert run.go("w0 w1 r1 r0")[1:] == ["HH", "AH", "HA"]
    assert asked == [keys_of("w0 w1 r1")]
    assert run.finish().guide is None


def test_another_plan_that_began_alike_takes_over(run: Run, guide_of: Callable[..., Guide]) -> None:
    second = guide_of("w0 w1 r1 r0", (0, 0, 3, 3, True))
    run.begin(guide_of("w0 w1 w2 r2 r1 r0"), choose=lambda keys: second)
    assert run.go("w0 w1 r1 r0")[1:] == ["HH", "AH", "HH"]
    assert run.finish().guide is second


def test_a_pass_that_ends_early_has_followed_no_plan(run: Run, guide_of: Callable[..., Guide]) -> None:
    run.begin(guide_of("w0 w1 r1 r0"))
    run.go("w0 w1 r1")
    assert run.finish().guide is None
