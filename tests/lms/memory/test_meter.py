"""What copies tell about the link that they went over."""

import pytest

from lms.memory.meter import Meter, measured_link


def test_no_copies_tell_nothing() -> None:
    assert measured_link("file", Meter(), Meter()) is None


def test_bandwidth_and_latency_are_those_of_the_copies() -> None:
    out, back = Meter(), Meter()
    for nbytes in (10_000, 1_000_000, 50_000_000, 3_000_000):
        out.add(nbytes, 0.002 + nbytes / 4e9)
        back.add(nbytes, 0.002 + nbytes / 2e9)
    link = measured_link("file", out, back)
    assert link is not None
    assert link.out == pytest.approx(4e9, rel=1e-6)
    assert link.back == pytest.approx(2e9, rel=1e-6)
    assert link.latency == pytest.approx(0.002, rel=1e-6)
    assert "4 copies out, 4 back" in link.source


def test_copies_of_one_size_give_their_own_time_back() -> None:
    out = Meter()
    for _ in range(5):
        out.add(1_000_000, 0.001)
    link = measured_link("file", out, Meter())
    assert link is not None
    assert link.seconds_out(1_000_000) == pytest.approx(0.001)
    assert link.back == link.out


def test_the_latency_is_never_longer_than_the_shortest_copy() -> None:
    meter = Meter()
    for nbytes, seconds in ((1000, 0.0001), (1_000_000, 0.01), (2_000_000, 0.01)):
        meter.add(nbytes, seconds)
    assert 0 <= meter.latency() <= 0.0001
    assert meter.bandwidth(meter.latency()) > 0


def test_what_was_copied_lately_counts_most() -> None:
    meter = Meter()
    for speed in (1e9, 4e9):
        for index in range(600):
            nbytes = 1_000_000 + index * 1000
            meter.add(nbytes, nbytes / speed)
    assert meter.bandwidth(0.0) == pytest.approx(4e9, rel=0.2)
    assert meter.copies == 1200


def test_nothing_but_copies_of_no_bytes_is_no_link() -> None:
    meter = Meter()
    meter.add(0, 0.001)
    assert measured_link("file", meter, Meter()) is None
