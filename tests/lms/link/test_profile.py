"""A machine's links as a document: what is kept, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lms.errors import UsageError
from lms.link.profile import FORMAT, Absence, Ceiling, MeasuredLink, Profile
from lms.link.series import Series, point

MB = 1 << 20


def make() -> Profile:
    series = (
        Series.of("out", "O_DIRECT", [point(4096, [1e-4]), point(MB, [1e-3])]),
        Series.of("back", "O_DIRECT", [point(4096, [2e-4]), point(MB, [2e-3])]),
    )
    link = MeasuredLink("file /x", "file", "ext4", series, Ceiling(2e9, 1e9, "a data sheet"), ("possibly cached",))
    return Profile("here", "measured", (link,), (Absence("GPU", "no driver"),), {"host": "h"}, {"host": 10**9}, "now")


def load(text: str) -> Profile:
    return Profile.from_dict(json.loads(text), "FILE")


def test_it_survives_json() -> None:
    assert load(make().to_json()) == make()


def test_another_version_is_refused_with_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"FILE: expected the format 'lms-link-1', found 'lms-link-9'; measure again"):
        load(make().to_json().replace(FORMAT, "lms-link-9"))


@pytest.mark.parametrize(
    "damage",
    [
        {"links": None},
        {"links": [{"name": "x"}]},
        {"links": [3]},
        {"origin": "guessed"},
        {"capacity": {"host": -1}},
        {"surprise": 1},
        {"absent": [{"what": "x"}]},
        {"absent": [3]},
        {"machine": {"host": 3}},
        {"machine": []},
        {"capacity": {"host": True}},
        {"when": 3},
    ],
)
def test_a_damaged_one_is_refused_in_a_line(damage: dict[str, object]) -> None:
    document = json.loads(make().to_json()) | damage
    with pytest.raises(UsageError, match=r"^FILE: damaged \([^\n]*\); measure again"):
        Profile.from_dict(document, "FILE")


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        (("ceiling", "out"), 0, "links[0].ceiling.out: expected a number from 1 to 1e+18, found 0"),
        (("ceiling", "back"), "fast", "links[0].ceiling.back: expected a number from 1 to 1e+18"),
        (("ceiling", "source"), 3, "links[0].ceiling.source: expected a text"),
        (("ceiling",), [1, 2], "links[0].ceiling: expected an object"),
        (("name",), 3, "links[0].name: expected a text, found 3"),
        (("what",), None, "links[0].what: expected a text"),
        (("kind",), ["gpu"], "links[0].kind: expected one of"),
        (("series", 0, "via"), None, "links[0].series[0].via: expected a text, found None"),
        (("series", 1, "points", 0, "low"), "x", "links[0].series[1].points[0].low: expected a number from"),
        (
            ("series", 0, "points", 1, "nbytes"),
            0,
            "links[0].series[0].points[1].nbytes: expected a whole number from 1 to",
        ),
    ],
)
def test_a_value_of_another_type_is_named_with_its_place(
    path: tuple[str | int, ...], value: object, where: str
) -> None:
    document = json.loads(make().to_json())
    place = document["links"][0]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(UsageError) as found:
        Profile.from_dict(document, "FILE")
    assert where in str(found.value)


def test_two_links_of_one_name_are_refused() -> None:
    profile = make()
    with pytest.raises(UsageError, match="two links of one name"):
        load(replace(profile, links=profile.links * 2).to_json())


def test_the_planner_is_given_rates_and_the_greater_latency() -> None:
    link = make().links[0].link()
    assert link is not None
    out, back = make().links[0].series
    assert (link.out, link.back) == (out.rate, back.rate)
    assert link.latency == max(out.latency, back.latency) > 0


def test_a_link_of_which_one_way_is_known_is_none_for_the_planner() -> None:
    link = make().links[0]
    assert replace(link, series=link.series[:1]).link() is None


def test_of_several_means_the_one_that_the_runtime_uses_counts() -> None:
    pageable, pinned = Series("out", "pageable", 9e9, 0.0), Series("out", "pinned", 5e9, 0.0)
    assert MeasuredLink("gpu0", "gpu", "", (pageable, pinned)).best("out") is pinned
    assert MeasuredLink("gpu0", "gpu", "", (pageable,)).best("out") is pageable
    assert MeasuredLink("gpu0", "gpu", "", (pageable,)).best("back") is None


def test_both_ways_together_could_have_both_ceilings() -> None:
    ceiling = Ceiling(2e9, 1e9, "")
    assert [ceiling.of(way) for way in ("out", "back", "both", "copy")] == [2e9, 1e9, 3e9, 2e9]
