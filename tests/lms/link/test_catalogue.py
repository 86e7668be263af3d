"""Described machines, and what is refused in the place of one."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from lms.errors import UsageError
from lms.link import catalogue
from lms.link.profile import FORMAT

ROOT = Path(__file__).parents[3]
DDL = ROOT / "ddl/src/ddl/planning/machines"


def test_the_machines_that_are_promised_are_there() -> None:
    promised = {"ac922-4", "ac922-6", "dgx-1", "pcie-3", "pcie-4", "pcie-5", "gh200", "hgx-h100", "hgx-h200"}
    assert promised <= set(catalogue.names())


@pytest.mark.parametrize("name", catalogue.names())
def test_each_figure_has_its_source(name: str) -> None:
    machine = catalogue.load(name)
    assert machine.origin == "described"
    assert "source" in machine.machine
    assert machine.capacity["device"] > 0
    assert machine.of("gpu")[0].link() is not None
    for link in machine.links:
        assert link.ceiling is not None
        assert link.ceiling.source
        assert any(note.startswith("rate: ") for note in link.notes)
        assert any(note.startswith("latency: ") for note in link.notes)
        for series in link.series:
            assert series.points == ()
            assert series.rate <= link.ceiling.of(series.direction)
            assert series.via in ("nominal", "published", "computed")
            assert (series.via == "nominal") == (series.rate == link.ceiling.of(series.direction))


@pytest.mark.parametrize("name", ["ac922-4", "ac922-6", "dgx-1", "hgx-h100"])
def test_a_name_means_the_machine_that_it_means_for_ddl(name: str) -> None:
    theirs = tomllib.loads((DDL / f"{name}.toml").read_text())
    (ours,) = catalogue.load(name).of("network")
    assert ours.ceiling is not None
    amount, unit = theirs["tiers"][-1]["bandwidth"].split()
    assert unit == "Gbit/s"
    assert ours.ceiling.out == float(amount) * 1e9 / 8


def test_ibms_picture_nvlink_is_more_than_five_times_pcie_3() -> None:
    rates = [catalogue.load(name).of("gpu")[0].best("out").rate for name in ("ac922-4", "pcie-3")]  # type: ignore[union-attr]
    assert rates[0] / rates[1] == pytest.approx(68 / 12)


def test_a_file_of_a_machines_name_counts_more_than_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = catalogue.load("gh200").to_json().replace("GH200 Grace Hopper", "mine")
    Path("gh200").write_text(text)
    assert catalogue.load("gh200").name == "mine"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file or directory; expected a file that `lms link measure -o` wrote, or one of ac922-4"),
        ('{"format": "lms-link-1", "name": "x", "links": [', "truncated or no JSON"),
        ("", "truncated or no JSON"),
        ("[1]", "found a list"),
        ('{"format": "lms-trace-1"}', f"expected the format '{FORMAT}', found 'lms-trace-1'"),
        ("{}", "found None"),
        (b"\xff\xfe\x00", "not text"),
    ],
)
def test_anything_else_is_refused_in_a_line(tmp_path: Path, content: str | bytes | None, words: str) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        catalogue.load(str(path))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_every_prefix_of_a_profile_is_refused_and_never_half_read(tmp_path: Path) -> None:
    text = json.dumps(json.loads(catalogue.load("gh200").to_json()))
    path = tmp_path / "a.json"
    for length in range(0, len(text) - 1, 97):
        path.write_text(text[:length])
        with pytest.raises(UsageError):
            catalogue.load(str(path))
