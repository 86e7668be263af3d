"""The page of a host, read by prometheus_client's own strict parser."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from itertools import count

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from lms.metrics import page as page_module
from lms.metrics.families import BY_NAME, FAMILIES, Sample, sample_of
from lms.metrics.page import Page, PageTakenError

_jobs = count()


@pytest.fixture
def port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def make(port: int) -> Iterator[Callable[..., Page]]:
    """Pages of one job at one port."""
    job, pages = f"test:{next(_jobs)}", []

    def made(rank: int, job: str | None = job) -> Page:
        pages.append(Page(port, "127.0.0.1", (str(rank), "here"), job))
        return pages[-1]

    yield made
    for page in pages:
        page.close()


def get(port: int) -> tuple[str, dict[tuple[str, str], float]]:
    """The page's text, and the values by series and rank."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": OPENMETRICS})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return text, {(one.name, one.labels["rank"]): one.value for family in families for one in family.samples}


OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def steps(number: int) -> Sample:
    return sample_of("lms", {"steps": number})


def wait_for(what: Callable[[], bool], seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it has not come"
        time.sleep(0.02)


def test_every_family_keeps_openmetrics_rules(make: Callable[..., Page], port: int) -> None:
    page = make(0)
    page.publish({one.name: [([f"{label} 1" for label in one.labels], 1.5)] for one in FAMILIES})
    text, values = get(port)
    assert text.endswith("# EOF\n")
    assert {name for name, _ in values} == {one.series for one in FAMILIES}
    for one in FAMILIES:
        assert f"# HELP {one.name} {one.help}" in text
        assert f"# TYPE {one.name} {one.kind}" in text
        assert one.unit in ("", "bytes", "seconds", "ratio")
        if one.unit:
            assert one.name.endswith(f"_{one.unit}")
            assert f"# UNIT {one.name} {one.unit}" in text


def test_names_are_there_once() -> None:
    assert len(BY_NAME) == len(FAMILIES)


def test_the_ranks_of_a_host_share_a_port_and_one_that_leaves_is_off_the_page(
    make: Callable[..., Page], port: int
) -> None:
    pages = [make(rank) for rank in range(3)]
    for number, page in enumerate(pages):
        page.publish(steps(10 + number))
    assert get(port)[1] == {("lms_steps_total", str(rank)): 10.0 + rank for rank in range(3)}
    pages[2].publish(steps(20))
    assert get(port)[1]["lms_steps_total", "2"] == 20.0
    pages[1].close()
    assert get(port)[1] == {("lms_steps_total", "0"): 10.0, ("lms_steps_total", "2"): 20.0}


def test_if_the_rank_that_serves_ends_another_one_takes_its_place(make: Callable[..., Page], port: int) -> None:
    first, second, third = make(0), make(1), make(2)
    for page in (first, second, third):
        page.publish(steps(1))
    first.close()

    def served() -> bool:
        second.publish(steps(2))
        third.publish(steps(3))
        try:
            return get(port)[1] == {("lms_steps_total", "1"): 2.0, ("lms_steps_total", "2"): 3.0}
        except OSError:
            return False

    wait_for(served)


_RANK = """
import sys, time
from lms.metrics.page import Page
page = Page(int(sys.argv[1]), "127.0.0.1", ("7", "here"), sys.argv[2])
page.publish({"lms_steps": [[[], 5.0]]})
print("published", flush=True)
time.sleep(600)
"""


def test_a_killed_rank_is_off_the_page(make: Callable[..., Page], port: int) -> None:
    page = make(0)
    page.publish(steps(1))
    assert page.job is not None
    rank = subprocess.Popen([sys.executable, "-c", _RANK, str(port), page.job], stdout=subprocess.PIPE)
    try:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"published\n"
        assert get(port)[1] == {("lms_steps_total", "0"): 1.0, ("lms_steps_total", "7"): 5.0}
        rank.send_signal(signal.SIGKILL)
        rank.wait(timeout=30)
        assert get(port)[1] == {("lms_steps_total", "0"): 1.0}
    finally:
        rank.kill()
        rank.communicate()


def test_a_rank_that_says_nothing_for_long_is_off_the_page_until_it_speaks(
    make: Callable[..., Page], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make(0), make(1)
    first.publish(steps(1))
    second.publish(steps(1))
    assert len(get(port)[1]) == 2
    now = time.monotonic()
    monkeypatch.setattr(page_module.time, "monotonic", lambda: now + page_module.STALE + 1)
    first.publish(steps(2))
    assert get(port)[1] == {("lms_steps_total", "0"): 2.0}
    second.publish(steps(3))
    assert len(get(port)[1]) == 2


def test_a_port_of_another_program_is_taken(make: Callable[..., Page], port: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        for rank in range(2):  # not only the first
            with pytest.raises(PageTakenError, match=f"port {port} at 127.0.0.1 is taken"):
                make(rank).publish(steps(1))


def test_two_runs_do_not_share_a_port(make: Callable[..., Page], port: int) -> None:
    make(0).publish(steps(1))
    with pytest.raises(PageTakenError):
        make(0, "another job").publish(steps(1))
    with pytest.raises(PageTakenError):
        make(0, None).publish(steps(1))
    assert get(port)[1] == {("lms_steps_total", "0"): 1.0}


def test_a_series_stands_on_the_page_once_even_if_two_ranks_have_one_number(
    make: Callable[..., Page], port: int
) -> None:
    for number in (1, 2):
        make(0).publish(steps(number))
    assert get(port)[1] == {("lms_steps_total", "0"): 2.0}


def test_an_address_of_another_host_is_an_error(port: int) -> None:
    page = Page(port, "192.0.2.1", ("0", "here"), None)  # an address for documentation: nobody's
    with pytest.raises(OSError, match=r"\S"):
        page.publish(steps(1))
    page.close()


def test_after_the_end_the_port_is_free(make: Callable[..., Page], port: int) -> None:
    page = make(0)
    page.publish(steps(1))
    page.close()
    page.close()
    with pytest.raises(OSError, match="refused"):
        get(port)
