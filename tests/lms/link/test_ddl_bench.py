"""Records of `ddlrun bench`, read as the network link between its hosts."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from lms.errors import UsageError
from lms.link import catalogue

RESULTS = Path(__file__).parents[3] / "docs/results/ddl_bench_cpu2_2026-11-28.json"


def record(hosts: int = 4) -> dict:
    """What `ddlrun bench` wrote on the virtual cluster."""
    runs = json.loads(RESULTS.read_text())["runs"]
    found = next(copy.deepcopy(one) for run in runs for one in run["records"] if one["hosts"] == hosts)
    tiers = [{"name": "rank", "size": 2, "bandwidth": 5e9}, {"name": "host", "size": 4, "bandwidth": 200e6 / 8}]
    return found | {"network": {"name": "one switch, 200 Mbit/s", "tiers": tiers}}


def load(tmp_path: Path, document: dict) -> object:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(document))
    return catalogue.load(str(path))


def test_a_real_record_is_read_and_stays_below_its_ceiling(tmp_path: Path) -> None:
    profile = load(tmp_path, record())
    (link,) = profile.links
    assert link.kind == "network"
    out, back = link.best("out"), link.best("back")
    assert out.rate == back.rate
    assert out.points[-1].nbytes > 1e6
    assert link.ceiling is not None
    assert 0.5 < out.rate / link.ceiling.out <= 1.0


def test_the_rate_is_what_each_hosts_link_must_carry(tmp_path: Path) -> None:
    document = record()
    document |= {
        "hosts": 4,
        "turns": [{"contestant": "DDL", "family": "x", "bytes": 10**8, "repeats": 1, "seconds": [2.0]}],
    }
    (link,) = load(tmp_path, document).links
    assert link.best("out").rate == pytest.approx(2 * 3 / 4 * 1e8 / 2.0)


def test_two_networks_are_compared_by_the_same_words(tmp_path: Path) -> None:
    from lms.link.comparison import compare

    one = load(tmp_path, record())
    (out, back) = compare(one, catalogue.load("hgx-h100")).rows[-2:]
    assert (out.kind, out.direction, back.direction) == ("network", "out", "back")
    assert out.ratio is not None
    assert out.ratio < 0.01


def test_a_record_of_one_host_has_no_network_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ran on one host and used no network link"):
        load(tmp_path, record() | {"hosts": 1})


@pytest.mark.parametrize("damage", [{"turns": []}, {"turns": [{}]}, {"turns": 3}, {"ranks": "many"}])
def test_a_damaged_record_is_refused(tmp_path: Path, damage: dict) -> None:
    with pytest.raises(UsageError, match="damaged record of ddlrun bench"):
        load(tmp_path, record() | damage)
