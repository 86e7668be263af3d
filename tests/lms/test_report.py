"""The page about one step, and the table of limits."""

import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser

import pytest

from lms.core.plan import Choice, make_plan
from lms.core.timeline import Timeline
from lms.core.trace import Access, Tensor
from lms.limits import limit_document, limits_of, limits_text
from lms.link import Link
from lms.report import picture_of, render
from lms.stats import Stats
from lms.trace import Trace

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

MB = 10**6
LINK = Link("disk", 2e9, 1e9, source="measured on <this> machine")


def chain(length: int = 8, *, nbytes: int = 100 * MB, other: int = 300 * MB) -> Trace:
    """Layers that each save one tensor; the backward uses them in the opposite order. A second before each access."""
    accesses = [Access("write", at, 1.0, other) for at in range(length)]
    accesses += [Access("read", at, 1.0, other) for at in reversed(range(length))]
    tensors = tuple(
        Tensor(
            nbytes,
            freed=2 * length - at,
            let_go=at + 1,
            module=f"layer{at}",
            dtype="float32",
            shape=(5, 5),
        )
        for at in range(length)
    )
    return Trace(tensors, tuple(accesses), capacity=10**10, tail=1.0, tail_other=other, machine={"host": "a&b"})


class Page(HTMLParser):
    """The text of a page, and everything that it would load."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.loads: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if tag in ("script", "link", "img", "iframe"):
            self.loads.append(tag)
        self.loads += [
            value for name, value in attrs if name in ("src", "href", "xlink:href") and value and value[0] != "#"
        ]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_answer_names_the_floor_plains_peak_and_a_row_for_each_share() -> None:
    trace = chain()
    limits = limits_of(trace, LINK)
    assert [round(row.share, 2) for row in limits] == [1.0, 0.75, 0.5, 0.35, 0.25, 0.0]
    assert limits[0].moved == 0
    assert limits[0].slowdown == 1.0
    moved = [row.moved for row in limits]
    assert moved == sorted(moved)
    peaks = [row.peak for row in limits if row.peak is not None]
    assert len(peaks) == len(limits)
    assert peaks == sorted(peaks, reverse=True)
    text = limits_text(trace, LINK, limits)
    assert re.search(r"^unswapped +1\.1 GB,", text, re.MULTILINE)
    assert re.search(r"^floor +400 MB, module 'layer\d': no limit can be lower$", text, re.MULTILINE)
    assert len(text[text.index("may stay") :].splitlines()) == 1 + len(limits)


def test_what_is_foretold_of_a_step_is_its_passes_and_the_rest_of_its_cycle() -> None:
    alone = chain()
    trace = replace(alone, cycle=100.0, busy=40.0, passes=2.0)
    passes, steps = limits_of(alone, LINK), limits_of(trace, LINK)
    assert passes[-1].seconds > alone.seconds, "copies show, or the test tests nothing"
    for one, step in zip(passes, steps, strict=True):
        assert step.seconds == pytest.approx(100.0 + 2 * (one.seconds - alone.seconds))
        assert step.slowdown == pytest.approx(step.seconds / 100.0)
    text = limits_text(trace, LINK, limits_of(trace, LINK))
    assert re.search(r"^pass +17 s of computation in each of 2 passes a step$", text, re.MULTILINE)
    told = r"^step +1 min 40 s from one optimizer step to the next; the device computed for 40 s of it \(40%\)$"
    assert re.search(told, text, re.MULTILINE)
    document = limit_document(trace, LINK, limits_of(trace, LINK))
    assert (document["seconds"], document["cycle"], document["busy"], document["passes"]) == (17.0, 100.0, 40.0, 2.0)


def test_without_a_cycle_the_table_speaks_of_passes() -> None:
    text = limits_text(chain(), LINK, limits_of(chain(), LINK))
    assert re.search(r"^pass .*the step around it was not measured$", text, re.MULTILINE)
    assert re.search(r"moved out +pass  x plain$", text, re.MULTILINE)
    assert limit_document(chain(), LINK, limits_of(chain(), LINK))["cycle"] is None


def test_a_limit_from_the_table_can_be_asked_for() -> None:
    trace = chain()
    for row in limits_of(trace, LINK):
        assert row.limit is not None
        assert make_plan(trace, LINK, limit=row.limit).forecast.resident_peak <= row.limit


def test_without_a_measured_rest_the_table_speaks_of_saved_bytes_only() -> None:
    trace = chain(other=0)
    limits = limits_of(trace, LINK)
    assert {row.limit for row in limits} == {row.peak for row in limits} == {None}
    text = limits_text(trace, LINK, limits)
    assert "floor" not in text
    assert "held" in text
    document = limit_document(trace, LINK, limits)
    assert document["floor"] is document["plain_peak"] is None


def test_the_document_is_json_with_bytes_and_seconds() -> None:
    trace = chain()
    document = json.loads(json.dumps(limit_document(trace, LINK, limits_of(trace, LINK))))
    assert document["format"] == "lms-limits-1"
    assert (document["saved"], document["largest"], document["seconds"]) == (800 * MB, 100 * MB, 17.0)
    assert document["link"]["out"] == 2e9
    assert set(document["limits"][0]) == {
        *("share", "budget", "limit", "held_peak", "peak", "moved", "seconds", "slowdown"),
    }


def test_a_page_on_a_trace_alone_shows_plain_memory_the_limits_and_the_modules() -> None:
    page = Page(render(chain(), link=LINK))
    for part in ("800 MB saved for the backward pass", "1.1 GB peak with nothing swapped", "400 MB floor", "layer7",
                 "What a limit costs", "plain: peak 1.1 GB", "measured on <this> machine", "a&b"):  # fmt: skip
        assert part in page.text
    assert "decision" not in page.text


def test_a_page_without_a_link_says_nothing_of_what_limits_cost() -> None:
    page = Page(render(chain()))
    assert "What a limit costs" not in page.text
    assert "800 MB saved for the backward pass" in page.text


def test_a_page_with_a_plan_gives_each_record_its_decision_and_reason() -> None:
    trace = chain()
    plan = make_plan(trace, LINK, limit=700 * MB)
    page = Page(render(trace, link=LINK, plan=plan))
    assert "LMS, predicted: peak" in page.text
    assert "limit: 700 MB" in page.text
    assert plan.moved()
    for index in range(len(trace.tensors)):
        assert plan.reasons[index] in page.text


def test_a_page_names_the_modules_that_are_recomputed_and_why() -> None:
    trace = chain()
    choice = Choice("1 module: less time", {"net.<3>": "copies take longer"})
    text = Page(render(trace, link=LINK, plan=replace(make_plan(trace, LINK, budget=0), choice=choice))).text
    assert "1 module: less time" in text
    assert "net.<3>" in text
    assert "copies take longer" in text


def test_a_page_on_a_measured_pass_says_measured() -> None:
    trace = chain()
    plan = make_plan(trace, LINK, limit=700 * MB)
    ran = Timeline(plan.forecast.spans, plan.forecast.held)
    stats = asdict(Stats(passes=3, limit=710 * MB, peak=650 * MB, last_seconds=20.0))
    page = Page(render(trace, link=LINK, plan=plan, ran=ran, stats=stats, title="train.py <4>"))
    assert "LMS, measured: peak" in page.text
    assert "limit: 710 MB" in page.text  # as asked for, though planned for less
    assert "650 MB peak with LMS measured" in page.text
    assert "20 s (1.18 x)" in page.text
    assert "train.py <4>" in page.text
    assert "swapped_out" in page.text


def test_a_page_has_the_advice_that_the_figures_support() -> None:
    trace = chain()
    plan = make_plan(trace, LINK, limit=700 * MB)
    stats = Stats(steps=50, passes=50, limit=700 * MB, elapsed=100.0, stall_in=30.0)
    page = Page(render(trace, link=LINK, plan=plan, stats=asdict(stats)))
    assert "30% of the time (30 s of 1 min 40 s)" in page.text
    assert "Advice" not in Page(render(trace, link=LINK, plan=plan, stats=asdict(replace(stats, stall_in=0.0)))).text


def test_a_page_needs_nothing_but_itself_and_closes_what_it_opens() -> None:
    page = Page(render(chain(), link=LINK, plan=make_plan(chain(), LINK, budget=0)))
    assert page.loads == []
    assert page.open == []


def test_what_a_trace_says_cannot_become_markup() -> None:
    trace = Trace((Tensor(1, 1, module="<script>x</script>"),), (Access("write", 0, 1.0),))
    assert "<script>" not in render(trace, link=LINK)


def test_the_picture_shows_the_budget_when_no_limit_bounds_the_device() -> None:
    trace = chain()
    picture = picture_of(trace, make_plan(trace, LINK, budget=250 * MB))
    assert (picture.limit, picture.limit_label, picture.floor) == (250 * MB, "budget", None)
    assert picture.curves[0].peak == 800 * MB


def test_the_picture_shows_the_limit_and_the_floor_where_the_device_was_measured() -> None:
    trace = chain()
    picture = picture_of(trace, make_plan(trace, LINK, limit=700 * MB))
    assert (picture.limit, picture.limit_label, picture.floor) == (700 * MB, "limit", 400 * MB)
    assert [curve.peak for curve in picture.curves] == [
        1100 * MB,
        make_plan(trace, LINK, limit=700 * MB).forecast.resident_peak,
    ]


def test_a_page_on_an_empty_trace_can_be_made() -> None:
    assert "0 B saved" in Page(render(Trace((), ()))).text
