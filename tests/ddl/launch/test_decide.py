import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ddl.launch import guard
from ddl.launch.decide import Found, Job, decide
from ddl.launch.errors import CheckError, UsageError
from ddl.launch.hosts import Allocation, Host
from ddl.launch.options import Options, parse

Cluster = Callable[..., Found]


def options(line: str) -> Options:
    return parse([*line.split(), "python", "train.py"])


def exported(job: Job) -> dict[str, str | None]:
    return {one.name: one.value for one in job.exports}


def test_a_cluster_with_gpus_needs_no_flags(found: Cluster) -> None:
    job = decide(options(""), found(2, gpus=4))
    assert job.dimensions.sizes == ()
    assert tuple(job.counts) == ("h0", "h1")
    assert job.network.networks == ("10.0.0.0/24",)
    assert exported(job) == {
        "PATH": None,
        "DDL_TIMEOUT": None,
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4242",
        "DDL_NETWORKS": "10.0.0.0/24",
        "DDL_OPTIONS": "-mode p",
        "DDL_TRANSPORT": "tcp",
        "DDL_RENDEZVOUS": "10.0.0.1:4243",
        "OMP_NUM_THREADS": "2",
    }


def test_every_choice_comes_with_its_reason(found: Cluster) -> None:
    reasons = decide(options(""), found(2, gpus=4)).reasons
    assert [": ".join(one) for one in reasons] == [
        "hosts: h0, h1 (-H)",
        "mpirun: Open MPI 5.0.11 (for the test): /mpi/bin/mpirun",
        "ranks: 8 (one a GPU)",
        "dimensions: libddl's choice (4 on each of 2 hosts; it measures the links between the hosts)",
        "network: the hosts' names lead to 10.0.0.0/24",
        "network: without docker0: a bridge without a network card, for this host's own containers",
        "transport: shared memory and TCP, as not every host shows a fabric",
        "rank 0: found at 10.0.0.1:4242",
        "DDL: over TCP, without MPI",
        "OMP_NUM_THREADS: 2 (the cores that a rank has for itself)",
    ]


def test_on_one_host_no_port_is_open_to_another(found: Cluster) -> None:
    cluster = replace(found(1), here=frozenset({"h0"}), doorkeeper=Path("/ddl/libddl_doorkeeper.so"))
    job = decide(options(""), cluster)
    assert job.here
    assert exported(job)["DDL_NETWORKS"] == "127.0.0.0/8,::1/128"
    assert exported(job)["DDL_RENDEZVOUS"] == "127.0.0.1:4243"
    assert ("transport", "shared memory: one host") in job.reasons
    assert not decide(options(""), replace(cluster, here=frozenset())).here  # it is another one


@pytest.mark.parametrize(
    ("line", "environ", "asked"),
    [
        ("", {"DDL_TRANSPORT": "smoke"}, "smoke"),
        ("-x DDL_TRANSPORT=MPI", {}, "MPI"),
        ("-x DDL_TRANSPORT", {"DDL_TRANSPORT": "TCP"}, "TCP"),
    ],
)
def test_a_transport_that_libddl_would_refuse_is_refused(
    found: Cluster, line: str, environ: dict[str, str], asked: str
) -> None:
    cluster = found(1)
    with pytest.raises(UsageError) as raised:
        decide(options(line), replace(cluster, environ={**cluster.environ, **environ}))
    assert str(raised.value) == f"DDL_TRANSPORT is '{asked}', but must be auto, mpi or tcp"


def test_the_networks_that_the_environment_names_stay(found: Cluster) -> None:
    cluster = found(2)
    named = {**cluster.environ, "DDL_NETWORKS": "10.9.0.0/24"}
    # As it is there: a name without a value.
    assert exported(decide(options(""), replace(cluster, environ=named)))["DDL_NETWORKS"] is None


def test_more_ranks_than_cores_yield(found: Cluster) -> None:
    assert not decide(options("-np 8"), found(1)).yield_when_idle
    crowded = decide(options("-np 9"), found(1))
    assert crowded.yield_when_idle
    assert ("ranks yield while they wait", "9 ranks on h0's 8 cores") in crowded.reasons


def test_a_fabric_is_used_where_every_host_has_one_unless_tcp_is_asked_for(found: Cluster) -> None:
    cluster = found(2)
    both = {name: replace(one, fabrics=("mlx5_0",)) for name, one in cluster.machines.items()}
    assert decide(options(""), replace(cluster, machines=both)).fabric
    assert not decide(options("-tcp"), replace(cluster, machines=both)).fabric
    one = {**cluster.machines, "h0": both["h0"]}
    assert not decide(options(""), replace(cluster, machines=one)).fabric


@pytest.mark.parametrize(
    ("line", "environ", "why"),
    [
        ("", {}, "over TCP, without MPI"),
        ("-m r --mpiarg -quiet", {"DDL_TRANSPORT": "auto"}, "over TCP, without MPI"),
        ("-m bm:2x2", {}, "over MPI, because mode m is its collectives"),
        ("", {"DDL_OPTIONS": "-dbg_level 1 -mode m"}, "over MPI, because mode m is its collectives"),
        ("--no_ddloptions", {"DDL_OPTIONS": "-mode m"}, "over MPI, because mode m is its collectives"),
        ("--mpiarg=--mca --mpiarg=pml --mpiarg=ucx", {}, "over MPI, for which --mpiarg sets pml"),
        ("-m m -x DDL_TRANSPORT=tcp", {}, "over TCP, as DDL_TRANSPORT asks"),
        ("-x DDL_TRANSPORT=mpi -x DDL_TRANSPORT=tcp", {}, "over TCP, as DDL_TRANSPORT asks"),
        ("-x DDL_TRANSPORT", {"DDL_TRANSPORT": "mpi"}, "over MPI, as DDL_TRANSPORT asks"),
        ("-x DDL_TRANSPORT=auto", {}, "over TCP, without MPI"),
        ("-x DDL_OPTIONS=-mode~m", {}, "over MPI, because mode m is its collectives"),
        ("", {"DDL_TRANSPORT": "mpi"}, "over MPI, as DDL_TRANSPORT asks"),
        # Inside another job of ddlrun, which set the variable for its own ranks.
        ("", {"DDL_TRANSPORT": "mpi", guard.MARK: "1"}, "over TCP, without MPI"),
    ],
)  # fmt: skip
def test_ddl_takes_tcp_unless_something_needs_mpi(found: Cluster, line: str, environ: dict[str, str], why: str) -> None:
    cluster = found(2)
    job = decide(
        parse([*(word.replace("~", " ") for word in line.split()), "python", "train.py"]),
        replace(cluster, environ={**cluster.environ, **environ}),
    )
    assert ("DDL", why) in job.reasons
    assert exported(job)["DDL_TRANSPORT"] == ("mpi" if "over MPI" in why else "tcp")
    assert ("DDL_RENDEZVOUS" in exported(job)) == ("over TCP" in why)


def test_ddl_takes_mpi_if_every_host_has_a_fabric(found: Cluster) -> None:
    cluster = found(2)
    both = {name: replace(one, fabrics=("mlx5_0",)) for name, one in cluster.machines.items()}
    assert exported(decide(options(""), replace(cluster, machines=both)))["DDL_TRANSPORT"] == "mpi"
    alone = replace(found(1), machines={"h0": both["h0"]})
    assert exported(decide(options(""), alone))["DDL_TRANSPORT"] == "tcp"  # there is shared memory


def test_ddl_takes_mpi_between_hosts_whose_networks_are_not_known(found: Cluster) -> None:
    job = decide(options("--skipchecks"), replace(found(2), machines={}))
    assert ("DDL", "over MPI, because the networks between the hosts are not known") in job.reasons
    assert exported(decide(options("--skipchecks -np 2"), replace(found(1), machines={})))["DDL_TRANSPORT"] == "tcp"


def test_an_outer_job_s_networks_are_not_an_inner_one_s(found: Cluster) -> None:
    cluster = found(2)
    outer = {**cluster.environ, "DDL_NETWORKS": "127.0.0.0/8", guard.MARK: "1"}
    assert exported(decide(options(""), replace(cluster, environ=outer)))["DDL_NETWORKS"] == "10.0.0.0/24"


@pytest.mark.parametrize("line", ["", "-x DDL_SOCKET_IFNAME"])
def test_interfaces_that_a_user_names_are_used_on_one_host_too(found: Cluster, line: str) -> None:
    cluster = found(1)
    named = {**cluster.environ, "DDL_SOCKET_IFNAME": "eth0"}
    assert "DDL_NETWORKS" not in exported(decide(options(line), replace(cluster, environ=named)))


def test_a_user_s_words_win(found: Cluster) -> None:
    job = decide(options("-x MASTER_PORT=1 -x OMP_NUM_THREADS=7 -m r --ddlarg=-dbg_level --ddlarg=1"), found(2))
    variables = exported(job)
    assert (variables["MASTER_PORT"], variables["OMP_NUM_THREADS"]) == ("1", "7")
    assert variables["DDL_OPTIONS"] == "-mode r:2x2x1x1 -dbg_level 1"
    assert "DDL_OPTIONS" not in exported(decide(options("--no_ddloptions"), found(2)))


@pytest.mark.parametrize(
    ("line", "mine", "made"),
    [
        ("", "-dbg_level 1", "-mode p -dbg_level 1"),
        ("", "-mode m -dump_iter 5", "-mode m -dump_iter 5"),
        ("-m p", "-mode m -dump_iter 5", "-mode p -dump_iter 5"),
        ("-m r", "--mode m", "-mode r:2x2x1x1"),
        ("--racks 2", "-mode m", "-mode p:2x1x2x1"),
        ("-v --ddlarg=-dbg_level --ddlarg=2", "-dbg_level 1 -mode m", "-mode m -dbg_level 2"),
        ("-v", "-dbg_level 0", "-mode p -dbg_level 0"),
    ],
)
def test_a_user_s_ddl_options_count_unless_the_command_line_says_otherwise(
    found: Cluster, line: str, mine: str, made: str
) -> None:
    cluster = found(2)
    theirs = replace(cluster, environ={**cluster.environ, "DDL_OPTIONS": mine})
    job = decide(options(line), theirs)
    assert exported(job)["DDL_OPTIONS"] == made
    assert ("DDL_OPTIONS", f"{made} (with those of the environment: {mine})") in job.reasons


def test_the_ddl_options_of_a_job_that_starts_another_are_not_the_user_s(found: Cluster) -> None:
    cluster = found(2)
    inside = {**cluster.environ, "DDL_OPTIONS": "-mode r:2x2", "OMPI_DDLRUN_JOB": "mark"}
    assert exported(decide(options(""), replace(cluster, environ=inside)))["DDL_OPTIONS"] == "-mode p"


def test_racks_make_dimensions(found: Cluster) -> None:
    assert decide(options("-racks 2 -np 4"), found(4)).dimensions.sizes == (1, 2, 2, 1)


def test_a_user_s_rank_file_is_used_and_checked(found: Cluster) -> None:
    cluster = replace(found(2), rankfile="rank 0=h1 slot=0\nrank 1=h0 slot=1\n")
    job = decide(options("-rf f"), cluster)
    assert [one.host for one in job.places] == ["h1", "h0"]
    assert exported(job)["MASTER_ADDR"] == "10.0.0.2"
    with pytest.raises(CheckError, match="-np asks for 3, and f places 2"):
        decide(options("-rf f -np 3"), cluster)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-m p:4x2x1x1 -np 4", "-m p:4x2x1x1 multiplies to 8 ranks, and there are 4"),
        ("--racks 3", "3 racks x 1 aisles do not divide 2 hosts evenly"),
        ("-np 7", "7 ranks were asked for, 5 of them on h1, and it has 2"),
    ],
)
def test_what_does_not_fit_is_named(found: Cluster, line: str, message: str) -> None:
    cluster = replace(found(2), allocation=Allocation((Host("h0", 2), Host("h1", 2)), "-H"))
    with pytest.raises(CheckError, match=re.escape(message)):
        decide(options(line), cluster)


def test_hosts_that_are_left_over_are_spare(found: Cluster) -> None:
    cluster = replace(found(3), allocation=Allocation(tuple(Host(f"h{at}", 2) for at in range(3)), "-H"))
    job = decide(options("-np 4"), cluster)
    assert (tuple(job.counts), job.spares) == (("h0", "h1"), ("h2",))


def test_hosts_that_were_not_looked_at_can_still_be_planned(found: Cluster) -> None:
    job = decide(options("-np 4 --skipchecks"), replace(found(2), machines={}))
    assert len(job.places) == 4
    assert job.network.networks == ()
    assert exported(job)["MASTER_ADDR"] == "10.0.0.1"
    assert exported(job)["MASTER_PORT"] == "5151"
