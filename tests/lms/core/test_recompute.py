"""Keep, swap or recompute: the step that a choice leads to, and the choice."""

from __future__ import annotations

from types import ModuleType

from hypothesis import given
from hypothesis import strategies as st

from lms.core.link import Link
from lms.core.plan import make_plan
from lms.core.recompute import Call, Candidate, choose, recompute
from lms.core.trace import Trace

MB = 10**6
SLOW = Link("slow", 1e9, 1e9)


def steps(trace: Trace) -> list[str]:
    """The accesses as words: `w0:2` writes tensor 0 after 2 seconds."""
    return [f"{access.kind[0]}{access.tensor}:{access.seconds:g}" for access in trace.accesses]


def layers(trace: Trace, each: int = 8) -> list[Candidate]:
    """The layers of `traces.gpt`, and in each its perceptron, whose input nothing else saves."""
    found = []
    for first in range(0, len(trace.accesses) // 2 - 1, each):
        inner = Call(first + 4, first + 7, 0.015, (), (8 * MB,))
        found.append(Candidate(f"{first}", (Call(first, first + each, 0.05, (trace.accesses[first].tensor,)),)))
        found.append(Candidate(f"{first}.perceptron", (inner,), frozenset({len(found) - 1})))
    return found


def test_a_recomputed_call_saves_its_inputs_and_runs_again_before_its_first_read(traces: ModuleType) -> None:
    chain = traces.chain([3, 5, 2, 4], [1.0, 2.0, 4.0, 8.0])
    assert steps(chain) == ["w0:1", "w1:2", "w2:4", "w3:8", "r3:0", "r2:16", "r1:8", "r0:4"]
    step = recompute(chain, [Call(1, 3, 5.5, inputs=(0,))])
    step.check()
    # Tensors 2 and 3 are what was 1 and 2; the forward goes on to compute what it does not save.
    assert steps(step) == ["w0:1", "h0:2", "w1:12", "r1:0", "r0:16", "w2:5.5", "w3:0", "h3:0", "h2:8", "r0:4"]
    assert [tensor.nbytes for tensor in step.tensors] == [3, 4, 5, 2]
    assert step.seconds == chain.seconds + 5.5
    assert max(step.live) == 3 + 5 + 2


def test_an_input_that_nothing_else_saves_is_saved_then(traces: ModuleType) -> None:
    step = recompute(traces.chain([3, 5], [1.0, 2.0]), [Call(1, 2, 2.0, extra_inputs=(7,))])
    assert steps(step) == ["w0:1", "w1:2", "r1:0", "w2:2", "h2:0", "r0:4"]
    assert [tensor.nbytes for tensor in step.tensors] == [3, 7, 5]


def test_what_a_later_operation_saves_too_is_saved_from_then_on(traces: ModuleType) -> None:
    tape = traces.Tape([3, 5])
    for kind, tensor in (("write", 0), ("write", 1), ("hold", 1), ("read", 1), ("read", 1), ("read", 0)):
        tape.access(kind, tensor, 1.0)
    step = recompute(tape.trace(), [Call(1, 2, 1.0, inputs=(0,))])
    # The first read is the later operation's. The call makes tensor 1 again, as tensor 2.
    assert steps(step) == ["w0:1", "h0:1", "w1:1", "r1:1", "r0:1", "w2:1", "h2:0", "r0:1"]


def test_the_forward_still_needs_memory_for_what_it_does_not_save(traces: ModuleType) -> None:
    chain = traces.chain([3, 5, 2], [1.0] * 3, base=100, scratch=[0, 7])
    step = recompute(chain, [Call(0, 2, 2.0, extra_inputs=(1,))])
    # As tensor 1 is made: its own 5 bytes and 7 of scratch, as before, and the 3 of tensor 0, which nobody saves now.
    assert step.accesses[1].other == chain.accesses[1].other + 3 == 115
    again = steps(step).index("w2:2")
    assert step.accesses[again].other == 100 + (112 - 103), "the forward's scratch, above what it had at its begin"


def test_nothing_is_recomputed_if_all_fits_or_the_link_hides_the_copies(traces: ModuleType) -> None:
    trace = traces.gpt()
    assert choose(trace, SLOW, layers(trace), budget=trace.saved).why == "none: everything fits"
    fast = choose(trace, Link("fast", 1e12, 1e12), layers(trace), budget=0)
    assert (fast.why, fast.modules) == ("none: the link hides all copies", {})


def test_behind_a_slow_link_what_is_cheap_is_recomputed_and_each_module_has_its_reason(traces: ModuleType) -> None:
    trace = traces.gpt()
    choice = choose(trace, SLOW, layers(trace), budget=trace.saved // 10)
    assert choice.modules
    assert set(choice.modules) <= {one.name for one in layers(trace)}
    reason = "running it again takes 15 ms; copies of the 72 MB that it saves, 145 ms"
    assert choice.modules["0.perceptron"] == reason
    assert choice.why.startswith(f"{len(choice.modules)} modules: a pass computes for 2418 ms")


def test_what_a_module_makes_again_must_fit(traces: ModuleType) -> None:
    trace = traces.chain([4, 10, 10, 10, 4], [1.0] * 5)
    pair = Candidate("pair", (Call(1, 3, 0.1, extra_inputs=(1,)),))
    part = Candidate("part", (Call(1, 2, 0.1, extra_inputs=(1,)),), frozenset({0}))
    slow = Link("slow", 0.01, 0.01)
    assert list(choose(trace, slow, [pair, part], budget=0).modules) == ["part"]
    assert list(choose(trace, slow, [pair, part], budget=10).modules) == ["pair"]


@st.composite
def chains(draw: st.DrawFn, traces: ModuleType) -> tuple[Trace, list[Candidate]]:
    """A pass, and candidates that lie behind or within one another."""
    trace = draw(traces.passes(measured=draw(st.booleans())))
    forward = next((at for at, access in enumerate(trace.accesses) if access.kind == "read"), len(trace.accesses))
    found: list[Candidate] = []

    def add(start: int, stop: int, within: frozenset[int]) -> None:
        while start < stop:
            last = draw(st.integers(start + 1, stop))
            earlier = [index for index, touches in enumerate(trace.touches) if touches[0] <= start]
            inputs = draw(st.sets(st.sampled_from(earlier), max_size=2)) if earlier else set()
            call = Call(
                start, last, draw(traces.SECONDS), tuple(inputs), tuple(draw(st.lists(traces.SIZES, max_size=1)))
            )
            found.append(Candidate(str(len(found)), (call,), within))
            if len(within) < 2 and draw(st.booleans()):
                add(start, last, within | {len(found) - 1})
            start = last + draw(st.integers(0, 2))

    add(0, forward, frozenset())
    return trace, found


@given(st.data())
def test_an_alternative_is_a_step_that_can_be_planned(traces: ModuleType, data: st.DataObject) -> None:
    trace, candidates = data.draw(chains(traces))
    outer = [one for one in candidates if not one.within]
    chosen = data.draw(st.lists(st.sampled_from(outer), unique=True)) if outer else []
    calls = [call for one in chosen for call in one.calls]
    step = recompute(trace, calls)
    step.check()
    again = sum(call.seconds for call in calls)
    assert trace.seconds <= step.seconds <= trace.seconds + again, "all times are multiples of 1/4"
    make_plan(step, data.draw(traces.LINKS), budget=data.draw(st.integers(0, trace.saved)))


@given(st.data())
def test_no_choice_is_slower_in_the_simulation_than_swapping_alone(traces: ModuleType, data: st.DataObject) -> None:
    trace, candidates = data.draw(chains(traces))
    link, budget = data.draw(traces.LINKS), data.draw(st.integers(0, trace.saved))
    names = choose(trace, link, candidates, budget=budget).modules
    step = recompute(trace, [call for one in candidates if one.name in names for call in one.calls])
    plan = make_plan(step, link, budget=budget)
    swapping = make_plan(trace, link, budget=budget)
    assert plan.forecast.seconds <= swapping.forecast.seconds
    assert plan.forecast.held_peak <= max(budget + trace.largest, swapping.forecast.held_peak)
