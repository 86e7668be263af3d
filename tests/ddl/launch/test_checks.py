from collections.abc import Callable
from dataclasses import replace

import pytest

from ddl.launch import checks
from ddl.launch.checks import FAILED, OK, WARNING
from ddl.launch.errors import CheckError
from ddl.launch.machine import Machine
from ddl.launch.routes import Gap

Make = Callable[..., Machine]


def test_a_host_that_did_not_answer_has_its_problem(machine: Make) -> None:
    rows = checks.hosts(["a", "b", "c"], {"a": machine()}, {"b": "it is on fire"})
    assert [row.state for row in rows] == [OK, FAILED, FAILED]
    assert str(rows[1]) == "host b: it is on fire"
    assert "try: ssh c true" in str(rows[2])


def test_a_host_is_described_in_a_line(machine: Make) -> None:
    text = checks.describe(machine(gpus=4))
    assert text == "2 sockets with 8 cores, 4 GPUs (V100), eth0 10.0.0.1, ddl 0.1.0, Python 3.11.7"


def test_another_version_of_ddl_is_named_with_both_versions(machine: Make) -> None:
    (row,) = checks.versions({"a": machine(), "b": replace(machine(), ddl="0.0.9")}, "0.1.0")
    assert row.state == FAILED
    assert str(row).startswith("host b: it has ddl 0.0.9, and this host has 0.1.0; install version 0.1.0 there")


def test_a_host_without_the_plugin_for_mpi_is_a_warning(machine: Make) -> None:
    (row,) = checks.versions({"a": machine(), "b": replace(machine(), plugin=False)}, "0.1.0")
    assert row.state == WARNING
    assert str(row).startswith("ddl: no libddl_mpi.so on b: ddl cannot use MPI there")


@pytest.mark.parametrize(("asked", "state"), [(False, FAILED), (True, WARNING)])
def test_other_gpus_are_a_failure_unless_the_user_says_what_he_wants(machine: Make, asked: bool, state: str) -> None:
    machines = {name: machine(gpus=4) for name in "abc"} | {"d": machine(gpus=2)}
    (row,) = checks.hardware(machines, asked=asked)
    assert row.state == state
    assert str(row).startswith("host d: it has 2 GPUs (V100), and a, b, c have 4 GPUs (V100); leave it out")


def test_other_cores_are_a_warning(machine: Make) -> None:
    (row,) = checks.hardware({"a": machine(), "b": machine(), "c": machine(cores=8)}, asked=False)
    assert row.state == WARNING
    assert "host c: it has 2 sockets with 16 cores, and a, b have 2 sockets with 8 cores" in str(row)


def test_equal_hosts_are_fine(machine: Make) -> None:
    rows = checks.hardware({"a": machine(), "b": machine()}, asked=False)
    assert [row.state for row in rows] == [OK]
    assert checks.failed(rows) == []


def test_every_failure_is_a_line_of_one_error(machine: Make) -> None:
    with pytest.raises(CheckError) as raised:
        checks.tell(checks.hosts(["a", "b"], {}, {"a": "x", "b": "y"}), print)
    assert raised.value.lines == ("host a: x", "host b: y")
    assert raised.value.failures == (("host a", "x"), ("host b", "y"))


def test_a_gpu_that_cannot_be_used_is_named_with_its_host(machine: Make) -> None:
    broken = machine(gpus=2)
    fault = "GPU 1 cannot be used: NVML says: GPU is lost"
    broken = replace(broken, gpus=(broken.gpus[0], replace(broken.gpus[1], fault=fault)))
    (row,) = checks.gpus({"a": machine(gpus=2), "b": broken})
    assert row.state == FAILED
    assert str(row) == f"host b: {fault}; fix it, or leave it out with CUDA_VISIBLE_DEVICES or the host"


def test_hosts_that_do_not_reach_each_other_are_one_line() -> None:
    gaps = {"a": (Gap(1, "No route to host", False),), "b": (Gap(0, "no answer within 1.5 s", False),)}
    (row,) = checks.routes(gaps, ["a", "b"], {"a": "127.0.1.1", "b": "10.0.1.2"})
    assert row.state == FAILED
    assert str(row).startswith(
        "host a: no route to host b (10.0.1.2): No route to host; fix the network between the two"
    )


def test_a_firewall_that_lets_ssh_through_is_a_warning() -> None:
    (row,) = checks.routes({"b": (Gap(0, "no answer within 1.5 s", True),)}, ["a", "b"], {"a": "10.0.0.1"})
    assert row.state == WARNING
    assert str(row).startswith("host b: host a (10.0.0.1) answers it at ssh's port alone (no answer within 1.5 s); ")


def test_of_many_hosts_that_do_not_reach_each_other_some_are_named() -> None:
    gaps = {f"h{at}": (Gap(20, "x", False),) for at in range(20)}
    assert len(checks.routes(gaps, [f"h{at}" for at in range(21)], {})) == checks.ROUTES


def test_the_table_is_aligned() -> None:
    rows = [checks.Check(OK, "ddl", "fine"), checks.Check(FAILED, "host long", "not")]
    assert checks.table(rows) == "ok        ddl        fine\nFAILED    host long  not"
