import json
from pathlib import Path

import pytest

from ddl.planning import network
from ddl.planning.network import DescriptionError, Level, Network, changed, from_dict, load

RACKS = Network((Level("rank", 2, 2e9, 5e-6), Level("host", 2, 25e6, 1e-4), Level("rack", 2, 12.5e6, 1e-4)), "racks")


@pytest.mark.parametrize("name", network.machines())
def test_every_machine_of_the_catalogue_names_the_source_of_each_figure(name: str) -> None:
    one = load(name)
    assert one.name
    assert all(level.source for level in one.levels)
    assert one.source if one.reduce else True
    assert one.levels[1].size == 1  # as many hosts as the user says


def test_the_catalogue_has_the_machines_that_we_speak_of() -> None:
    known = {"ac922-4", "ac922-6", "dgx-1", "dgx-1-p100", "hgx-h100", "pcie-4", "cpu-10g", "minsky", "omni-path"}
    assert known == set(network.machines())


def test_a_network_survives_json_and_toml_is_read_alike(tmp_path: Path) -> None:
    path = tmp_path / "racks.json"
    path.write_text(json.dumps(RACKS.to_dict()))
    assert load(str(path)) == RACKS
    path = tmp_path / "racks.toml"
    path.write_text(
        'name = "racks"\n[[tiers]]\nsize = 2\nbandwidth = "2 GB/s"\nlatency = "5us"\n[[tiers]]\nsize = 2\n'
        'bandwidth = "200mbit"\nlatency = "0.1ms"\n[[tiers]]\nsize = 2\nbandwidth = 12.5e6\nlatency = 1e-4\n'
    )
    assert load(str(path)) == RACKS


def test_flags_describe_a_network_by_themselves() -> None:
    made = changed(network.DEFAULT, ranks=2, hosts=4, racks=2, rates=(None, 25e6, 12.5e6), latencies=(5e-6,))
    assert [(one.name, one.size) for one in made.levels] == [("rank", 2), ("host", 2), ("rack", 2)]
    assert [one.bandwidth for one in made.levels] == [5e9, 25e6, 12.5e6]
    assert made.levels[0].latency == 5e-6
    assert made.ranks == 8


def test_switches_whose_rate_nobody_gives_carry_all_that_is_below() -> None:
    made = changed(network.DEFAULT, ranks=8, hosts=128, racks=4, aisles=2, rates=(None, 1e9))
    assert [one.size for one in made.levels] == [8, 16, 4, 2]
    assert [one.bandwidth for one in made.levels[1:]] == [1e9, 16e9, 64e9]


def test_flags_change_a_described_network_and_leave_the_rest() -> None:
    made = changed(RACKS, hosts=8)
    assert [one.size for one in made.levels] == [2, 4, 2]
    assert [one.bandwidth for one in made.levels] == [2e9, 25e6, 12.5e6]
    assert changed(RACKS) == RACKS


def test_hosts_that_racks_cannot_share_evenly_are_refused() -> None:
    with pytest.raises(DescriptionError, match="5 hosts cannot be divided evenly among 2 racks"):
        changed(network.DEFAULT, hosts=5, racks=2)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "net: expected a table"),
        ({}, r"net: tiers: expected a list of 1 to 8 tables"),
        ({"tiers": []}, r"net: tiers: expected"),
        ({"tiers": [{"size": 2}]}, r"net: tiers\[0\]: bandwidth: missing"),
        ({"tiers": [{"size": 0, "bandwidth": 1}]}, r"net: tiers\[0\]: size: 0; expected a whole number"),
        ({"tiers": [{"size": True, "bandwidth": 1}]}, r"tiers\[0\]: size: True"),
        ({"tiers": [{"size": 2, "bandwidth": "10"}]}, r"net: tiers\[0\]: bandwidth: '10': expected a rate"),
        ({"tiers": [{"size": 2, "bandwidth": 1, "latency": "x"}]}, r"tiers\[0\]: latency: 'x': expected a time"),
        ({"tiers": [{"size": 2, "bandwidth": 1, "colour": "red"}]}, r"tiers\[0\]: colour: unknown; expected"),
        ({"tiers": [{"size": 2, "bandwidth": 1, "name": 3}]}, r"tiers\[0\]: name: 3; expected text"),
        ({"tiers": [{"size": 2, "bandwidth": 1}], "name": "\x1b[2J"}, r"name: '\\x1b\[2J'; expected text without"),
        ({"tiers": [{"size": 2, "bandwidth": 1}], "name": "\ud800"}, r"name: '\\ud800'; expected text without"),
        ({"tiers": [{"size": 2, "bandwidth": 1}], "racks": 2}, "net: racks: unknown"),
        ({"tiers": [{"size": 2, "bandwidth": 1}], "reduce": "slow"}, "net: reduce: 'slow': expected a rate"),
    ],
)
def test_a_wrong_description_is_named_with_its_place(document: object, message: str) -> None:
    with pytest.raises(DescriptionError, match=message):
        from_dict(document, "net")


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(DescriptionError, match=r"'nowhere' is neither a machine of the catalogue nor .* ac922-4"):
        load("nowhere")
    with pytest.raises(DescriptionError, match=r"none\.toml': it cannot be read: No such file"):
        load(str(tmp_path / "none.toml"))
    path = tmp_path / "torn.json"
    path.write_text('{"tiers": [')
    with pytest.raises(DescriptionError, match=r"torn\.json: it is not JSON"):
        load(str(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DescriptionError, match="it is not text"):
        load(str(path))


def test_the_tree_shows_each_tier_once() -> None:
    assert RACKS.picture().splitlines() == [
        "+-- 2 x rack          link 100 Mbit/s (12.5 MB/s), latency 100 us, shared by 4 ranks",
        "    +-- 2 x host      link 200 Mbit/s (25 MB/s), latency 100 us, shared by 2 ranks",
        "        +-- 2 x rank  link 16 Gbit/s (2 GB/s), latency 5 us",
    ]


def test_what_is_odd_is_read_counted_drawn_and_written(tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(
        '[[tiers]]\nname = "GPU"\nsize = 4\nbandwidth = "10 GB/s"\n'
        '[[tiers]]\nname = "host"\nsize = 6\nbandwidth = "10 gbit"\n'
        '[[odd]]\nname = "host"\nnumbers = "0-2,5"\nsize = 2\n'
        '[[odd]]\nname = "host"\nnumbers = 5\nbandwidth = "1 gbit"\n'
    )
    made = network.load(str(path))
    assert made.ranks == 16
    assert made.children(1) == 6
    assert [len(host) for host in made.ranks_below(1)] == [2, 2, 2, 4, 4, 2]
    assert made.bandwidths(1) == [1.25e9] * 5 + [1.25e8]
    assert len(made.tree.odd) == 4  # host 5 once, with both
    assert "but host 0-2,5:" in made.picture()
    assert network.from_dict(made.to_dict()) == made
    assert network.parse_odd("rack1=3,10gbit") == network.Exceptions("rack", (1,), 3, 1.25e9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host=1gbit", "expected a tier, numbers and what is odd"),
        ("host3-1=2", "expected numbers from 0 and runs of them"),
        ("host1=0", "expected a size above 0, a rate, or one of each"),
        ("host1=1gbit,2gbit", "expected a size above 0, a rate, or one of each"),
        ("host1=5", "host 1: there are 1 of them, counted from 0"),
        ("pod0=1gbit", "odd pod 0: the network has rank, host"),
        ("rank0=2", "odd rank 0: a rank has nothing below it"),
    ],
)
def test_what_is_wrong_with_what_is_odd_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        network.with_odd(network.DEFAULT, [network.parse_odd(text)])
