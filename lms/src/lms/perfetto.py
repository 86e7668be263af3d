"""A pass as a file that Perfetto opens: slices, copies and counters in Chrome's Trace Event Format. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate

from lms.core.plan import Plan
from lms.core.timeline import Lane, Span, Timeline
from lms.core.trace import Trace
from lms.picture import LANES, managed_curve
from lms.units import format_size

Event = dict[str, object]

_PROCESS = 1
_TRACKS: dict[Lane, int] = {lane: at for at, (lane, _, _) in enumerate(LANES, 1)}
_NAMES = {_TRACKS[lane]: "passes and modules" if lane == "compute" else name for lane, name, _ in LANES}


def to_json(trace: Trace, ran: Timeline, plan: Plan | None, *, measured: bool) -> str:
    """The document: one pass of `trace` that went, or is foreseen to go, as `ran` tells, by `plan` if it had one."""
    kind = "measured" if measured else "forecast"
    script = trace.machine.get("script", "")
    name = f"{script}: one pass, {kind}" if script else f"one pass, {kind}"
    facts = {"lms": kind, "device": trace.device, **trace.machine}
    return json.dumps({"traceEvents": events(trace, ran, plan, name=name), "otherData": facts})


def events(trace: Trace, ran: Timeline, plan: Plan | None = None, *, name: str = "one pass") -> list[Event]:
    """The pass as trace events: times in microseconds since it began, sizes in bytes.

    Complete events ("X") on four tracks: the pass, its forward and backward and the modules, one inside another; the
    copies out; the copies back; waiting. Counters ("C"): the bytes held, what the plan allows, and the device's memory
    if the trace measured that.
    """
    found: list[Event] = [_metadata("process_name", name)]
    found += [_metadata("thread_name", track, tid) for tid, track in _NAMES.items()]
    found += [_metadata("thread_sort_index", tid, tid) for tid in _NAMES]
    spans = _stretches(trace, ran)
    found += _slices(trace, spans, ran)
    for span in ran.spans:
        if span.lane != "compute":
            found.append(
                _complete(_TRACKS[span.lane], _title(trace, span), span.start, span.end, _facts(trace, span, plan))
            )
    found += _counter("held", ran.held)
    if plan is not None and len(plan.cap) == len(trace.accesses):
        # The cap of an access holds once it is done with, which is when the computation before it is over.
        found += _counter("allowed by the plan", [(span.end, cap) for span, cap in zip(spans, plan.cap, strict=False)])
    if trace.measured:
        whose = "process" if trace.device == "cpu" else "device"
        found += _counter(f"memory of the {whose}", managed_curve(trace, ran, whole=True).points)
    return found


def _stretches(trace: Trace, ran: Timeline) -> list[Span]:
    """The computation before each access, and that of the tail."""
    computed = [span for span in ran.spans if span.lane == "compute"]
    if len(computed) == len(trace.times):
        return computed
    # The simulator has no spans for stretches that take no time.
    left, stretches = iter(computed), list[Span]()
    for seconds in trace.times:
        now = stretches[-1].end if stretches else 0.0
        stretches.append(next(left, Span("compute", now, now)) if seconds > 0 else Span("compute", now, now))
    return stretches


def _slices(trace: Trace, spans: Sequence[Span], ran: Timeline) -> list[Event]:
    """The pass, and inside it what computed; a slice goes on while the same module does, waiting included."""
    end = max((span.end for span in ran.spans if span.lane in ("compute", "stall")), default=0.0)
    open_slices: list[tuple[str, float]] = [("pass", 0.0)]
    found: list[tuple[float, int, Event]] = []  # begin, depth, slice
    now = 0.0

    def close(depth: int, until: float) -> None:
        while len(open_slices) > depth:
            name, start = open_slices.pop()
            found.append((start, len(open_slices), _complete(_TRACKS["compute"], name, start, until)))

    for names, span in zip(_paths(trace), spans, strict=False):
        if span.end <= span.start:
            continue
        same = 0
        for (name, _), wanted in zip(open_slices[1:], names, strict=False):
            if name != wanted:
                break
            same += 1
        close(1 + same, now)
        open_slices += [(name, span.start) for name in names[same:]]
        now = span.end
    close(1, now)
    close(0, end)
    # Of slices that begin at once, Perfetto takes the first one for the outer one.
    return [event for _, _, event in sorted(found, key=lambda one: one[:2])]


def _paths(trace: Trace) -> list[tuple[str, ...]]:
    """For each stretch of computation the names of its slices, the outermost first.

    Autograd saves a tensor at the end of an operation and reads it at the begin of the operation's backward. So the
    computation before a save is the module's that saved, and the computation after a read the module's that read.
    """
    accesses = trace.accesses
    if not accesses:
        return [()]
    kinds = [access.kind for access in accesses]
    first_read = kinds.index("read") if "read" in kinds else len(kinds)
    paths = []
    for at in range(len(accesses) + 1):
        behind = at == len(accesses) or (at > 0 and kinds[at - 1] == "read")
        parts = trace.tensors[accesses[at - behind].tensor].module.split(".")
        modules = accumulate(parts, "{}.{}".format) if parts != [""] else ()
        # Other frameworks' graphs read in their forward, too.
        phase = ("forward" if at < first_read else "backward",) if "torch" in trace.machine else ()
        paths.append((*phase, *modules))
    return paths


def _title(trace: Trace, span: Span) -> str:
    if span.record < 0:
        return "waiting"
    record = trace.tensors[span.record] if span.record < len(trace.tensors) else None
    return f"{record.module or 'record'} #{span.record}" if record is not None else f"#{span.record}"


def _facts(trace: Trace, span: Span, plan: Plan | None) -> dict[str, object]:
    """What is known of a copy, or of what a stall waited for."""
    if not 0 <= span.record < len(trace.tensors):
        return {}
    record = trace.tensors[span.record]
    facts: dict[str, object] = {
        "record": span.record,
        "module": record.module,
        "bytes": record.nbytes,
        "size": format_size(record.nbytes),
        "tensor": f"{record.dtype}{list(record.shape)}",
    }
    if span.lane != "stall":
        planned = plan is not None and span.record in plan.moved()
        facts["reason"] = plan.reasons[span.record] if plan is not None and planned else _UNPLANNED
    return facts


_UNPLANNED = "no plan: the oldest record leaves when room is needed, and comes back when it is used"


def _counter(name: str, points: Sequence[tuple[float, int]]) -> list[Event]:
    return [
        {"ph": "C", "pid": _PROCESS, "name": name, "ts": _micro(at), "args": {"bytes": size}} for at, size in points
    ]


def _complete(track: int, name: str, start: float, end: float, facts: dict[str, object] | None = None) -> Event:
    began = _micro(start)
    return {
        "ph": "X",
        "pid": _PROCESS,
        "tid": track,
        "name": name,
        "ts": began,
        "dur": round(max(0.0, _micro(end) - began), 3),
        "args": facts or {},
    }


def _metadata(kind: str, value: object, tid: int = 0) -> Event:
    key = "sort_index" if kind == "thread_sort_index" else "name"
    return {"ph": "M", "pid": _PROCESS, "tid": tid, "name": kind, "args": {key: value}}


def _micro(seconds: float) -> float:
    """Microseconds, to the nanosecond that Perfetto counts in, so that slices nest after it has rounded."""
    return round(seconds * 1e6, 3)
