"""Static schedules, run by a machine whose copies take as long as they like."""

from types import ModuleType

from hypothesis import given, settings
from hypothesis import strategies as st

from lms.core.plan import make_plan
from lms.core.schedule import Schedule, Swap
from lms.core.static import CopyBack, CopyOut, StaticSchedule, make_static
from lms.core.trace import Access, Tensor, Trace

SECONDS = st.sampled_from([0.0, 0.5, 1.0, 3.0, 10.0, 100.0])


class Machine:
    """Runs the operations in the trace's order, a second each, and the copies as their edges allow.

    Nothing of the stepper's is in it. Memory is counted from the moment in which it is allocated to the one in which
    its last user is done.
    """

    def __init__(self, trace: Trace, static: StaticSchedule, delays: st.DataObject) -> None:
        self.trace, self.static = trace, static
        self.reached: list[float] = []
        self.out_done: list[float] = []
        self.back_start: list[float] = []
        back_done: dict[tuple[int, int], float] = {}
        out_free = back_free = now = 0.0
        for at, access in enumerate(trace.accesses):
            now += 1.0
            self.reached.append(now)
            for out in static.outs[len(self.out_done) :]:
                if out.after > at:
                    break
                out_free = max(out_free, now) + delays.draw(SECONDS)
                self.out_done.append(out_free)
            gates = [self.out_done[index] for index, out in enumerate(static.outs) if out.gate == at]
            for back in static.backs[len(self.back_start) :]:
                if back.trigger > at:
                    break
                edges = (*back.behind, *(() if back.out is None else (back.out,)))
                self.back_start.append(max([back_free, now, *(self.out_done[one] for one in edges)]))
                back_free = self.back_start[-1] + delays.draw(SECONDS)
                back_done[back.tensor, back.before] = back_free
            waits = [back_done[access.tensor, at]] if (access.tensor, at) in back_done else []
            now = max([now, *gates, *waits])
        self.back_done = back_done

    def most_held(self) -> int:
        """The most bytes held at any moment."""
        changes: list[tuple[float, int, int]] = []  # when; frees before allocations; bytes
        for index, tensor in enumerate(self.trace.tensors):
            if not tensor.pinned:
                for begin, end in self.spans(index):
                    changes += [(begin, 1, tensor.nbytes), (max(begin, end), 0, -tensor.nbytes)]
        held = most = 0
        for _, _, change in sorted(changes):
            held += change
            most = max(most, held)
        return most

    def spans(self, index: int) -> list[tuple[float, float]]:
        """When the tensor's bytes are on the device: written, then brought back each time."""
        touches = self.trace.touches[index]
        backs = [(one.before, self.back_start[at]) for at, one in enumerate(self.static.backs) if one.tensor == index]
        begins = [(touches[0], self.reached[touches[0]]), *backs]
        spans = []
        for (first, begin), (following, _) in zip(begins, [*begins[1:], (len(self.reached), 0.0)], strict=True):
            # What LMS let go of and the framework keeps in hand (a hold) is not held, as everywhere.
            mine = [at for at in touches if first <= at < following and self.trace.accesses[at].kind != "hold"]
            outs = {
                one.after: self.out_done[at]
                for at, one in enumerate(self.static.outs)
                if one.tensor == index and first <= one.after < following
            }
            reads = [at for at in mine if self.trace.accesses[at].kind == "read"]
            if outs and (following < len(self.reached) or not any(at > after for at in reads for after in outs)):
                end = max(self.reached[mine[-1]], *outs.values())
            elif reads:  # a graph drops it once the operation that read it last is over
                end = max([self.time_of(reads[-1] + 1), *outs.values()])
            else:
                end = self.time_of(self.trace.tensors[index].freed)
            spans.append((begin, end))
        return spans

    def time_of(self, position: int | None) -> float:
        assert position is not None
        return self.reached[position] if position < len(self.reached) else float("inf")


@settings(max_examples=300)
@given(st.data())
def test_no_delay_of_the_copies_makes_it_hold_more(traces: ModuleType, data: st.DataObject) -> None:
    trace = data.draw(traces.passes())
    plan = make_plan(trace, data.draw(traces.LINKS), budget=data.draw(st.integers(0, trace.saved)))
    static = make_static(trace, plan)
    machine = Machine(trace, static, data)
    assert machine.most_held() <= static.held_peak
    assert len(machine.out_done) == len(static.outs)
    assert len(machine.back_start) == len(static.backs)


@settings(max_examples=300)
@given(st.data())
def test_it_holds_what_the_plan_promises(traces: ModuleType, data: st.DataObject) -> None:
    trace = data.draw(traces.passes())
    budget = data.draw(st.integers(0, trace.saved))
    plan = make_plan(trace, data.draw(traces.LINKS), budget=budget)
    needed = max(traces.required(trace, plan.moves), default=0)
    assert make_static(trace, plan).held_peak <= max(budget + trace.largest, needed)
    for back in make_static(trace, plan).backs:
        assert trace.accesses[back.before].kind == "read"
        assert back.trigger <= back.before


def test_the_edges_of_three_layers_by_hand(traces: ModuleType) -> None:
    trace = traces.chain([4, 4, 4], [1.0] * 3)  # written at 0, 1, 2 and read at 3, 4, 5
    schedule = Schedule((Swap(0, 0, 5, 4, True), Swap(1, 1, 4, 3, True)), (8, 8, 8, 8, 8, 8))
    assert make_static(trace, schedule) == StaticSchedule(
        outs=(CopyOut(0, after=0, gate=2), CopyOut(1, after=1, gate=None)),
        backs=(CopyBack(0, out=0, trigger=4, behind=(), before=5),),
        held_peak=12,
    )


def test_a_tensor_that_does_not_leave_in_time_stays_and_its_reader_waits_for_nothing(traces: ModuleType) -> None:
    trace = traces.chain([4, 4], [1.0] * 2)
    static = make_static(trace, Schedule((Swap(0, 0, 3, 2, True),), (100,) * 4))
    assert static.outs == (CopyOut(0, after=0, gate=None),)
    assert static.backs == ()


def test_state_that_lives_on_is_read_from_where_the_step_before_left_it() -> None:
    state, activation = Tensor(8, None, "optimizer"), Tensor(4, 2)
    accesses = tuple(Access(kind, at, 1.0) for kind, at in (("write", 1), ("read", 1), ("read", 0), ("write", 0)))
    trace = Trace((state, activation), accesses)
    static = make_static(trace, Schedule((Swap(0, 3, 6, 5, True),), (4, 12, 8, 8)))
    assert static.backs == (CopyBack(0, out=None, trigger=1, behind=(), before=2),)
    assert static.outs == (CopyOut(0, after=3, gate=None),)
