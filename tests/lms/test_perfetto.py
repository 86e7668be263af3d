"""A pass as trace events: slices that nest, copies with their reasons, and counters that are the held bytes."""

import json
from dataclasses import replace
from types import ModuleType

from hypothesis import given

from lms.core.plan import make_plan
from lms.core.schedule import Schedule
from lms.core.simulate import simulate
from lms.core.timeline import Span, Timeline
from lms.core.trace import Access, Tensor
from lms.link import Link
from lms.perfetto import Event, events, to_json
from lms.trace import Trace

MB = 10**6
LINK = Link("disk", 2e9, 1e9)
TRACKS = {1: "passes and modules", 2: "copies out", 3: "copies back", 4: "waiting"}


def two_layers() -> Trace:
    """An encoder of two layers and a head; each saves 100 MB. A second before each access and in the tail."""
    modules = ("encoder.0", "encoder.1", "head")
    accesses = [Access("write", at, 1.0, 300 * MB) for at in range(3)]
    accesses += [Access("read", at, 1.0, 300 * MB) for at in reversed(range(3))]
    tensors = tuple(
        Tensor(100 * MB, 6 - at, let_go=at + 1, module=name, dtype="float32", shape=(5, 5))
        for at, name in enumerate(modules)
    )
    return Trace(tensors, tuple(accesses), tail=1.0, tail_other=300 * MB, machine={"torch": "2", "script": "train.py"})


def forecast(trace: Trace, *, budget: int) -> tuple[Timeline, object]:
    plan = make_plan(trace, LINK, budget=budget)
    return Timeline(plan.forecast.spans, plan.forecast.held), plan


def slices(found: list[Event], track: int) -> list[tuple[str, float, float]]:
    """Name, begin and end of each slice of a track, in seconds."""
    shown = [event for event in found if event["ph"] == "X" and event["tid"] == track]
    return [(event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in shown]


def counter(found: list[Event], name: str) -> list[tuple[float, int]]:
    shown = [event for event in found if event["ph"] == "C" and event["name"] == name]
    return [(event["ts"] / 1e6, event["args"]["bytes"]) for event in shown]


def test_a_pass_holds_forward_and_backward_and_these_their_modules() -> None:
    trace = two_layers()
    ran, _ = forecast(trace, budget=300 * MB)
    assert slices(events(trace, ran), 1) == [
        ("pass", 0.0, 7.0),
        ("forward", 0.0, 3.0),
        ("encoder", 0.0, 2.0),
        ("encoder.0", 0.0, 1.0),
        ("encoder.1", 1.0, 2.0),
        ("head", 2.0, 3.0),
        ("backward", 3.0, 7.0),
        ("head", 3.0, 5.0),
        ("encoder", 5.0, 7.0),
        ("encoder.1", 5.0, 6.0),
        ("encoder.0", 6.0, 7.0),
    ]


def test_only_autograds_reads_begin_a_backward() -> None:
    trace = replace(two_layers(), machine={})
    ran, _ = forecast(trace, budget=300 * MB)
    assert {"forward", "backward"}.isdisjoint(name for name, _, _ in slices(events(trace, ran), 1))


def test_a_copy_has_its_record_its_bytes_and_the_plans_reason() -> None:
    trace = two_layers()
    ran, plan = forecast(trace, budget=0)
    found = events(trace, ran, plan)
    for track, lane in ((2, "out"), (3, "back")):
        copies = [event for event in found if event["ph"] == "X" and event["tid"] == track]
        spans = [span for span in ran.spans if span.lane == lane]
        assert len(copies) == len(spans) > 0
        for event, span in zip(copies, spans, strict=True):
            assert event["name"] == f"{trace.tensors[span.record].module} #{span.record}"
            facts = event["args"]
            assert (facts["bytes"], facts["tensor"]) == (100 * MB, "float32[5, 5]")
            assert facts["reason"] == plan.reasons[span.record]
    unplanned = next(event for event in events(trace, ran) if event["ph"] == "X" and event["tid"] == 2)
    assert unplanned["args"]["reason"].startswith("no plan: ")


def test_a_stall_of_the_forecast_says_what_it_waits_for() -> None:
    trace = two_layers()
    ran = Timeline((Span("compute", 0.0, 1.0), Span("stall", 1.0, 2.0, 100 * MB, 1), Span("stall", 2.0, 2.5)), ())
    found = [event for event in events(trace, ran) if event["ph"] == "X" and event["tid"] == 4]
    assert [(event["name"], event["args"].get("bytes")) for event in found] == [
        ("encoder.1 #1", 100 * MB),
        ("waiting", None),
    ]


def test_the_counters_are_the_held_bytes_the_plans_cap_and_the_processs_memory() -> None:
    trace = two_layers()
    ran, plan = forecast(trace, budget=150 * MB)
    found = events(trace, ran, plan)
    assert counter(found, "held") == list(ran.held)
    assert counter(found, "allowed by the plan") == [(float(1 + at), cap) for at, cap in enumerate(plan.cap)]
    assert max(size for _, size in counter(found, "memory of the process")) == plan.forecast.resident_peak
    unmeasured = replace(trace, accesses=tuple(replace(access, other=0) for access in trace.accesses))
    assert counter(events(unmeasured, ran), "memory of the process") == []


def test_the_document_is_json_and_says_whether_it_was_measured() -> None:
    trace = two_layers()
    ran, plan = forecast(trace, budget=0)
    document = json.loads(to_json(trace, ran, plan, measured=False))
    assert document["otherData"]["lms"] == "forecast"
    named = {event["tid"]: event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"}
    assert named == TRACKS
    (process,) = [event for event in document["traceEvents"] if event["name"] == "process_name"]
    assert process["args"]["name"] == "train.py: one pass, forecast"


def test_an_empty_trace_can_be_drawn() -> None:
    assert slices(events(Trace((), ()), Timeline((), ())), 1) == [("pass", 0.0, 0.0)]


def test_whatever_a_pass_does_its_slices_nest_and_its_counter_is_what_is_held(traces: ModuleType) -> None:
    @given(traces.passes())
    def check(trace: Trace) -> None:
        trace = replace(trace, machine={"torch": "2"})
        plan = make_plan(trace, traces.INSTANT, budget=trace.saved // 3)
        found = events(trace, Timeline(plan.forecast.spans, plan.forecast.held), plan)
        for track in TRACKS:
            inside = [float("inf")]  # ends
            for name, start, end in slices(found, track):
                while inside[-1] <= start:
                    inside.pop()
                assert start <= end <= inside[-1], (track, name)
                inside.append(end)
        nothing = simulate(trace, Schedule((), (trace.saved,) * len(trace.accesses)), traces.INSTANT)
        shown = counter(events(trace, Timeline(nothing.spans, nothing.held)), "held")
        moment = 0.0
        for at, seconds in enumerate(trace.times[:-1]):
            moment += seconds
            if trace.times[at + 1] > 0:  # no other access is at this moment
                assert [size for when, size in shown if when <= moment][-1] == trace.live[at]

    check()
