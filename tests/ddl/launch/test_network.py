from collections.abc import Callable, Mapping
from dataclasses import replace

from ddl.launch.machine import Machine, Nic
from ddl.launch.network import choose

Make = Callable[..., Machine]


def pair(machine: Make, *more: tuple[Nic, Nic]) -> tuple[Mapping[str, Machine], Mapping[str, str]]:
    """Two hosts with docker0 and eth0, and further interfaces."""
    one, other = machine("a", number=1), machine("b", number=2)
    machines = {
        "a": replace(one, nics=(*one.nics, *(nics[0] for nics in more))),
        "b": replace(other, nics=(*other.nics, *(nics[1] for nics in more))),
    }
    return machines, {"a": "10.0.0.1", "b": "10.0.0.2"}


def test_one_host_needs_no_network() -> None:
    chosen = choose(["a"], {}, {})
    assert chosen.networks == ()
    assert chosen.address == "127.0.0.1"


def test_the_network_that_the_names_lead_to_is_used_and_docker_is_not(machine: Make) -> None:
    chosen = choose(["a", "b"], *pair(machine))
    assert chosen.networks == ("10.0.0.0/24",)
    assert chosen.interfaces == ("eth0",)
    assert chosen.address == "10.0.0.1"
    assert dict(chosen.dropped) == {"docker0": "a bridge without a network card, for this host's own containers"}


def test_an_address_that_several_hosts_have_leads_to_none(machine: Make) -> None:
    same = Nic("virbr0", "192.168.122.1", 24, True, "it is up")
    chosen = choose(["a", "b"], *pair(machine, (same, same)))
    assert dict(chosen.dropped)["virbr0"] == "several hosts have its address 192.168.122.1: it leads to no other host"


def test_a_second_card_is_left_out_until_it_is_measured(machine: Make) -> None:
    cards = (Nic("eth1", "10.9.0.1", 24, True, "it is up"), Nic("eth1", "10.9.0.2", 24, True, "it is up"))
    chosen = choose(["a", "b"], *pair(machine, cards))
    assert chosen.networks == ("10.0.0.0/24",)
    assert dict(chosen.dropped)["eth1"] == "no host's name leads to 10.9.0.0/24"


def test_an_address_that_a_host_s_name_leads_to_is_trusted_whatever_kind_of_interface_has_it(machine: Make) -> None:
    bridge = "a bridge without a network card, for this host's own containers"
    cards = (Nic("br0", "10.1.0.1", 24, False, bridge), Nic("br0", "10.1.0.2", 24, False, bridge))
    machines, _ = pair(machine, cards)
    chosen = choose(["a", "b"], machines, {"a": "10.1.0.1", "b": "10.1.0.2"})
    assert (chosen.networks, chosen.address) == (("10.1.0.0/24",), "10.1.0.1")
    both = choose(["a", "b"], machines, {"a": "172.17.0.1", "b": "10.0.0.2"})  # docker0's, which both have
    assert both.networks == ("10.0.0.0/24",)


def test_hosts_in_two_networks_use_both(machine: Make) -> None:
    machines, addresses = pair(machine)
    far = Nic("eth0", "10.0.1.2", 24, True, "it is up")
    chosen = choose(["a", "b"], {**machines, "b": replace(machines["b"], nics=(far,))}, {**addresses, "b": "10.0.1.2"})
    assert chosen.networks == ("10.0.0.0/24", "10.0.1.0/24")


def test_a_launch_host_whose_own_name_is_loopback_is_found_by_the_others(machine: Make) -> None:
    machines, addresses = pair(machine)
    chosen = choose(["a", "b"], machines, {**addresses, "a": "127.0.1.1"})
    assert (chosen.networks, chosen.address) == (("10.0.0.0/24",), "10.0.0.1")


def test_what_is_not_known_is_left_to_mpi(machine: Make) -> None:
    machines, addresses = pair(machine)
    assert choose(["a", "b"], {"a": machines["a"]}, addresses).networks == ()
    assert choose(["a", "b"], machines, {"a": "8.8.8.8", "b": ""}).networks == ()
    assert choose(["a", "b"], machines, {"a": "8.8.8.8", "b": ""}).address == "8.8.8.8"
