"""A training holds, copies and waits as the simulator says: random passes through PyTorch's side on a made-up clock."""

from __future__ import annotations

import os
import weakref
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lms.core.guide import Guide
from lms.core.plan import make_plan
from lms.core.simulate import simulate
from lms.core.stepper import Stepper
from lms.core.turns import Rounds
from lms.link import Link
from lms.memory.device import CpuDevice
from lms.memory.slots import Slot
from lms.runtime.recorder import Recorder
from lms.torch.mover import Mover
from lms.torch.passes import Pass
from lms.torch.records import LiveRecord, View
from lms.trace import Trace

CPU = torch.device("cpu")
MANY = int(os.environ.get("BASCULE_AGREEMENT_EXAMPLES", "10000"))


class Copy:
    """A copy on a link with one queue for each direction; waiting for it moves the clock."""

    failed = None
    span = None

    def __init__(self, link: PaperLink, end: float, nbytes: int) -> None:
        self.link, self.end, self.nbytes = link, end, nbytes

    def done(self) -> bool:
        return self.end <= self.link.now

    def wait(self) -> None:
        self.link.now = max(self.link.now, self.end)


class PaperLink:
    """An engine whose bytes stay in memory, and a clock."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.now = self.out_free = self.back_free = 0.0
        self.bytes: dict[int, torch.Tensor] = {}
        self.spans: list[tuple[str, float, float, int]] = []

    def offload(self, source: torch.Tensor) -> tuple[Slot, Copy]:
        slot = Slot(source.nbytes)
        self.bytes[id(slot)] = source.clone()
        start = max(self.now, self.out_free)
        self.out_free = start + self.link.seconds_out(source.nbytes)
        self.spans.append(("out", start, self.out_free, source.nbytes))
        return slot, Copy(self, self.out_free, source.nbytes)

    def reload(self, slot: Slot) -> tuple[torch.Tensor, Copy]:
        start = max(self.now, self.back_free)
        self.back_free = start + self.link.seconds_back(slot.nbytes)
        self.spans.append(("back", start, self.back_free, slot.nbytes))
        return self.bytes[id(slot)].clone(), Copy(self, self.back_free, slot.nbytes)

    def discard(self, slot: Slot) -> None:
        self.bytes.pop(id(slot), None)


def train(trace: Trace, guide: Guide, link: Link) -> tuple[PaperLink, Stepper[LiveRecord], list[tuple[float, int]]]:
    """The pass of `trace` with real tensors, saved, used and let go of as it says. The bytes held, from when on."""
    engine = PaperLink(link)
    mover = Mover(engine, CPU)  # type: ignore[arg-type]
    stairs = [(0.0, 0)]

    def note() -> None:
        stairs.append((engine.now, stepper.holdings.held))

    stepper: Stepper[LiveRecord] = Stepper(mover, room=lambda _: 0, changed=note)
    recorder = Recorder(CpuDevice(), measure=False, timed=False)
    under_way = Pass(stepper, mover, recorder, guide, choose=lambda keys: None, rounds=Rounds())
    records: dict[int, LiveRecord] = {}
    in_hand: dict[int, torch.Tensor] = {}  # what the forward holds
    until = [max([t.let_go or 0, *(at + 1 for at in saves(trace, i))]) for i, t in enumerate(trace.tensors)]
    for at, access in enumerate(trace.accesses):
        engine.now += access.seconds
        for index, tensor in enumerate(trace.tensors):
            if tensor.freed == at:
                records[index].views.clear()
                under_way.free(records[index])
        stepper.holdings.settle()
        stepper.drop_due()
        for index in [index for index in in_hand if until[index] <= at]:
            del in_hand[index]
        record = records.get(access.tensor)
        if record is None:
            tensor = torch.full((trace.tensors[access.tensor].nbytes,), access.tensor, dtype=torch.uint8)
            storage = tensor.untyped_storage()
            records[access.tensor] = record = LiveRecord(access.tensor, (storage._cdata, 0), storage.nbytes())
            record.origin = weakref.ref(storage)
            record.views.append(View(tensor))
            in_hand[access.tensor] = tensor
            del tensor, storage
            under_way.add(record, lambda: ("", "uint8", ()))
            under_way.save(record, writes=True)
        elif access.kind == "read":
            under_way.require(record)
            if record.flat is not None:
                record.views[0].fill(record.flat)
            assert bool((record.views[0].alias == access.tensor).all()), "other bytes came back"
            under_way.use(record, 1)
        else:
            under_way.save(record, writes=False)
    engine.now += trace.tail
    assert under_way.guide is guide
    return engine, stepper, stairs


def saves(trace: Trace, index: int) -> list[int]:
    return [at for at in trace.touches[index] if trace.accesses[at].kind != "read"]


def agree(traces: ModuleType, data: st.DataObject) -> None:
    trace: Trace = data.draw(traces.passes())
    plan = make_plan(
        trace,
        data.draw(traces.LINKS),
        budget=data.draw(st.integers(0, trace.saved)),
        write_ahead=data.draw(st.sampled_from([None, None, 0, 1, 2])),
    )
    keys = [(access.kind, access.tensor, trace.tensors[access.tensor].nbytes) for access in trace.accesses]
    link = data.draw(traces.LINKS)  # another than the one that was planned for
    foreseen = simulate(trace, plan, link, most_held=plan.forecast.held_peak)
    engine, stepper, stairs = train(trace, Guide(keys, trace, plan), link)
    ours = [(span.lane, span.start, span.end, span.nbytes) for span in foreseen.spans if span.lane in ("out", "back")]
    assert engine.spans == ours
    assert tuple(stairs) == foreseen.held
    assert (stepper.holdings.held_peak, stepper.misses) == (foreseen.held_peak, foreseen.misses)
    assert engine.now == pytest.approx(foreseen.seconds)


@settings(max_examples=300)
@given(st.data())
def test_a_training_does_what_the_simulator_foretells(traces: ModuleType, data: st.DataObject) -> None:
    agree(traces, data)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=MANY, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_ten_thousand_trainings_do(traces: ModuleType, data: st.DataObject) -> None:
    agree(traces, data)
