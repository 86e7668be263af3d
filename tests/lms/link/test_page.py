"""A recorded step on other links, and the report's part about them."""

from __future__ import annotations

import pytest

from lms.core.link import Link
from lms.core.plan import make_plan
from lms.core.simulate import simulate
from lms.core.trace import Access, Tensor
from lms.link.comparison import FASTEST, headroom
from lms.link.page import elsewhere, headroom_text
from lms.link.watch import Sample, Watched
from lms.trace import Trace

MB = 10**6


def step(seconds: float = 1e-2) -> Trace:
    accesses = [Access("write", at, seconds, 300 * MB) for at in range(8)]
    accesses += [Access("read", at, seconds, 300 * MB) for at in reversed(range(8))]
    tensors = tuple(Tensor(100 * MB, 16 - at, let_go=at + 1) for at in range(8))
    return Trace(tensors, tuple(accesses), capacity=10**9, tail=seconds, tail_other=300 * MB)


def test_headroom_is_a_plain_number() -> None:
    assert [headroom_text(one) for one in (0.0, 1.5, 123456.0, 1e6)] == ["none", "1.5 x", "123456 x", "any"]


def test_a_faster_link_takes_no_longer_and_has_more_headroom() -> None:
    links = [("a", Link("a", 20e9, 20e9)), ("b", Link("b", 200e9, 200e9))]
    (_, _, slow, less), (_, _, fast, more) = elsewhere(step(), links)
    assert fast <= slow
    assert more > less > 0


def test_headroom_is_where_the_step_becomes_slower_by_a_tenth() -> None:
    from lms.link.comparison import SLOWER, at_speed

    trace, link = step(), Link("a", 50e9, 50e9, 1e-6)
    plan = make_plan(trace, link, budget=200 * MB)
    factor = headroom(trace, plan, link)
    assert 1 < factor < FASTEST
    within, beyond = at_speed(trace, factor), at_speed(trace, 1.06 * factor)
    assert simulate(within, plan, link).seconds <= SLOWER * within.seconds * (1 + 1e-9)
    assert simulate(beyond, plan, link).seconds > SLOWER * beyond.seconds


def test_a_link_too_slow_has_none_and_a_step_that_moves_nothing_any() -> None:
    trace = step()
    slow = Link("a", 1e6, 1e6)
    assert headroom(trace, make_plan(trace, slow, budget=0), slow) == 0.0
    assert headroom(trace, make_plan(trace, slow, budget=trace.saved), slow) == float("inf")


def watched(**change: object) -> Watched:
    fields = {
        "what": "all of sdx", "seconds": 2.0, "out": 900, "back": 800, "memory": 5 * MB, "busy": 0.25,
        "samples": (Sample(0.0, 1.0, 400, 500, MB), Sample(1.0, 2.0, 500, 300, MB)), "cost": 0.001, "readings": 3,
    }  # fmt: skip
    return Watched(**(fields | change))  # type: ignore[arg-type]


def page(trace: Trace, link: Link | None, counted: Watched | str | None) -> str:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    from lms.link.page import facts
    from lms.report import template

    return template("links.html").render(**facts(trace, link, counted, {"swapped_out": 1000, "swapped_in": 1000}))


def test_the_page_has_the_machines_bytes_beside_ours_and_the_other_links() -> None:
    text = page(step(), Link("here", 1e9, 1e9), watched())
    assert "Counted by the machine while it trained" in text
    assert "900 B" in text
    assert "0.90" in text
    assert "Power System AC922, 4 V100" in text
    assert "GH200" in text
    assert "<svg" in text


def test_bytes_that_were_not_counted_are_called_that() -> None:
    text = page(step(), None, watched(out=None, back=None, error="the GPU fell off the bus", samples=()))
    assert "not counted" in text
    assert "the GPU fell off the bus" in text
    assert "This step on other links" not in text


def test_why_nothing_was_counted_is_told_and_escaped() -> None:
    assert "Not counted: no &lt;NVML&gt;." in page(step(), None, "no <NVML>")


def test_without_anything_to_tell_there_is_no_page() -> None:
    assert page(step(), None, None).strip() == ""
