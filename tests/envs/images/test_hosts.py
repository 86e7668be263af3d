"""Containers as hosts of one job: what `ddlrun -H c1,c2` needs is in the image, less the key."""

import re
import subprocess
import time
from pathlib import Path

import pytest

import containers
from containers import ALLREDUCE, Built, new_key, podman

pytestmark = [pytest.mark.root, pytest.mark.timeout(1800)]

EPOCHS = "import os; print('EPOCHS is', os.environ['EPOCHS'])"
# What the Helm chart's pods may do, in podman's words.
RESTRICTED = (
    "--read-only", "--read-only-tmpfs=false", "--tmpfs", "/tmp", "--tmpfs", "/run/bascule", "--env", "HOME=/tmp",
)  # fmt: skip


def test_two_containers_reduce_with_no_option_but_the_hosts(two_hosts: tuple[str, str]) -> None:
    done = podman("exec", two_hosts[0], "ddlrun", "-H", "c1,c2", "python", "-c", ALLREDUCE)
    assert done.returncode == 0, done.stderr + containers.logs(two_hosts[1])
    assert sorted(done.stdout.split("\n")[:2]) == ["c1 0 2", "c2 1 2"]


def test_a_host_that_has_only_just_been_started_is_waited_for(base: Built, keys: Path) -> None:
    mounted = ("--volume", f"{keys}:/etc/bascule/ssh:ro")
    late = ("sh", "-c", "sleep 1; exec bascule-host serve")  # more than ddlrun takes to find that it refuses
    with (
        containers.network() as net,
        containers.container(base.reference, "--network", net, "--hostname", "c1", *mounted) as one,
        containers.container(base.reference, "--network", net, "--network-alias", "c2", *mounted, command=late) as two,
    ):
        done = podman("exec", one, "ddlrun", "-H", "c1,c2", "python", "-c", "print('a rank')")
        said = containers.logs(two)
    assert done.returncode == 0, done.stderr + said
    assert done.stdout.count("a rank\n") == 2


def test_the_doctor_finds_both(two_hosts: tuple[str, str]) -> None:
    done = podman("exec", two_hosts[0], "ddlrun", "doctor", "-H", "c1,c2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^ok +host c2 ", done.stdout, re.MULTILINE)


def test_a_rank_that_fails_leaves_no_process_on_either_host(two_hosts: tuple[str, str]) -> None:
    script = "import ddl, time; ddl.init(); ddl.rank() == 1 and exit(7); time.sleep(100)"
    done = podman("exec", two_hosts[0], "ddlrun", "-H", "c1,c2", "python", "-c", script)
    assert done.returncode == 7, done.stderr
    for host in two_hosts:
        processes = podman("exec", host, "sh", "-c", "cat /proc/[0-9]*/comm").stdout.split()
        assert "sshd" in processes
        assert not [name for name in processes if name.startswith("python")]


def test_a_launcher_waits_for_restricted_hosts_with_long_names_on_another_port(
    base: Built, keys: Path, tmp_path: Path
) -> None:
    """As the Helm chart's mode mpijob runs it: three pods, a read-only file system, names with a dot, a variable."""
    (tmp_path / "hostfile").write_text("job-worker-0.job-workers slots=1\njob-worker-1.job-workers slots=2\n")
    shared = (
        *RESTRICTED, "--env", "BASCULE_SSH_PORT=2022", "--volume", f"{keys}:/etc/bascule/ssh:ro",
        "--env", "PRTE_MCA_prte_keep_fqdn_hostnames=true", "--env", "OMPI_MCA_orte_keep_fqdn_hostnames=true",
    )  # fmt: skip
    with containers.network() as net:

        def host(number: int) -> tuple[str, ...]:
            name = f"job-worker-{number}"
            return ("--network", net, "--hostname", name, "--network-alias", f"{name}.job-workers")

        launcher = containers.container(
            base.reference, "--network", net, "--volume", f"{tmp_path}/hostfile:/etc/mpi/hostfile:ro", *shared,
            "--env", "BASCULE_WAIT_SECONDS=60", "--env", "EPOCHS=5",
            command=("launch", "ddlrun", "-x", "EPOCHS", "--", "python", "-c", f"{ALLREDUCE}; {EPOCHS}"),
        )  # fmt: skip
        with (
            launcher as begun,  # before there are any hosts
            containers.container(base.reference, *host(0), *shared),
            containers.container(base.reference, *host(1), *shared),
        ):
            status = podman("wait", begun).stdout.strip()
            said = containers.logs(begun)
    assert status == "0", said
    ranks = sorted(line for line in said.splitlines() if re.match(r"job-worker-\d \d 3$", line))
    assert ranks == ["job-worker-0 0 3", "job-worker-1 1 3", "job-worker-1 2 3"]
    assert said.splitlines().count("EPOCHS is 5") == 3


def test_the_first_host_of_a_job_launches_on_all_and_takes_part(base: Built, keys: Path, tmp_path: Path) -> None:
    """As the Helm chart's mode plain runs it: the pods of an Indexed Job, which differ in their number alone."""
    (tmp_path / "hostfile").write_text("job-0.job slots=1\njob-1.job slots=1\n")
    shared = (
        *RESTRICTED, "--volume", f"{keys}:/etc/bascule/ssh:ro", "--volume", f"{tmp_path}/hostfile:/etc/mpi/hostfile:ro",
        "--env", "PRTE_MCA_prte_keep_fqdn_hostnames=true", "--env", "BASCULE_WAIT_SECONDS=60",
    )  # fmt: skip
    command = ("job", "ddlrun", "--", "python", "-c", ALLREDUCE)
    with containers.network() as net:

        def pod(number: int) -> tuple[str, ...]:
            name = f"job-{number}"
            numbered = ("--hostname", name, "--network-alias", f"{name}.job", "--env", f"JOB_COMPLETION_INDEX={number}")
            return ("--network", net, *numbered, *shared)

        with (
            containers.container(base.reference, *pod(0), command=command) as first,
            containers.container(base.reference, *pod(1), command=command) as second,
        ):
            status = podman("wait", first).stdout.strip()
            said = containers.logs(first)
            assert "job-1" not in containers.logs(second)  # it only serves, until Kubernetes ends it
    assert status == "0", said
    assert sorted(line for line in said.splitlines() if re.match(r"job-\d \d 2$", line)) == ["job-0 0 2", "job-1 1 2"]


def test_ranks_run_in_their_host_though_the_launcher_has_its_address(
    base: Built, keys: Path, tmp_path: Path, free_port: int
) -> None:
    """As the Helm chart runs it with `ddl.hostNetwork` where a host and the launcher are on one node."""
    (tmp_path / "hostfile").write_text("job-worker-0.job-workers slots=2\n")
    address, port = machines_address(), free_port
    shared = (
        *RESTRICTED, "--env", f"BASCULE_SSH_PORT={port}", "--volume", f"{keys}:/etc/bascule/ssh:ro",
        "--env", "PRTE_MCA_prte_keep_fqdn_hostnames=true", "--env", "PRTE_MCA_prte_do_not_resolve=true",
        "--network", "host", "--add-host", f"job-worker-0.job-workers:{address}",
    )  # fmt: skip
    where = "import ddl; ddl.init(); print(open('/proc/1/cmdline').read())"
    command = ("launch", "ddlrun", "--", "python", "-c", where)
    mounted = ("--volume", f"{tmp_path}/hostfile:/etc/mpi/hostfile:ro")
    with (
        containers.container(base.reference, *shared),
        containers.container(base.reference, *mounted, *shared, command=command) as launcher,
    ):
        status = podman("wait", launcher).stdout.strip()
        said = containers.logs(launcher)
    assert status == "0", said
    assert said.count("/usr/local/bin/bascule-host\0serve\0") == 2, said


def machines_address() -> str:
    """This machine's address on a network; skips where it has none but the loopback's."""
    found = subprocess.run(["hostname", "-I"], capture_output=True, text=True, timeout=10).stdout.split()
    if not found:
        pytest.skip("this machine has no address but the loopback's")
    return found[0]


def test_a_launcher_leaves_its_input_to_the_program(base: Built, keys: Path, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("localhost\n")
    mounted = ("--volume", f"{keys}:/etc/bascule/ssh:ro", "--volume", f"{tmp_path}/hostfile:/etc/mpi/hostfile:ro")
    here = "/usr/sbin/sshd -f /run/bascule/ssh/sshd_config && exec bascule-host launch cat"
    done = containers.run(base.reference, "sh", "-c", here, options=("--interactive", *mounted), stdin="1 2 3\n")
    assert (done.returncode, done.stdout) == (0, "1 2 3\n"), done.stderr


def test_a_host_that_does_not_answer_in_time_is_named(base: Built, keys: Path, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("nowhere slots=1\n")
    mounted = ("--volume", f"{keys}:/etc/bascule/ssh:ro", "--volume", f"{tmp_path}/hostfile:/etc/mpi/hostfile:ro")
    done = containers.run(base.reference, "launch", "true", options=(*mounted, "--env", "BASCULE_WAIT_SECONDS=1"))
    assert done.returncode == 1
    assert "host nowhere did not answer within 1 s: " in done.stderr


@pytest.mark.parametrize("missing", ["key", "hostfile", "command"])
def test_a_launcher_without_what_it_needs_says_so_at_once(
    base: Built, keys: Path, tmp_path: Path, missing: str
) -> None:
    (tmp_path / "hostfile").write_text("nowhere slots=1\n")
    options = [] if missing == "key" else ["--volume", f"{keys}:/etc/bascule/ssh:ro"]
    if missing != "hostfile":
        options += ["--volume", f"{tmp_path}/hostfile:/etc/mpi/hostfile:ro"]
    command = () if missing == "command" else ("true",)
    done = containers.run(base.reference, "launch", *command, options=tuple(options))
    assert done.returncode == 1
    words = {
        "key": "launch: no other host can be reached: no key is mounted",
        "hostfile": "launch: there is no host file /etc/mpi/hostfile",
        "command": "launch: no command was given",
    }
    assert words[missing] in done.stderr


@pytest.mark.slow
def test_a_host_with_another_key_is_neither_trusted_nor_let_in(base: Built, keys: Path, tmp_path: Path) -> None:
    other = new_key(tmp_path / "other")
    with (
        containers.network() as net,
        containers.container(
            base.reference, "--network", net, "--hostname", "c1", "--volume", f"{keys}:/etc/bascule/ssh:ro"
        ) as one,
        containers.container(
            base.reference, "--network", net, "--hostname", "c2", "--network-alias", "c2",
            "--volume", f"{other}:/etc/bascule/ssh:ro",
        ),
    ):  # fmt: skip
        done = podman("exec", one, "ddlrun", "-H", "c1,c2", "true")
        (tmp_path / "hostfile").write_text("c2\n")
        began = time.monotonic()
        with containers.container(
            base.reference, "--network", net, "--volume", f"{keys}:/etc/bascule/ssh:ro",
            "--volume", f"{tmp_path}/hostfile:/etc/mpi/hostfile:ro", command=("launch", "true"),
        ) as launcher:  # fmt: skip
            assert podman("wait", launcher).stdout.strip() == "1"
            assert "host c2 has another key than this container (Host key" in containers.logs(launcher)
        # It waits 600 s for a host that may still come, and 30 s for one of before that may still go.
        assert 29 < time.monotonic() - began < 100
        trusting = ("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null")
        let_in = podman("exec", one, "ssh", *trusting, "c2", "true")
    assert done.returncode == 3
    assert "host c2: it cannot be reached (Host key verification failed.)" in done.stderr
    assert let_in.returncode == 255
    assert "Permission denied (publickey)" in let_in.stderr


def test_sshd_lets_nobody_in_by_a_password_or_forward_anything(two_hosts: tuple[str, str]) -> None:
    config = podman("exec", two_hosts[0], "/usr/sbin/sshd", "-T", "-f", "/run/bascule/ssh/sshd_config").stdout
    settings = dict(line.split(" ", 1) for line in config.splitlines() if " " in line)
    assert settings["authenticationmethods"] == "publickey"
    assert settings["allowusers"] == "bascule"
    assert settings["disableforwarding"] == "yes"  # every kind, a socket's too, but for two in OpenSSH before 10
    for key in ("x11forwarding", "allowagentforwarding", "permittunnel"):
        assert settings[key] == "no"
    through = podman("exec", two_hosts[0], "ssh", "-o", "LogLevel=INFO", "-W", "127.0.0.1:2222", "c2")
    assert through.returncode != 0
    assert "administratively prohibited" in through.stderr
    modes = podman("exec", two_hosts[0], "stat", "-c", "%a", "/run/bascule/ssh", "/run/bascule/ssh/key").stdout
    assert modes.split() == ["700", "600"]
