"""Sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lms.errors import UsageError
from lms.units import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("12GB", 12_000_000_000),
        ("12GiB", 12 * 2**30),
        ("12gb", 12_000_000_000),
        (" 1.5 MB ", 1_500_000),
        ("64KB", 64_000),
        ("1KiB", 1024),
        (".5TB", 500_000_000_000),
        ("2TiB", 2 * 2**40),
        ("7", 7),
        ("7B", 7),
        (7, 7),
    ],
)
def test_a_size_is_read_in_decimal_and_binary_units(text: int | str, nbytes: int) -> None:
    assert parse_size(text, "limit") == nbytes


@pytest.mark.parametrize("bad", ["12XB", "", "GB", "-1GB", "1e9", "twelve", "1 2GB", "nan", "inf", -1, True, "0", 0])
def test_a_refused_size_names_the_argument_what_was_given_and_the_units(bad: int | str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(bad, "--limit")
    message = str(caught.value)
    assert message.startswith(f"--limit={bad!r}: ")
    assert "GiB" in message
    assert "GB" in message


@pytest.mark.parametrize("bad", ["9" * 400 + "GB", 1.5e9, 2**62 + 1, str(2**63), "1e300"])
def test_a_size_of_an_odd_kind_is_refused_as_any_other(bad: int | str) -> None:
    with pytest.raises(UsageError, match="limit"):
        parse_size(bad, "limit")


def test_zero_is_a_size_only_where_it_is_allowed() -> None:
    assert parse_size("0", "budget", zero=True) == 0
    assert parse_size("0GB", "budget", zero=True) == 0
    with pytest.raises(UsageError, match="more than zero"):
        parse_size("0GB", "limit")
    with pytest.raises(UsageError, match="zero or more"):
        parse_size(-1, "budget", zero=True)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 KB"),
        (910_000_000, "910 MB"),
        (999_499_999, "999 MB"),
        (999_500_000, "1 GB"),
        (1_250_000_000, "1.25 GB"),
        (3_000_000_000_000, "3 TB"),
        (-1_250_000_000, "-1.25 GB"),
    ],
)
def test_a_size_is_shown_with_three_digits(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@given(st.integers(min_value=1, max_value=9 * 10**14))
def test_a_size_survives_being_shown_and_read_to_three_digits(nbytes: int) -> None:
    again = parse_size(format_size(nbytes), "size")
    assert abs(again - nbytes) <= 0.0051 * nbytes
