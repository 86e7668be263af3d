"""Mode p on the virtual cluster: libddl finds the racks of freshly drawn topologies. The seed of each is printed.

Drawn are 2 to 8 hosts in 1 to 3 racks, links of 200 Mbit/s, an uplink for each rack that carries 10% to 50% of what its
hosts send together, a docker0 that leads nowhere on every host, names dealt at random, 1 or 2 ranks a host.

Found means the same partition of the hosts into racks. Racks that cannot change the schedule count as one rack
(ddl/csrc/forecast/tiers.h): if every rack has one host, no link lies within a rack, and the uplinks, drawn equal then,
are the hosts' links. With one rack there is no uplink.
"""

import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import machine
import pytest

from ddl.library import find as library
from testbed import AGENT, Decoy, Host, Rack, Rates, Testbed, Topology, running

PROGRAMS = Path(__file__).parent / "programs"
SOURCES = Path(__file__).parents[2] / "ddl" / "src"
LINK = 200_000_000  # bits a second
MOST_SECONDS = 3  # for ddl_init to take with 8 hosts

pytestmark = [pytest.mark.root, pytest.mark.alone, pytest.mark.usefixtures("needs_testbed")]


@dataclass(frozen=True)
class Joined:
    """The ranks' output: racks and plan as printed by rank 0, and the longest time that a rank took to join."""

    racks: frozenset[frozenset[str]]
    plan: str
    measuring: float
    joining: float
    said: str


def draw(seed: int) -> tuple[Topology, int]:
    """A topology, and how many ranks a host."""
    chance = random.Random(seed)
    hosts = chance.randint(2, 8)
    racks = chance.randint(1, min(3, hosts))
    cuts = sorted(chance.sample(range(1, hosts), racks - 1))
    sizes = [end - start for start, end in zip([0, *cuts], [*cuts, hosts], strict=True)]
    shares = [chance.uniform(0.1, 0.5) for _ in sizes]
    if max(sizes) == 1:
        shares = shares[:1] * len(shares)
    return built(sizes, shares).shuffled(seed), chance.randint(1, 2)


def built(sizes: list[int], shares: list[float]) -> Topology:
    """Racks of so many hosts, whose uplinks carry so large a share of what the hosts send together."""
    numbers = iter(range(sum(sizes)))
    link = Rates(LINK, LINK)
    return Topology(
        tuple(
            Rack(
                f"rack{at}",
                tuple(Host(f"h{next(numbers)}", link, (Decoy(),)) for _ in range(size)),
                Rates(rate := round(share * size * LINK), rate),
            )
            for at, (size, share) in enumerate(zip(sizes, shares, strict=True))
        )
    )


def truth(topology: Topology) -> frozenset[frozenset[str]]:
    if all(len(rack.hosts) == 1 for rack in topology.racks):
        return frozenset([frozenset(topology.names)])
    return frozenset(frozenset(host.name for host in rack.hosts) for rack in topology.racks)


def start(
    bed: Testbed, ranks: int, options: str, *arguments: str | Path, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments on `ranks` ranks of each host."""
    command = [Path(sys.executable).with_name("mpirun"), "-H", ",".join(f"{host}:{ranks}" for host in bed.hosts)]
    command += ["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", "--mca", "mpi_yield_when_idle", "1"]
    command += ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp", "--mca", "btl_tcp_if_include", "10.77.0.0/24"]
    command += ["--prtemca", "prte_if_include", "10.77.0.0/24", "-x", "DDL_OPTIONS", "-x", "PYTHONPATH"]
    command += [sys.executable, *arguments]
    variables = {
        "PRTE_MCA_plm_ssh_agent": str(AGENT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "DDL_OPTIONS": options,
        "PYTHONPATH": str(SOURCES),
    }
    try:
        with tempfile.TemporaryDirectory(prefix="mpirun-") as folder:  # as in conftest.py
            variables["PRTE_MCA_prte_local_tmpdir_base"] = folder
            done = bed.run(bed.hosts[0], command, env=variables, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        left = [f"{one.pid}: {one.command}" for one in bed.processes()]
        pytest.fail(f"no end after {timeout} s; it said {error.stdout!r} {error.stderr!r}; what runs: {left}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def join(bed: Testbed, ranks: int, options: str = "-mode p -dbg_level 2", times: int = 1) -> list[Joined]:
    """Start `ranks` ranks on each host, which join so many times."""
    done = start(bed, ranks, options, "-S", PROGRAMS / "start.py", library(), str(times))
    each = [float(took) for took in re.findall(r"joined after (\S+) s", done.stdout)]
    assert len(each) == times * ranks * len(bed.hosts), done.stdout
    said = re.split(r"(?=ddl: links were measured)", done.stderr)[1:]
    assert len(said) == times, done.stderr
    first = [float(took) for took in re.findall(r"rank 0 joined after (\S+) s", done.stdout)]
    found = []
    for one, joining in zip(said, first, strict=True):
        racks = [frozenset(line.split()) for line in re.findall(r"^ddl: rack \d+: ([^,]*),", one, re.MULTILINE)]
        plan = re.search(r"^ddl: .* plan (.*)$", one, re.MULTILINE)
        measuring = re.search(r"measured in (\S+) s", one)
        assert plan, one
        assert measuring, one
        found.append(Joined(frozenset(racks or [frozenset(bed.hosts)]), plan[1], float(measuring[1]), joining, one))
    return found


def expect_found(seed: int) -> Joined:
    topology, ranks = draw(seed)
    print(f"seed {seed}, {ranks} ranks a host\n{topology.picture()}")
    with running(topology) as bed:
        (found,) = join(bed, ranks)
    print(found.said)
    assert found.racks == truth(topology), f"seed {seed}\n{topology.picture()}\n{found.said}"
    return found


@pytest.mark.parametrize("seed", random.SystemRandom().sample(range(10**6), 3), ids=["one", "another", "a third"])
def test_the_racks_of_a_drawn_topology_are_found(seed: int) -> None:
    expect_found(seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_racks_of_50_of_50_drawn_topologies_are_found() -> None:
    seed = int(os.environ.get("DDL_TOPOLOGIES_SEED", random.randrange(1 << 30)))
    count = int(os.environ.get("DDL_TOPOLOGIES", 50))
    print(f"seed {seed} (DDL_TOPOLOGIES_SEED), {count} topologies (DDL_TOPOLOGIES)")
    drawn: list[dict[str, object]] = []
    for its in random.Random(seed).sample(range(10**6), count):
        topology, ranks = draw(its)
        uplinks = [rack.uplink.up for rack in topology.racks if rack.uplink]
        one = {"seed": its, "racks": [len(rack.hosts) for rack in topology.racks], "uplinks": uplinks, "ranks": ranks}
        try:
            found = expect_found(its)
            drawn.append(
                {**one, "found": True, "plan": found.plan, "measuring": found.measuring, "joining": found.joining}
            )
        except (AssertionError, pytest.fail.Exception) as error:
            drawn.append({**one, "found": False, "why": str(error)})
        # The figures are kept even if a later assertion fails.
        machine.keep("topologies", {"seed": seed, "link": LINK, "topologies": drawn})
    missed = [f"seed {one['seed']}: {one['why']}" for one in drawn if not one["found"]]
    assert not missed, f"{len(missed)} of {count} were missed:\n" + "\n".join(missed)


@pytest.mark.timeout(240)
def test_8_hosts_start_within_3_seconds_and_their_plan_has_a_dimension_for_the_racks() -> None:
    topology = built([4, 4], [0.15, 0.15]).shuffled(3)
    with running(topology) as bed:
        found = join(bed, 1, times=5)
        (given,) = join(bed, 1, "-mode p:2x2x2 -dbg_level 1")
    joining = statistics.median(one.joining for one in found)
    measuring = statistics.median(one.measuring for one in found)
    print(f"ddl_init: {[one.joining for one in found]}; median {joining} s, of which {measuring} s measuring")
    times = {"joining": [one.joining for one in found], "measuring": [one.measuring for one in found]}
    machine.keep("init", {"racks": [4, 4], "ranks": 1, "plans": [one.plan for one in found], **times})
    for one in found:
        assert one.racks == truth(topology), one.said
    # A machine that does other things meanwhile measures links as too slow, and then sees nothing to be won.
    deep = [one for one in found if one.plan.startswith("r:4x2: 2 racks: links ")]
    assert len(deep) > len(found) / 2, [one.plan for one in found]
    assert joining < MOST_SECONDS
    assert re.match(r"r:2x2x2: 2 racks: links .*; 2x2x2 as DDL_OPTIONS asks", given.plan), given.said


@pytest.mark.timeout(150)
def test_every_collective_is_right_between_racks() -> None:
    with running(built([2, 2], [0.25, 0.25]).shuffled(5)) as bed:
        # Whatever a busy machine's links seem to carry, the second session reduces in a dimension for the racks.
        words = ["--most", "1001", "4", "host", "p", "p:2x2"]
        done = start(bed, 1, "", PROGRAMS / "sweep.py", *words, timeout=100)
    assert "-mode p: right" in done.stdout
    assert "-mode p:2x2: right" in done.stdout


@pytest.mark.timeout(240)
def test_communicators_of_some_ranks_are_planned_on_what_was_measured_and_are_right() -> None:
    topology = built([2, 2], [0.25, 0.25]).shuffled(5)
    with running(topology) as bed:
        done = start(bed, 2, "-mode p -dbg_level 1", PROGRAMS / "parts.py", timeout=150)
    print(done.stderr)
    for part in ("all", "hosts", "a rank of each host", "halves", "odd and even", "all but one"):
        assert f"{part}: right" in done.stdout
    world = re.search(r"^ddl: 8 ranks on 4 hosts, plan (.*)$", done.stderr, re.MULTILINE)
    assert world, done.stderr
    mode, reason = world[1].split(": ", 1)
    said = re.findall(
        r"^ddl: communicator of (\d) ranks, rank \d of the job first, plan (.*)$", done.stderr, re.MULTILINE
    )
    assert {plan for size, plan in said if size == "8"} == {f"{mode}: all ranks: {reason}"}
    assert all(plan.startswith("r:2: ranks of one host") for size, plan in said if size == "2"), said
    hosts = [plan for size, plan in said if size == "4"]
    assert len(hosts) == 12, said  # a rank of each host, halves, odd and even: two of each, made in two ways
    racks = reason.split(" rack")[0]
    for plan in hosts:
        assert re.match(r"r:[\dx]+: [12] racks?: links ", plan), plan
        assert racks == "2" or " 1 rack: " in plan, plan
    assert [plan for size, plan in said if size == "7"], said
    assert all("hosts are uneven" in plan for size, plan in said if size == "7"), said
