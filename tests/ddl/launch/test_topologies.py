"""The launcher on kinds of hosts that are not at hand: see machines.py for their origin."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ddl.launch import dimensions, layout, probe, rankfile
from ddl.launch.counts import parse_runs
from ddl.launch.hosts import Allocation, Host
from ddl.launch.machine import Machine
from ddl.launch.probe import Answer


def _machines() -> ModuleType:
    # The tests are not a package; this is a module of fixtures beside this file.
    spec = importlib.util.spec_from_file_location("ddl_test_machines", Path(__file__).with_name("machines.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


machines = _machines()
KINDS = {kind.name: kind for kind in machines.KINDS}


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> object:
    return KINDS[request.param]


@pytest.fixture
def host(kind: object, tmp_path: Path) -> Machine:
    return machines.read(kind, machines.build(kind, tmp_path))


def cluster(host: Machine, count: int) -> tuple[Allocation, dict[str, Machine]]:
    from dataclasses import replace

    names = [f"h{at}" for at in range(count)]
    return Allocation(tuple(map(Host, names)), "-H"), {name: replace(host, name=name) for name in names}


def test_the_kinds_are_those_of_the_plan_and_say_where_they_come_from() -> None:
    assert list(KINDS) == [
        "AC922 with 4 V100", "AC922 with 6 V100", "DGX-1", "HGX H100", "PCIe server", "CPU server",
    ]  # fmt: skip
    assert all(kind.origin.startswith(("recorded by others: ", "documentation: ")) for kind in KINDS.values())


def test_sockets_cores_and_gpus_are_found(kind: object, host: Machine) -> None:
    assert [one.cores for one in host.sockets] == [kind.cores] * 2
    assert [len(one.cpus) for one in host.sockets] == [kind.cores * kind.packages[0].threads] * 2
    assert tuple(gpu.socket for gpu in host.gpus) == kind.gpu_sockets
    assert host.fabrics == kind.fabrics
    assert {nic.name: nic.routes for nic in host.nics} == {name: name != "docker0" for name, _ in kind.nics}


def test_a_probe_s_line_carries_the_host_through_a_pipe(host: Machine) -> None:
    line = probe.line(Answer(host), 3)
    assert len(line) < 4096
    assert probe.parse(f"noise\n{line}\nnoise\n") == {3: Answer(host)}


def test_there_is_a_rank_for_each_gpu_or_else_each_socket(kind: object, host: Machine) -> None:
    allocation, found = cluster(host, 4)
    made = layout.choose(allocation, found)
    assert made.counts == (kind.ranks,) * 4
    assert made.reason == ("one a GPU" if kind.gpus else "no GPU and no number of slots; one a socket")
    sizes = dimensions.choose(made.counts, racks=2).sizes
    assert sizes == (kind.ranks, 2, 2, 1)


def test_a_rank_gets_all_cores_of_its_gpu_s_socket_and_no_other(kind: object, host: Machine) -> None:
    _, found = cluster(host, 2)
    places = rankfile.place(["h0", "h1"], [kind.ranks] * 2, found)
    sockets = list(kind.gpu_sockets or (0, 1))
    assert [one.socket for one in places] == sockets * 2
    assert rankfile.bound(places)
    assert rankfile.to_openmpi(places).splitlines() == [
        f"rank {rank}=h{rank // kind.ranks} slot={sockets[rank % kind.ranks]}:*" for rank in range(2 * kind.ranks)
    ]
    binding = rankfile.hydra_binding(places, found).removeprefix("user:").split(",")
    assert [sorted(map(int, cpus.split("+"))) for cpus in binding] == [
        sorted(parse_runs(kind.packages[socket].cpus)) for socket in sockets
    ]


def test_the_original_s_order_goes_round_the_hosts_with_the_same_gpus(kind: object, host: Machine) -> None:
    _, found = cluster(host, 2)
    places = rankfile.place(["h0", "h1"], [kind.ranks] * 2, found, order="hosts")
    assert [one.host for one in places] == ["h0", "h1"] * kind.ranks
    assert [one.socket for one in places[::2]] == list(kind.gpu_sockets or (0, 1))


def test_a_job_that_may_use_one_socket_only_binds_to_that(kind: object, tmp_path: Path) -> None:
    second = parse_runs(kind.packages[1].cpus)
    host = machines.read(kind, machines.build(kind, tmp_path), allowed=second)
    assert [one.cpus for one in host.sockets] == [second]
    near = [gpu.socket for gpu in host.gpus]
    # GPUs of the other socket have no CPU of the job near them.
    assert near == [0 if socket == 1 else None for socket in kind.gpu_sockets]


def test_hosts_of_two_kinds_get_as_many_ranks_as_each_has_gpus(tmp_path: Path) -> None:
    four, six = (
        machines.read(KINDS[name], machines.build(KINDS[name], tmp_path / str(at)), name=f"h{at}")
        for at, name in enumerate(("AC922 with 4 V100", "AC922 with 6 V100"))
    )
    allocation = Allocation((Host("h0"), Host("h1")), "-H")
    made = layout.choose(allocation, {"h0": four, "h1": six})
    assert made.counts == (4, 6)
    assert dimensions.choose(made.counts).sizes == ()
    places = rankfile.place(made.hosts, made.counts, {"h0": four, "h1": six})
    assert [one.socket for one in places] == [0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
