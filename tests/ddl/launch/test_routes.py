import errno
import os
import socket
from collections.abc import Sequence

import pytest

from ddl.launch import machine, routes
from ddl.launch.routes import Gap


def test_a_host_that_refuses_is_a_host_that_is_reached() -> None:
    assert routes.gaps(["127.0.0.1", "127.0.0.2", "", "127.0.0.3"], 0, machine.free_ports()[0]) == ()


class Kernel:
    """The result of connecting to each host, at ssh's port and at all others, from a host with routes to some only."""

    def __init__(self, says: dict[str, int], at_ssh: dict[str, int]) -> None:
        self.says, self.at_ssh, self.tried = says, at_ssh, set[str]()

    def connect(self, to: tuple[str, int], timeout: float) -> socket.socket:
        self.tried.add(to[0])
        says = (self.at_ssh if to[1] == routes.SSH else self.says).get(to[0], errno.ECONNREFUSED)
        raise OSError(says, os.strerror(says))


def gaps(monkeypatch: pytest.MonkeyPatch, kernel: Kernel, addresses: Sequence[str], own: int) -> tuple[Gap, ...]:
    monkeypatch.setattr(routes.socket, "create_connection", kernel.connect)
    return routes.gaps(addresses, own, 40000)


def test_a_missing_route_is_told_from_a_firewall(monkeypatch: pytest.MonkeyPatch) -> None:
    none, refused = errno.ENETUNREACH, errno.EHOSTUNREACH
    kernel = Kernel({"10.0.0.2": none, "10.0.0.3": refused, "10.0.0.5": errno.EADDRNOTAVAIL}, {"10.0.0.2": none})
    found = gaps(monkeypatch, kernel, [f"10.0.0.{at}" for at in range(1, 6)], 0)
    assert found == (Gap(1, "Network is unreachable", False), Gap(2, "No route to host", True))


def test_a_route_that_is_a_black_hole_is_no_route(monkeypatch: pytest.MonkeyPatch) -> None:
    says = {"b": errno.EINVAL}
    assert gaps(monkeypatch, Kernel(says, says), ["a", "b"], 0) == (Gap(1, os.strerror(errno.EHOSTUNREACH), False),)


def test_a_host_that_does_not_answer_in_time_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "SECONDS", 0.05)
    with socket.socket() as full:  # whose backlog holds no more: the kernel leaves others without an answer
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), socket.socket() as second:
            second.setblocking(False)
            second.connect_ex(("127.0.0.1", port))
            assert routes._silent({4: "127.0.0.1"}, port) == {4: "no answer within 0.05 s"}


def test_each_of_many_hosts_tries_those_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [f"10.0.{at // 200}.{at % 200}" for at in range(300)]
    kernel = Kernel(dict.fromkeys(addresses, errno.EHOSTUNREACH), {})
    found = gaps(monkeypatch, kernel, addresses, 290)
    assert kernel.tried == {addresses[(290 + step) % 300] for step in range(1, routes.MOST + 1)}
    assert [one.to for one in found] == [291, 292, 293]
