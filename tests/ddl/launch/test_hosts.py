import re
from pathlib import Path
from unittest import mock

import pytest

from ddl.launch.errors import UsageError
from ddl.launch.hosts import (
    OPERATOR_HOSTFILE,
    Allocation,
    Host,
    allocation,
    expand_counts,
    expand_nodelist,
    parse_hostfile,
    parse_hosts,
)


def found(environ: dict[str, str] | None = None, files: dict[str, str] | None = None, **given: object) -> Allocation:
    def read(path: Path) -> str:
        if str(path) in (files or {}):
            return (files or {})[str(path)]
        raise FileNotFoundError(2, "No such file or directory", str(path))

    arguments = {"given": None, "hostfile": None, **given}
    with mock.patch("ddl.launch.files.read", read):
        return allocation(environ=environ or {}, here="me", **arguments)  # type: ignore[arg-type]


def test_with_nothing_given_it_is_this_host() -> None:
    assert found().names == ("me",)
    assert found().hosts[0].slots is None


def test_a_host_file_from_windows_is_read(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfa\r\nb\r\n")
    assert allocation(environ={}, here="me", given=None, hostfile=tmp_path / "hosts").names == ("a", "b")


def test_hosts_of_the_command_line() -> None:
    assert parse_hosts("a,b:2, c.d.e") == (Host("a"), Host("b", 2), Host("c.d.e"))


def test_a_host_that_is_named_again_has_the_sum() -> None:
    assert parse_hosts("a,b,a") == (Host("a", 2), Host("b"))
    assert parse_hosts("a:2,a:3") == (Host("a", 5),)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a,,b", "'' is not a host name"),
        ("a:0", "'0' is not a number"),
        ("a:x", "'x'"),
        ("-a", "'-a' is not a host name"),
        ("", "''"),
        ("::1", "'::1' looks like an IPv6 address, and none is accepted"),
        ("a,[::1]:2", "'[::1]:2' looks like an IPv6 address"),
        ("fe80::1%eth0:2", "looks like an IPv6 address"),
    ],
)
def test_a_host_that_cannot_be_is_named(text: str, what: str) -> None:
    with pytest.raises(UsageError, match=re.escape(what)):
        parse_hosts(text)


def test_a_host_file_may_be_open_mpi_s_or_mpich_s() -> None:
    text = "# the hosts\na slots=2 max_slots=4\n\nb:3  # three\nme@c\n"
    assert parse_hostfile(text, "f") == (Host("a", 2), Host("b", 3), Host("c"))


def test_a_host_file_with_a_line_a_slot_is_counted() -> None:
    assert parse_hostfile("a\na\nb\nb\n", "f") == (Host("a", 2), Host("b", 2))


def test_an_error_in_a_host_file_names_the_line() -> None:
    with pytest.raises(UsageError, match="f, line 2: 'cores=3' is no setting"):
        parse_hostfile("a\nb cores=3", "f")
    with pytest.raises(UsageError, match="f, line 1: 'fe80::1' looks like an IPv6 address"):
        parse_hostfile("me@fe80::1 slots=2", "f")
    with pytest.raises(UsageError, match="f: it names no host"):
        parse_hostfile("# none\n", "f")


def test_a_host_file_that_is_missing_is_named() -> None:
    with pytest.raises(UsageError, match="-hostfile='gone': cannot be read: No such file"):
        found(hostfile=Path("gone"))


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", "n1"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[01-03,07],gpu", "n01 n02 n03 n07 gpu"),
        ("a[1-2]-b[3-4]", "a1-b3 a1-b4 a2-b3 a2-b4"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("x,n[9-10].site.org", "x n9.site.org n10.site.org"),
    ],
)
def test_slurm_s_short_form_of_hosts(text: str, hosts: str) -> None:
    assert expand_nodelist(text) == tuple(hosts.split())


@pytest.mark.parametrize("text", ["a[1-3", "a[1-3],b[", "a[1-3]]", "a]1", "a[1-[2]"])
def test_brackets_that_do_not_match_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"SLURM_JOB_NODELIST={re.escape(repr(text))}: expected "):
        expand_nodelist(text)


def test_slurm_s_short_form_of_numbers() -> None:
    assert expand_counts("2(x3),1") == (2, 2, 2, 1)
    with pytest.raises(UsageError, match="SLURM_TASKS_PER_NODE='two'"):
        expand_counts("two")


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"}


def test_slurm_s_tasks_are_slots_only_where_somebody_asked_for_them() -> None:
    assert found(SLURM).hosts == (Host("n1"), Host("n2"))
    asked = found({**SLURM, "SLURM_NTASKS": "6", "SLURM_TASKS_PER_NODE": "4,2"})
    assert asked.hosts == (Host("n1", 4), Host("n2", 2))
    assert asked.batch == "slurm"
    assert "job 7" in asked.source


def test_slurm_s_numbers_must_be_for_all_hosts() -> None:
    with pytest.raises(UsageError, match="numbers for 3 hosts, and Slurm lists 2"):
        found({**SLURM, "SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "1(x3)"})


def test_lsf_counts_cores_which_bound_ranks_but_ask_for_none() -> None:
    lsf = found({"LSB_MCPU_HOSTS": "a 16 b 16"})
    assert lsf.hosts == (Host("a", 16), Host("b", 16))
    assert not lsf.asked


def test_lsf_s_launch_host_takes_no_rank() -> None:
    assert found({"LSB_MCPU_HOSTS": "batch5 1 a 42 b 42"}).names == ("a", "b")


def test_the_kubernetes_operator_s_host_file() -> None:
    text = "job-worker-0.job slots=2\njob-worker-1.job slots=2\n"
    mounted = found(files={str(OPERATOR_HOSTFILE): text})
    named = found({"OMPI_MCA_orte_default_hostfile": "/x"}, {"/x": text})
    assert mounted.hosts == named.hosts == (Host("job-worker-0.job", 2), Host("job-worker-1.job", 2))


def test_the_command_line_counts_more_than_the_batch_system() -> None:
    assert found(SLURM, given="a").names == ("a",)
    assert found(SLURM, {"f": "b\n"}, hostfile=Path("f")).names == ("b",)
