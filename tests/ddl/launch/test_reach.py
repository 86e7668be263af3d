import shlex
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddl.launch import probe, process, reach
from ddl.launch.decide import Found
from ddl.launch.hosts import Allocation, Host
from ddl.launch.machine import Machine
from ddl.launch.mpi import Mpi
from ddl.launch.options import Export, Options
from ddl.launch.probe import Answer
from ddl.launch.reach import Reached


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


def test_other_hosts_find_this_one_in_the_jobs_network_or_else_by_a_list(
    machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "here", machine)
    assert reach.own_addresses(["h5", "h6"], ["10.0.0.0/24"]) == ("10.0.0.1",)
    assert reach.own_addresses(["h5"], ["192.168.0.0/16"]) == ("10.0.0.1", "172.17.0.1")
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
        (1, "srun: error: Unable to create step: No\n", "Slurm does not reach it (srun: error: Unable to create step"),
    ],
)
def test_a_host_that_is_asked_alone_says_what_is_wrong(status: int | None, errors: str, message: str) -> None:
    answer = reach.alone("a", status, "", errors)
    assert isinstance(answer, str)
    assert message in answer


def test_a_host_that_answers_is_fine(machine: Callable[..., Machine]) -> None:
    assert reach.alone("a", 0, f"motd\n{probe.line(Answer(machine()), 0)}\n", "") == machine()


def program(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    made = folder / name
    made.write_text(f"#!/bin/sh\n{text}\n")
    made.chmod(0o755)
    return made


Probe = Callable[..., Reached]


@pytest.fixture
def fallback(
    tmp_path: Path, mpis: Mapping[str, Mpi], machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> Probe:
    """Looking at hosts with an mpirun that runs `mpirun`, and an ssh and srun that note their words and `answer`."""
    monkeypatch.setattr(process, "end_children", lambda: None)  # some may be other tests'
    monkeypatch.setattr(reach, "REFUSED_SECONDS", 0)
    answer = shlex.quote(probe.line(Answer(machine("b")), 0))

    def look(
        mpirun: str = "exit 1",
        answers: str = f"echo {answer}",
        *names: str,
        batch: str = "",
        seconds: float = 60,
        exports: tuple[Export, ...] = (),
    ) -> Reached:
        path = program(tmp_path / "bin", "mpirun", mpirun)
        for name in ("ssh", "srun"):
            noted = f'printf "%s\\n" "$@" >{tmp_path}/{name}; cat >{tmp_path}/{name}.stdin'
            program(tmp_path / "bin", name, f"{noted}\n{answers}")
        environ = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "PYTHONPATH": "/x y"}
        names = names or ("b",)
        allocation = Allocation(tuple(map(Host, names)), "-H", batch=batch)
        resolved = dict.fromkeys(names, "10.0.0.9")
        found = Found(replace(mpis["openmpi5"], path=path), allocation, {}, resolved, environ)
        asked = Options(exports=exports, start_timeout=seconds)  # type: ignore[arg-type]  # less than a second, too
        return reach.probe_hosts(asked, found)

    return look


def test_where_each_host_answers_alone_it_is_mpirun_s_words_that_count(fallback: Probe, tmp_path: Path) -> None:
    found = fallback("echo ----- >&2; echo 'No network interfaces were found' >&2; exit 1")
    assert found.machines == {}
    assert found.problems["b"].startswith("it can be logged in to, but mpirun did not start the probe there; check")
    assert found.problems["b"].endswith(". mpirun said: No network interfaces were found")
    words = (tmp_path / "ssh").read_text().splitlines()
    assert words[-2] == "b"
    # Variables go by stdin: what stands in the words, every user of the host can read.
    assert words[-1] == f"""/bin/sh -c 'eval "$(cat)"; exec "$@"' sh {sys.executable} -m ddl.launch.probe"""
    assert (tmp_path / "ssh.stdin").read_text() == "export PYTHONPATH='/x y'\n"


def test_mpirun_s_words_stand_beside_those_of_a_host_that_does_not_answer(fallback: Probe) -> None:
    found = fallback("echo 'PRTE has lost communication' >&2; exit 1", "echo 'Connection refused' >&2; exit 255")
    assert found.problems == {
        "b": "it cannot be reached (Connection refused); check its name, and that you can log in without a password; "
        "try: ssh b true (mpirun said: PRTE has lost communication)"
    }


def test_what_mpirun_passes_on_of_the_agent_s_words_is_said_once(fallback: Probe) -> None:
    refused = "echo 'ssh: Connection refused' >&2; exit 255"
    assert "mpirun said" not in fallback(refused, refused).problems["b"]


@pytest.mark.parametrize("since", ["", "ssh"], ids=["refuses both", "answers since"])
def test_a_host_that_refuses_is_asked_again_for_it_may_be_starting(
    fallback: Probe, machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, since: str
) -> None:
    monkeypatch.setattr(reach, "REFUSED_SECONDS", 60)
    refused = "echo 'ssh: connect to host b port 22: Connection refused' >&2; exit 255"
    answer = shlex.quote(probe.line(Answer(machine("b")), 0))
    once = f"if mkdir {tmp_path}/tried 2>/dev/null; then echo a warning >&2; {refused}; fi; echo {answer}"
    found = fallback(once, f"echo {answer}" if since == "ssh" else refused)
    assert found == Reached({"b": machine("b")})


def test_a_host_that_keeps_refusing_is_named_and_no_other_fault_is_asked_for_again(
    fallback: Probe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counted = f"echo >>{tmp_path}/count; exit 1"

    def times(fault: str, *spent: float) -> int:
        monkeypatch.setattr(reach, "REFUSED_SECONDS", 5)
        clock = iter((0.0, *spent))
        monkeypatch.setattr(reach, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None))
        (tmp_path / "count").write_text("")
        found = fallback(counted, f"echo '{fault}' >&2; exit 255", seconds=60)
        assert found.problems["b"].startswith(f"it cannot be reached ({fault}); check its name")
        return (tmp_path / "count").read_text().count("\n")

    assert times("Connection refused", 1, 4, 9) == 3
    assert times("Could not resolve hostname b", 1) == 1


def test_a_probe_that_is_cut_off_is_no_mpirun_that_said_nothing(fallback: Probe) -> None:
    found = fallback("exec sleep 60", seconds=0.3)
    assert found.problems["b"].endswith(". mpirun did not finish within 0 s (--start-timeout), and said nothing")


@pytest.mark.parametrize(("one", "other"), [("localhost", "127.0.0.1"), ("b", "b.example")])
def test_a_host_with_two_names_is_told_so(
    fallback: Probe, machine: Callable[..., Machine], one: str, other: str
) -> None:
    answer = shlex.quote(probe.line(Answer(machine("b")), 0))
    problems = fallback("exit 1", f"echo {answer}", one, other).problems
    assert problems[one].startswith(f"it is the same host as {other}: name each host once")
    assert problems[other].startswith(f"it is the same host as {one}: name each host once")


def test_in_a_slurm_allocation_hosts_are_asked_with_srun(fallback: Probe, tmp_path: Path) -> None:
    found = fallback(batch="slurm")
    assert found.problems["b"].endswith(". mpirun said nothing")
    assert not (tmp_path / "ssh").exists()
    assert (tmp_path / "srun").read_text().splitlines() == [
        "--nodes=1", "--ntasks=1", "--nodelist=b",
        "/bin/sh", "-c", 'eval "$(cat)"; exec "$@"', "sh", sys.executable, "-m", "ddl.launch.probe",
    ]  # fmt: skip
    failed = fallback("exit 1", "echo 'srun: error: Node b is down' >&2; exit 1", batch="slurm").problems["b"]
    assert (
        "Slurm does not reach it (srun: error: Node b is down); see: scontrol show node b; try: srun --nodes=1"
        in failed
    )


def test_a_user_s_visible_gpus_reach_the_probe(fallback: Probe, tmp_path: Path) -> None:
    mpirun = f'echo "$OMPI_DDLRUN_X_CUDA_VISIBLE_DEVICES" >{tmp_path}/mpirun; exit 1'
    fallback(mpirun, exports=(Export("CUDA_VISIBLE_DEVICES", "0,1", secret=True),))
    assert (tmp_path / "mpirun").read_text() == "0,1\n"
    assert "export CUDA_VISIBLE_DEVICES=0,1\n" in (tmp_path / "ssh.stdin").read_text()


def test_a_user_s_visible_gpus_count_on_this_host(
    fallback: Probe, machine: Callable[..., Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def here(visible: str | None = None) -> Machine:
        asked.append(visible)
        return machine()

    monkeypatch.setattr(reach, "here", here)
    fallback("exit 1", "exit 1", "localhost", exports=(Export("CUDA_VISIBLE_DEVICES", "1"),))
    fallback("exit 1", "exit 1", "localhost")
    assert asked == ["1", None]


def test_hosts_are_told_where_the_others_are(machine: Callable[..., Machine]) -> None:
    names = ["localhost", "b", "c", "d"]
    resolved = {"localhost": "127.0.0.1", "b": "10.0.0.2", "c": "", "d": "127.0.1.1"}
    one = list(reach._targets(names, resolved, ["10.0.0.0/24"], machine()))
    assert one == ["10.0.0.1", "10.0.0.2", "", ""]
    several = list(reach._targets(names, resolved, ["10.0.0.0/24", "172.17.0.0/16"], machine()))
    assert several[0] == ""  # which of the two it is differs from host to host
