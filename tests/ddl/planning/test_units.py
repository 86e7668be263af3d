import pytest

from ddl.planning import units


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("200mbit", 25e6),
        ("10 Gbit/s", 1.25e9),
        ("1Gbps", None),
        ("12.5GB/s", 12.5e9),
        ("1 GiB/s", 2**30),
        ("2TiB/s", 2**41),
        (5e9, 5e9),
    ],
)
def test_rates_are_bits_or_bytes_a_second(text: str | float, rate: float | None) -> None:
    if rate is None:
        with pytest.raises(ValueError, match="expected a rate above 0"):
            units.parse_rate(text)
    else:
        assert units.parse_rate(text) == rate


@pytest.mark.parametrize("text", ["100", "10GB", "0mbit", "-1mbit", "fast", "", 0, -3.0, True])
def test_a_rate_without_its_unit_is_refused(text: str | float) -> None:
    with pytest.raises(ValueError, match="expected a rate above 0"):
        units.parse_rate(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("64MiB", 64 << 20), ("1.5KB", 1500), ("4096", 4096), ("1B", 1), ("2TB", 2 * 10**12), ("16TiB", 16 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert units.parse_size(text) == size


@pytest.mark.parametrize("text", ["0", "-4", "64M", "much", "", "0.9B", "17TiB", "1e400"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size from 1 byte to 16 TiB"):
        units.parse_size(text)


@pytest.mark.parametrize(("text", "seconds"), [("5us", 5e-6), ("0.1 ms", 1e-4), ("0", 0), (2e-6, 2e-6), ("3s", 3)])
def test_times(text: str | float, seconds: float) -> None:
    assert units.parse_time(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["5", "-1us", "soon", -1.0, "5US"])
def test_what_is_no_time_is_refused(text: str | float) -> None:
    with pytest.raises(ValueError, match="expected a time"):
        units.parse_time(text)


def test_numbers_are_shown_as_people_write_them() -> None:
    assert units.format_size(64 << 20) == "64 MiB"
    assert units.format_size(1000) == "1000 B"
    assert [units.format_size(one) for one in (2 << 40, 3000 << 40, 2**20 - 1)] == ["2 TiB", "2.93 PiB", "1 MiB"]
    assert units.format_bits(25e6) == "200 Mbit/s"
    assert units.format_bytes(12.5e9) == "12.5 GB/s"
    assert (units.format_bytes(20e12), units.format_bits(900e12)) == ("20 TB/s", "7.2 Pbit/s")
    assert [units.format_time(one) for one in (5.4321, 0.0012, 3e-6, 0)] == ["5.43 s", "1.2 ms", "3 us", "0 s"]
    assert units.format_time(0.99996) == "1 s"
