"""Links between two tiers."""

import pytest

from lms.errors import UsageError
from lms.link import KNOWN, Link, parse_link


def test_a_copy_takes_its_latency_and_its_bytes_in_each_direction() -> None:
    link = Link("disk", out=2e9, back=1e9, latency=0.5)
    assert link.seconds_out(4_000_000_000) == 2.5
    assert link.seconds_back(4_000_000_000) == 4.5


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_link_is_found_by_name_and_says_where_its_figures_are_from(name: str) -> None:
    link = parse_link(name)
    assert link is KNOWN[name]
    assert link.name == name
    assert link.source
    assert min(link.out, link.back) > 1e9


def test_rates_can_be_given_for_each_direction_or_once_for_both() -> None:
    assert (parse_link("6/2.1").out, parse_link("6/2.1").back) == (6e9, 2.1e9)
    assert (parse_link("3").out, parse_link("3").back) == (3e9, 3e9)
    assert parse_link("6/2.1").source


@pytest.mark.parametrize("bad", ["", "/", "pcie9", "6/0", "0", "-1/2", "6/2/1", "fast/slow"])
def test_an_unknown_link_is_refused_with_the_known_ones(bad: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_link(bad)
    message = str(caught.value)
    assert "--link" in message
    assert repr(bad) in message
    assert all(name in message for name in KNOWN)


@pytest.mark.parametrize("bad", ["nan", "inf", "1/nan"])
def test_a_rate_must_be_a_finite_number(bad: str) -> None:
    with pytest.raises(UsageError, match="--link"):
        parse_link(bad)


def test_a_link_survives_json() -> None:
    link = Link("disk", out=2e9, back=1e9, latency=0.5, source="measured")
    assert Link.from_dict(link.to_dict()) == link


def test_a_scaled_link_has_other_rates_and_the_same_latency() -> None:
    scaled = Link("disk", out=2e9, back=1e9, latency=0.5).scaled(0.25)
    assert (scaled.out, scaled.back, scaled.latency) == (0.5e9, 0.25e9, 0.5)
