"""Which ways ranks on two hosts find to one another over TCP, as their networks and the environment are."""

import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from testbed import Decoy, Testbed, cluster, running

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests/ddl/programs"
HOSTS = ("h0", "h1")
NOWHERE = Decoy("card1", "10.78.0.0/24", same=False)  # leads nowhere, and each host has its own address there

SLOW = pytest.mark.slow
pytestmark = [pytest.mark.root, pytest.mark.alone, pytest.mark.usefixtures("needs_testbed")]


def start(bed: Testbed, master: str, variables: dict[str, str]) -> list[subprocess.Popen[str]]:
    """A rank on each host, which average for a second."""
    processes = []
    for rank, host in enumerate(HOSTS):
        environment = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": master, "MASTER_PORT": "29555"}
        environment |= {
            "DDL_TIMEOUT": "20",
            "DDL_OPTIONS": "-mode r:1x2",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT / "ddl/src"),
        }
        environment |= {name: value.replace("HOST", bed.topology.address(host)) for name, value in variables.items()}
        processes.append(bed.popen(host, [sys.executable, PROGRAMS / "strangers.py", "1"], env=environment))
    return processes


def check(processes: list[subprocess.Popen[str]]) -> None:
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    for out, err in outputs:
        assert "right sums" in out
        assert "warning" not in err, err


@pytest.mark.parametrize(
    "interfaces", ["", pytest.param("^docker,card", marks=SLOW), pytest.param("=eth0", marks=SLOW)]
)
def test_interfaces_that_lead_nowhere_do_no_harm(interfaces: str) -> None:
    with running(cluster([2], link="1gbit", decoys=[Decoy(), NOWHERE])) as bed:
        check(start(bed, bed.topology.address("h0"), {"DDL_SOCKET_IFNAME": interfaces}))


@pytest.mark.parametrize("kind", [pytest.param("global", marks=SLOW), "link-local"])
def test_a_network_of_ipv6_alone_is_enough(kind: str) -> None:
    with running(cluster([2], link="1gbit")) as bed:
        for number, host in enumerate(HOSTS):
            one = f"fd77::{number + 1}/64" if kind == "global" else f"fe80::{number + 1}/64"
            change = "ip address flush dev eth0; echo 0 >/proc/sys/net/ipv6/conf/eth0/disable_ipv6"
            bed.run(host, ["sh", "-ec", f"{change}; ip address add {one} dev eth0 nodad"], check=True)
        check(start(bed, "fd77::1" if kind == "global" else "fe80::1%eth0", {}))


@SLOW
def test_a_host_behind_a_gateway_is_reached_by_the_address_that_it_advertises() -> None:
    with running(cluster([2], link="1gbit", decoys=[NOWHERE])) as bed, ExitStack() as ending:
        for number, host in enumerate(HOSTS):
            inner = NOWHERE.address(number).split("/")[0]
            command = [sys.executable, PROGRAMS / "forward.py", bed.topology.address(host), inner, "30100", "30109"]
            gateway = ending.enter_context(bed.popen(host, command))
            ending.callback(gateway.kill)
            assert gateway.stdout
            assert gateway.stdout.readline() == "ready\n"
        variables = {"DDL_SOCKET_IFNAME": "card1", "DDL_PORT_RANGE": "30100-30109", "DDL_ADVERTISE": "HOST"}
        check(start(bed, bed.topology.address("h0"), variables))


def test_an_interface_that_is_not_there_is_an_error_that_lists_those_that_are() -> None:
    with running(cluster([2], link="1gbit", decoys=[NOWHERE])) as bed:
        outputs = [one.communicate(timeout=60) for one in start(bed, "h0", {"DDL_SOCKET_IFNAME": "ib0"})]
    for _, err in outputs:
        assert re.search(r"'ib0' leaves no address of this host\. Its interfaces: .*eth0 \(10\.77\.0\.\d", err), err
