import pytest

from ddl.bench.contest import LeftOut, Turns
from ddl.bench.figures import bus_bandwidth, ratios, spread, table, words

MIB = 1 << 20


def turns(name: str, *seconds: float, size: int = MIB) -> Turns:
    return Turns(name, size, 1, dict(enumerate(seconds)))


def test_bus_bandwidth_is_what_a_ring_sends_of_each_rank() -> None:
    assert bus_bandwidth(4, 100, 1.0) == 150
    assert bus_bandwidth(2, 100, 0.5) == 200


def test_ratios_are_taken_within_a_round() -> None:
    assert ratios(turns("other", 2.0, 6.0), turns("ours", 1.0, 2.0)) == [2.0, 3.0]


def test_the_spread_is_that_of_the_middle_half_however_many_rounds_there_are() -> None:
    assert spread(turns("a", 1.0, 3.0)) == pytest.approx(0.25)
    assert spread(turns("a", 1.0, 1.1, 0.9)) == pytest.approx(0.05)
    assert spread(turns("a", 0.1, 1.0, 1.1, 0.9, 50.0)) == pytest.approx(0.1)


def test_one_round_has_no_spread() -> None:
    assert spread(turns("a", 1.0)) is None
    assert table([turns("DDL", 2.0), turns("gloo", 3.0)], 4, "DDL").splitlines()[2].endswith("1.50 (one round)")


def test_who_was_left_out_is_said_in_a_line() -> None:
    assert words(LeftOut("gloo", None, "gloo: its job ended\n  why")) == "left out: gloo: its job ended"
    assert words(LeftOut("gloo", 1 << 16, "gloo: a rank ended")) == "left out from 64 KiB on: gloo: a rank ended"


def test_the_table_has_the_fastest_first_and_the_share_of_the_bound() -> None:
    text = table([turns("DDL", 2.0, 2.0), turns("gloo", 3.0, 5.0)], 4, "DDL", lambda size: 1.0)
    lines = text.splitlines()
    assert "bound/time" in lines[0]
    assert "x DDL's time" in lines[0]
    assert lines[1].split()[:3] == ["1", "MiB", "DDL"]
    assert "50%" in lines[1]
    assert lines[2].endswith("2.00 (± 12%)")


def test_alone_there_is_no_ratio() -> None:
    assert "DDL's time" not in table([turns("DDL", 2.0)], 2, "DDL")


def test_one_rank_has_times_and_no_bandwidths() -> None:
    head, line, why = table([turns("DDL", 2.0)], 1, "DDL").splitlines()
    assert line.split() == ["1", "MiB", "DDL", "2", "s", "-", "-"]
    assert len(line) == len(head)
    assert why.startswith("one rank sends nothing")
