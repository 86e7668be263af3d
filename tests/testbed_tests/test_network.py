import os
import subprocess
import sys
import time

import pytest

from checks import TOLERANCE, check
from goodput import measure
from testbed import AGENT, Rates, Testbed, TestbedError, cluster, running
from topology import PAYLOAD

pytestmark = [pytest.mark.root, pytest.mark.alone, pytest.mark.usefixtures("needs_testbed", "untouched")]
SLOW = pytest.mark.slow  # all workers wait for these; the first one, which is not slow, measures every link

PYTHON = [sys.executable, "-E", "-S", "-c"]

# Sends the time a thousand times a second; prints it when it is told on stdin to stop.
SENDER = """
import select, socket, sys, time
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        one.sendto(repr(time.monotonic()).encode(), (sys.argv[1], 5000))
print(time.monotonic())
"""
# Prints the first stamp that arrives, and the last one when nothing more has come for a while.
RECEIVER = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
    one.bind(("", 5000))
    print("ready", flush=True)
    last = one.recv(100).decode()
    print(last, flush=True)
    one.settimeout(0.5)
    try:
        while True:
            last = one.recv(100).decode()
    except TimeoutError:
        print(last, flush=True)
"""


@pytest.mark.alone
def test_a_testbed_does_what_its_topology_says(bed: Testbed) -> None:
    for _ in range(3):  # a machine that is busy meanwhile carries less
        found = list(check(bed, seconds=1.0))
        print(*found, sep="\n")
        if all(one.passed for one in found):
            break
    assert {one.what.split()[0] for one in found} == {"link", "uplink", "decoy"}
    assert [str(one) for one in found if not one.passed] == []


@SLOW
@pytest.mark.parametrize("rate", ["20mbit", "1gbit"])
def test_a_link_carries_what_its_rate_leaves_after_headers(rate: str) -> None:
    topology = cluster([2], link=rate)
    with running(topology) as bed:
        (goodput,) = measure(bed, [("h0", "h1")])
    assert topology.hosts[0].link
    assert goodput == pytest.approx(PAYLOAD * topology.hosts[0].link.up, rel=TOLERANCE)


@SLOW
def test_the_two_directions_of_a_link_have_rates_of_their_own() -> None:
    with running(cluster([2], link=Rates(up=20 * 10**6, down=50 * 10**6))) as bed:
        (one,) = measure(bed, [("h0", "h1")])
        assert one == pytest.approx(PAYLOAD * 20e6, rel=TOLERANCE)


@SLOW
def test_what_comes_from_several_hosts_shares_the_link_it_ends_on() -> None:
    with running(cluster([3], link="50mbit")) as bed:
        assert sum(measure(bed, [("h0", "h2"), ("h1", "h2")])) == pytest.approx(PAYLOAD * 50e6, rel=TOLERANCE)


@SLOW
@pytest.mark.parametrize(("link", "target"), [("h1", "h1"), ("h0", "h1"), ("rack1", "h2")])
def test_a_link_that_is_cut_drops_traffic_at_once_and_carries_it_again_when_mended(link: str, target: str) -> None:
    with running(cluster([2, 2])) as bed:
        receiver, sender = stamps(bed, target)
        bed.cut(link)
        cut = time.monotonic()  # the hosts' clock too
        assert bed.state() == {link: "cut"}
        assert float(receiver.communicate()[0]) < cut
        assert float(sender.communicate("stop")[0]) > cut
        bed.mend(link)
        assert bed.state() == {}
        for process in reversed(stamps(bed, target)):
            process.communicate("stop")


def stamps(bed: Testbed, target: str) -> list[subprocess.Popen[str]]:
    """A receiver on the target, and a sender on h0 whose first stamp has arrived there."""
    receiver = bed.popen(target, [*PYTHON, RECEIVER])
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "ready\n"
    sender = bed.popen("h0", [*PYTHON, SENDER, bed.topology.address(target)])
    assert float(receiver.stdout.readline()) > 0
    return [receiver, sender]


def test_a_cut_link_is_silence_and_no_error(bed: Testbed) -> None:
    connect = "import socket, sys; socket.create_connection((sys.argv[1], 22), timeout=0.3)"
    refused = bed.run("h0", [*PYTHON, connect, bed.topology.address("h1")])
    assert "ConnectionRefusedError" in refused.stderr
    bed.cut("h0")
    try:
        silent = bed.run("h0", [*PYTHON, connect, bed.topology.address("h1")])
        assert "TimeoutError" in silent.stderr
    finally:
        bed.mend("h0")


@SLOW
def test_hosts_answer_each_other_at_once_when_a_bed_has_settled(bed: Testbed) -> None:
    bed.cut("h1")
    try:
        with pytest.raises(TestbedError, match=r"on host h\d: h\d does not answer within 0\.5 s"):
            bed.settle(0.5)
    finally:
        bed.mend("h1")
    bed.settle()
    connect = "import socket, sys; socket.create_connection((sys.argv[1], 22), timeout=0.1)"
    for source, target in (("h0", "h1"), ("h1", "h2")):
        refused = bed.run(source, [*PYTHON, connect, bed.topology.address(target)])
        assert "ConnectionRefusedError" in refused.stderr


@SLOW
def test_cutting_what_does_not_exist_names_what_does(bed: Testbed) -> None:
    with pytest.raises(Exception, match=r"'rack7'.*h0 h1 h2 h3 rack0 rack1"):
        bed.cut("rack7")


@SLOW
def test_a_host_sees_its_own_interfaces_name_and_files_and_no_others(bed: Testbed) -> None:
    script = 'hostname; ls /sys/class/net; grep -c 10.77 /etc/hosts; ls -A /dev/shm; echo "$TMPDIR"; touch "$TMPDIR/x"'
    said = bed.run("h1", ["sh", "-c", script], check=True).stdout.split()
    ports = ["docker0", "docker0.end", "docker0.port", "eth0", "eth1", "eth1.end", "eth1.port", "lo"]
    assert said == ["h1", *ports, "4", "/run/tmp"]
    assert bed.run("h0", ["ls", "/run/tmp"], check=True).stdout == ""
    # Its first interface is a decoy, its address an honest one.
    index = "cat /sys/class/net/docker0/ifindex; cat /sys/class/net/eth0/ifindex; getent hosts h1"
    decoy, own, address, *_ = bed.run("h1", ["sh", "-c", index], check=True).stdout.split()
    assert int(decoy) < int(own)
    assert address == bed.topology.address("h1")


@SLOW
def test_memory_shared_on_one_host_is_not_shared_with_another(bed: Testbed) -> None:
    bed.run("h0", ["touch", "/dev/shm/segment"], check=True)
    assert bed.run("h0", ["ls", "/dev/shm"]).stdout == "segment\n"
    assert bed.run("h1", ["ls", "/dev/shm"]).stdout == ""
    assert not os.path.exists("/dev/shm/segment")
    bed.run("h0", ["rm", "/dev/shm/segment"], check=True)


def test_two_testbeds_with_the_same_names_know_nothing_of_each_other(bed: Testbed) -> None:
    with running(cluster([2])) as other, bed.popen("h0", ["sleep", "1000"]) as sleeper:
        assert bed.name != other.name
        assert other.processes() == []
        other.cut("h0")
        other.kill("h1")
        assert bed.state() == {}
        assert sleeper.poll() is None
        assert bed.run("h0", [AGENT, "h1", "hostname"]).stdout == "h1\n"
        sleeper.kill()


def test_a_host_cannot_reach_the_machine(bed: Testbed) -> None:
    assert bed.run("h0", ["ip", "route", "show", "default"], check=True).stdout == ""
    routes = bed.run("h0", ["ip", "-4", "route"], check=True).stdout
    own = subprocess.run(["ip", "-4", "-o", "address"], capture_output=True, text=True, check=True).stdout
    assert "10.77.0.0/24 dev eth0" in routes
    assert "10.77.0." not in own
