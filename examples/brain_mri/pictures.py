"""The demo's pictures: memory over one step of both runs, and the transfers under the computation that hides them."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from lms.core.plan import make_plan
from lms.core.timeline import Lane, Span, Timeline
from lms.files import write_aside
from lms.link import Link
from lms.picture import Curve, Picture, to_png
from lms.report import render
from lms.trace import Trace


class StepReport(TypedDict):
    """One step, as train.py writes it."""

    step: int
    loss: float
    dice: list[float]
    seconds: float
    peak: int


class SpanReport(TypedDict):
    """Something that took time in a pass: an lms.core.timeline.Span."""

    lane: Lane
    start: float
    end: float
    nbytes: int
    record: int


class Pass(TypedDict):
    """The last pass as it ran."""

    spans: list[SpanReport]
    held: list[tuple[float, int]]  # seconds, saved bytes on the device from then on


class Report(TypedDict):
    """What train.py writes to --json."""

    device: str
    parameters: int
    steps: list[StepReport]
    sha256: dict[str, str]
    memory: list[tuple[float, int]]  # of the last step: seconds since it began, bytes
    mapped_peak: int
    lms: dict[str, float]
    timeline: Pass | None  # under LMS


def write_figures(out: Path, plain: Report, managed: Report, budget: int, cap: int) -> None:
    """Write memory.png and report.html into `out`, from two runs' reports and the trace that is there already.

    `budget` is of saved bytes, `cap` of all bytes. Raises UsageError where matplotlib or jinja2 is missing.
    """
    ran = _timeline(managed)
    picture = Picture(
        title="One training step of a 3D U-Net on a whole brain",
        curves=(_curve("plain", plain), _curve("with LMS", managed)),
        spans=ran.spans if ran else (),
        limit=cap,
        limit_label="hard cap of the proof",
        memory_label="memory in use by the process" if managed["device"] == "cpu" else "allocated memory of the GPU",
    )
    write_aside(out / "memory.png", to_png(picture))
    trace = Trace.load(out / "trace.json")
    link = Link.from_dict(trace.link)
    page = render(
        trace,
        link=link,
        plan=make_plan(trace, link, budget=budget),
        ran=ran,
        stats=managed["lms"],
        title="A 3D U-Net on a whole brain",
    )
    write_aside(out / "report.html", page.encode())


def _curve(label: str, report: Report) -> Curve:
    """Memory in use as it was sampled in the last step, and the most that was held: more, by what is kept for reuse."""
    points = tuple((seconds, nbytes) for seconds, nbytes in report["memory"])
    return Curve(label, points, points[-1][0], max(report["steps"][-1]["peak"], *(nbytes for _, nbytes in points)))


def _timeline(report: Report) -> Timeline | None:
    """The last pass as it ran; None where its times were not taken."""
    ran = report["timeline"]
    if ran is None:
        return None
    return Timeline(tuple(Span(**span) for span in ran["spans"]), tuple((time, held) for time, held in ran["held"]))
