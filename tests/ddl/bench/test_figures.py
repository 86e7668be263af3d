import pytest

from ddl.bench.contest import Turns
from ddl.bench.figures import bus_bandwidth, ratios, spread, table

MIB = 1 << 20


def turns(name: str, *seconds: float, size: int = MIB) -> Turns:
    return Turns(name, size, 1, dict(enumerate(seconds)))


def test_bus_bandwidth_is_what_a_ring_sends_of_each_rank() -> None:
    assert bus_bandwidth(4, 100, 1.0) == 150
    assert bus_bandwidth(2, 100, 0.5) == 200


def test_ratios_are_taken_within_a_round() -> None:
    assert ratios(turns("other", 2.0, 6.0), turns("ours", 1.0, 2.0)) == [2.0, 3.0]


def test_the_spread_leaves_out_the_two_ends_where_there_are_enough() -> None:
    assert spread(turns("a", 1.0, 3.0)) == pytest.approx(0.5)
    assert spread(turns("a", 0.1, 1.0, 1.1, 0.9, 50.0)) == pytest.approx(0.1)


def test_the_table_has_the_fastest_first_and_the_share_of_the_bound() -> None:
    text = table([turns("DDL", 2.0, 2.0), turns("gloo", 3.0, 5.0)], 4, "DDL", lambda size: 1.0)
    lines = text.splitlines()
    assert "bound/time" in lines[0]
    assert "x DDL's time" in lines[0]
    assert lines[1].split()[:3] == ["1", "MiB", "DDL"]
    assert "50%" in lines[1]
    assert lines[2].endswith("2.00 (± 25%)")


def test_alone_there_is_no_ratio() -> None:
    assert "DDL's time" not in table([turns("DDL", 2.0)], 2, "DDL")
