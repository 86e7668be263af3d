import random
from math import inf

import pytest

import wiring
from agent import gap_between, parse
from checks import link_flows, rounds, uplink_flows
from processes import Guard
from testbed import Decoy, Host, Rack, Rates, TestbedError, Topology, cluster
from topology import PAYLOAD, format_rate, parse_rate

TWO_RACKS = cluster([2, 2], link="200mbit", uplink="100mbit", decoys=[Decoy()])


@pytest.mark.parametrize(
    ("text", "rate"), [("200mbit", 200e6), ("1.5 Gbit/s", 1.5e9), ("64k", 64e3), ("1000000", 1e6), ("2GBIT", 2e9)]
)
def test_a_rate_is_read_as_people_write_it(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["fast", "", "-1mbit", "10 furlongs", "1mbyte"])
def test_a_rate_that_is_none_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="such as 200mbit"):
        parse_rate(text)


@pytest.mark.parametrize(("rate", "text"), [(956.4e6, "956.4 Mbit/s"), (1.5e9, "1.5 Gbit/s"), (64e3, "64 kbit/s")])
def test_a_rate_is_written_with_its_unit(rate: float, text: str) -> None:
    assert format_rate(rate) == text


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Rates(10, 10**9), r"Rates\(up=10"),
        (lambda: Host("eth0"), "Host.*eth0"),
        (lambda: Host("a-name-that-is-too-long"), "a-name-that-is-too-long"),
        (lambda: Host("h0", decoys=(Decoy(), Decoy())), "decoys of one name"),
        (lambda: Rack("spine", (Host("h0"),)), "Rack.*spine"),
        (lambda: Rack("r", ()), "expected one host or more"),
        (lambda: Decoy("eth0"), "Decoy.*eth0"),
        (lambda: Decoy(network="10.77.0.0/16"), "overlaps"),
        (lambda: Topology((Rack("a", (Host("h0"),)), Rack("b", (Host("h0"),)))), "h0 named more than once"),
        (lambda: Topology(()), "0 hosts"),
        (lambda: Topology((Rack("a", (Host("h0"),)),), ("h1",)), "order="),
        (lambda: cluster([2, 0]), "one host or more in each rack"),
        (lambda: cluster([300]), "300 hosts"),
    ],
)
def test_a_topology_that_cannot_be_is_refused_with_what_is_wrong(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_host_that_does_not_exist_is_an_error_that_lists_those_that_do() -> None:
    with pytest.raises(TestbedError, match=r"'h9'.*h0 h1 h2 h3"):
        TWO_RACKS.host("h9")


def test_shuffling_changes_who_shares_a_rack_and_nothing_else() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    shuffled = TWO_RACKS.shuffled(seed)
    assert shuffled == TWO_RACKS.shuffled(seed)
    assert shuffled.names == TWO_RACKS.names
    assert [shuffled.address(name) for name in shuffled.names] == [TWO_RACKS.address(name) for name in TWO_RACKS.names]
    assert [(rack.name, len(rack.hosts), rack.uplink) for rack in shuffled.racks] == [
        (rack.name, len(rack.hosts), rack.uplink) for rack in TWO_RACKS.racks
    ]
    assert len({TWO_RACKS.shuffled(other) for other in range(20)}) > 1


def test_a_topology_survives_the_command_line_of_its_guard() -> None:
    made = TWO_RACKS.shuffled(3)
    assert Topology.from_json(made.to_json()) == made


def test_the_picture_shows_racks_rates_decoys_and_what_is_broken() -> None:
    assert TWO_RACKS.picture({"h1": "killed", "rack1": "cut"}).splitlines() == [
        "spine",
        "+-- rack0   uplink 100 Mbit/s, shared",
        "|   +-- h0  10.77.0.1, link 200 Mbit/s, docker0 leads nowhere",
        "|   +-- h1  10.77.0.2, link 200 Mbit/s, docker0 leads nowhere  [KILLED]",
        "+-- rack1   uplink 100 Mbit/s, shared  [CUT]",
        "    +-- h2  10.77.0.3, link 200 Mbit/s, docker0 leads nowhere",
        "    +-- h3  10.77.0.4, link 200 Mbit/s, docker0 leads nowhere",
    ]
    assert TWO_RACKS.picture().isascii()


def test_a_decoy_has_one_address_everywhere_or_one_on_each_host() -> None:
    assert [Decoy().address(number) for number in (0, 1)] == ["172.17.0.1/16"] * 2
    own = Decoy("eth1", "10.9.0.0/24", same=False)
    assert [own.address(number) for number in (0, 1)] == ["10.9.0.1/24", "10.9.0.2/24"]


def test_links_are_shaped_at_both_ends_and_uplinks_each_way() -> None:
    rates = Rates(up=10**8, down=2 * 10**8)
    topology = Topology((Rack("a", (Host("h0", rates),), rates), Rack("b", (Host("h1"),))))
    fabric = wiring.fabric_rates(topology).splitlines()
    assert [line.split()[3:8] for line in fabric] == [
        ["a.up", "root", "tbf", "rate", "100000000bit"],
        ["a.down", "root", "tbf", "rate", "200000000bit"],
        ["h0", "root", "tbf", "rate", "200000000bit"],
    ]
    assert "dev eth0 root tbf rate 100000000bit" in wiring.host_rates(topology.host("h0"))
    assert wiring.host_rates(topology.host("h1")) == ""


def test_a_host_has_only_those_files_of_its_own_that_the_machine_has_and_asks_no_name_service() -> None:
    machine = {"hosts": "", "nsswitch.conf": "passwd: files ldap\nhosts: files dns\n"}
    files = wiring.host_files(TWO_RACKS, TWO_RACKS.host("h1"), machine)
    assert set(files) == set(machine)
    assert "10.77.0.3 h2\n" in files["hosts"]
    assert files["nsswitch.conf"] == "passwd: files ldap\nhosts: files\n"


def test_in_a_round_of_the_checks_no_link_is_loaded_both_ways() -> None:
    ring = [("a", "b"), ("b", "c"), ("c", "a")]
    assert rounds(ring) == [[edge] for edge in ring]
    assert rounds([("a", "b"), ("b", "c"), ("c", "d"), ("d", "a")]) == [
        [("a", "b"), ("c", "d")],
        [("b", "c"), ("d", "a")],
    ]


def test_the_goodput_expected_is_that_of_the_narrowest_link_on_the_way() -> None:
    fast, slow = Rates(10**9, 10**9), Rates(up=10**8, down=10**7)
    rack = Rack("a", (Host("h0", fast), Host("h1", slow)))
    assert link_flows(Topology((rack,))) == {("h0", "h1"): PAYLOAD * 10**7, ("h1", "h0"): PAYLOAD * 10**8}
    other = Rack("b", (Host("h2"),), fast)
    assert uplink_flows(rack, other) == ([("h0", "h2"), ("h1", "h2")], PAYLOAD * 10**9)
    assert uplink_flows(Rack("c", (Host("h3"),)), Rack("d", (Host("h4"),)))[1] == inf
    assert link_flows(cluster([2])) == {}


@pytest.mark.parametrize(
    ("arguments", "host", "words"),
    [
        (["h1", "uptime"], "h1", ["uptime"]),
        (["-x", "-q", "h1", "prted", "-x"], "h1", ["prted", "-x"]),
        (["-xp", "22", "-oBatchMode=yes", "-l", "me", "you@h1", "cd /; ls"], "h1", ["cd /; ls"]),
        (["-o", "BatchMode=yes", "--", "h1"], "h1", []),
    ],
)
def test_the_agent_takes_a_command_line_as_ssh_does(arguments: list[str], host: str, words: list[str]) -> None:
    assert parse(arguments) == (host, words)


def test_the_agent_without_a_host_says_what_it_expects() -> None:
    with pytest.raises(TestbedError, match="HOST COMMAND"):
        parse(["-x", "-p", "22"])


@pytest.mark.parametrize(
    ("there", "broken", "gap"),
    [
        ("h1", {}, None),
        ("h1", {"h1": "cut"}, "h1"),
        ("h1", {"h0": "cut"}, "h0"),
        ("h0", {"h0": "cut"}, None),
        ("h1", {"rack0": "cut"}, None),
        ("h2", {"rack0": "cut"}, "rack0"),
        ("h2", {"rack1": "cut"}, "rack1"),
        ("h2", {"h3": "cut"}, None),
    ],
)
def test_the_agent_finds_what_is_cut_on_its_way(
    monkeypatch: pytest.MonkeyPatch, there: str, broken: dict[str, str], gap: str | None
) -> None:
    monkeypatch.setattr("agent.state", lambda guard: broken)
    assert gap_between(Guard(1, "bed", TWO_RACKS), "h0", there) == gap
