import socket
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from ddl.launch import probe, reach
from ddl.launch.machine import Machine


def test_this_host_is_known_by_its_names() -> None:
    assert all(map(reach.is_here, ["localhost", "127.0.0.1", socket.gethostname()]))
    assert not reach.is_here("some-other-host")


def test_names_lead_to_addresses_and_wrong_names_to_none() -> None:
    assert reach.addresses(["localhost", "no-such-host.invalid"]) == {
        "localhost": "127.0.0.1",
        "no-such-host.invalid": "",
    }


def test_the_network_to_an_address_is_the_kernel_s(machine: Callable[..., Machine]) -> None:
    assert reach.networks_to(["127.0.0.2", "", "127.0.0.1"], machine()) == ("127.0.0.0/8",)
    assert reach.networks_to(["127.0.0.1"], replace(machine(), nics=())) == ()


def test_other_hosts_find_this_one_by_a_list_that_begins_with_the_jobs_network(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "here", machine)
    assert reach.own_addresses(["h5", "h6"], ["10.0.0.0/24"]) == ("10.0.0.1", "172.17.0.1")
    assert reach.own_addresses(["h5"], ["172.17.0.0/16"]) == ("172.17.0.1", "10.0.0.1")
    assert reach.own_addresses(["localhost", socket.gethostname()], ["10.0.0.0/24"]) == ()


@pytest.mark.parametrize(
    ("status", "errors", "message"),
    [
        (None, "", "it did not answer within 20 s; try: ssh a true"),
        (255, "ssh: Could not resolve hostname a\n", "it cannot be reached (ssh: Could not resolve hostname a); check"),
        (1, f"{sys.executable}: No module named ddl\n", "there has no ddl"),
        (1, "FileNotFoundError: [Errno 2] No such file or directory: '/x/src/ddl/__init__.py'\n", "there has no ddl"),
        (127, "sh: 1: /x/python: not found\n", f"there is no {sys.executable} on it"),
        (1, "Traceback ...\nValueError: x\n", "the probe failed there with exit status 1 (ValueError: x)"),
        (0, "", "the probe failed there with exit status 0 (it printed nothing)"),
    ],
)
def test_a_host_that_is_asked_alone_says_what_is_wrong(status: int | None, errors: str, message: str) -> None:
    answer = reach.alone("a", status, "", errors)
    assert isinstance(answer, str)
    assert message in answer


def test_a_host_that_answers_is_fine(machine: Callable[..., Machine]) -> None:
    assert reach.alone("a", 0, f"motd\n{probe.line(machine(), 0)}\n", "") == machine()
