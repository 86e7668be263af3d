"""The launcher on a virtual cluster: several hosts, decoys, faults. It needs root; see docs/testbed.md."""

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testbed import AGENT, Decoy, Testbed, cluster, running

ROOT = Path(__file__).parents[3]
Run = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_testbed")]


@pytest.fixture(scope="module")
def bed(needs_testbed: None) -> Iterator[Testbed]:
    decoys = [Decoy(), Decoy("eth1", "10.9.0.0/24", same=False)]
    with running(cluster([2, 2], link="200mbit", uplink="100mbit", decoys=decoys, shuffle=7)) as one:
        yield one


@pytest.fixture
def ddlrun(bed: Testbed, tmp_path: Path) -> Run:
    tmp_path.chmod(0o755)

    def run(*words: str | Path, timeout: float = 100, **more: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PYTHONPATH": str(ROOT / "ddl/src"),
            "XDG_STATE_HOME": str(tmp_path / "state"),
            "PRTE_MCA_plm_ssh_agent": str(AGENT),
            **more,
        }
        return bed.run(
            "h0", [sys.executable, "-m", "ddl.ddlrun", *words], env=environment, cwd=tmp_path, timeout=timeout
        )

    return run


def test_ranks_of_a_host_are_consecutive_and_find_rank_0(ddlrun: Run) -> None:
    script = "echo $RANK $LOCAL_RANK $(hostname) $MASTER_ADDR $DDL_OPTIONS"
    done = ddlrun("-H", "h2:2,h0:2,h1:2,h3:2", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    hosts = ["h2", "h2", "h0", "h0", "h1", "h1", "h3", "h3"]
    lines = [f"{rank} {rank % 2} {host} 10.77.0.3 -mode p" for rank, host in enumerate(hosts)]
    assert sorted(done.stdout.splitlines()) == lines


def test_the_original_s_order_is_there_for_those_who_ask(ddlrun: Run) -> None:
    done = ddlrun("--order", "hosts", "-H", "h0:2,h1:2", "sh", "-c", "echo $RANK $LOCAL_RANK $(hostname)")
    assert sorted(done.stdout.splitlines()) == ["0 0 h0", "1 0 h1", "2 1 h0", "3 1 h1"], done.stderr


def test_a_value_that_is_given_reaches_ranks_of_other_hosts_and_is_in_no_process_s_arguments(ddlrun: Run) -> None:
    token = secrets.token_hex(16)
    look = "import os, pathlib; t = os.environ['TOKEN']; shown = [p.read_bytes() for p in pathlib.Path('/proc').glob("
    look += "'[0-9]*/cmdline') if p.parent.exists()]; print(t, sum(t.encode() in one for one in shown), "
    look += "sum(b'prted' in one for one in shown) > 1)"
    done = ddlrun("-v", "-H", "h1,h2", "-x", f"TOKEN={token}", "python", "-c", look)  # hosts of one machine share /proc
    assert done.stdout == f"{token} 0 True\n" * 2, done.stderr
    assert token not in done.stderr


def test_interfaces_that_lead_nowhere_are_left_out(ddlrun: Run) -> None:
    done = ddlrun("doctor", "-H", "h0,h1,h2,h3")
    assert done.returncode == 0, done.stdout
    assert "the hosts' names lead to 10.77.0.0/24" in done.stdout
    assert "without docker0: a bridge without a network card" in done.stdout
    assert "without eth1: " in done.stdout


@pytest.mark.parametrize(
    "chosen",
    [
        "btl_tcp_if_include 10.10.0.0/24",
        "btl_tcp_if_include other",
        "btl_tcp_if_exclude lo,docker0,eth0,eth1",
    ],
)
def test_ranks_use_the_network_that_mpirun_is_told(ddlrun: Run, bed: Testbed, chosen: str) -> None:
    """A network that the hosts' names do not lead to, and that is let in none the less."""
    for number, host in enumerate(("h0", "h1"), start=1):
        for words in (
            "link add other link eth0 type macvlan mode bridge",
            "link set other up",
            f"address add 10.10.0.{number}/24 dev other",
        ):
            assert bed.run(host, ["ip", *words.split()], timeout=20).returncode == 0
    sent = [sys.executable, "-c", "print(open('/sys/class/net/other/statistics/tx_bytes').read())"]
    before = int(bed.run("h0", sent, timeout=20).stdout)
    program = "import ddl, numpy; ddl.init(); print(ddl.allreduce(numpy.ones(500_000))[0]); ddl.finalize()"
    done = ddlrun("-H", "h0,h1", "--mpiarg", f"--mca {chosen}", "python", "-c", program, DDL_TIMEOUT="30")
    after = int(bed.run("h0", sent, timeout=20).stdout)
    for host in ("h0", "h1"):
        assert bed.run(host, ["ip", "link", "delete", "other"], timeout=20).returncode == 0
    assert done.stdout == "2.0\n2.0\n", done.stderr
    assert after - before > 4_000_000


def test_a_wrong_host_name_is_named_and_only_it(ddlrun: Run) -> None:
    done = ddlrun("-H", "h0,h9,h1", "true")
    assert done.returncode == 3
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ddlrun: error")]
    assert line.startswith("ddlrun: error: host h9: it cannot be reached (testbed agent: host 'h9'")


def test_a_host_without_a_route_to_it_is_named_and_only_it(ddlrun: Run, bed: Testbed) -> None:
    bed.cut("h3")
    try:
        done = ddlrun("-H", "h0,h3,h1", "true")
    finally:
        bed.mend("h3")
    assert done.returncode == 3
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ddlrun: error")]
    assert re.match(r"ddlrun: error: host h3: it cannot be reached .* is cut\); check its name", line), line
    bed.settle()


@pytest.mark.parametrize("kind", ["unreachable", "blackhole"])
def test_two_hosts_without_a_route_between_them_are_one_clear_line(ddlrun: Run, bed: Testbed, kind: str) -> None:
    route = [kind, "10.77.0.3/32"]  # to h2
    bed.run("h1", ["ip", "route", "add", *route], check=True)
    try:
        done = ddlrun("-H", "h0,h1,h2", "true")
        apart = ddlrun("-H", "h0,h1", "true")
    finally:
        bed.run("h1", ["ip", "route", "del", *route], check=True)
    assert done.returncode == 3
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ddlrun: ")]
    assert line == (
        "ddlrun: error: host h1: no route to host h2 (10.77.0.3): No route to host; fix the network between the two, "
        "or leave one of them out"
    )
    assert apart.returncode == 0, apart.stderr


def test_hosts_whose_ranks_end_slowly_are_not_called_lost_when_another_rank_fails(ddlrun: Run) -> None:
    script = "trap '' TERM; [ $RANK = 0 ] && { sleep 0.5; exit 3; }; while :; do sleep 1; done"
    done = ddlrun("-H", "h0,h1,h2,h3", "sh", "-c", script)
    assert done.returncode == 3, done.stderr
    assert "ddlrun: rank 0 on h0 ended with exit status 3" in done.stderr
    assert "is lost" not in done.stderr


def test_a_host_without_ddl_is_named(ddlrun: Run, bed: Testbed) -> None:
    bed.run("h1", ["mount", "-t", "tmpfs", "none", str(ROOT / "ddl/src/ddl")], check=True)
    try:
        done = ddlrun("-H", "h0,h1,h2", "true")
    finally:
        bed.run("h1", ["umount", str(ROOT / "ddl/src/ddl")], check=True)
    assert done.returncode == 3
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ddlrun: error")]
    assert re.match(r"ddlrun: error: host h1: .* has no ddl \(.*\); install it there", line)


def test_another_version_on_a_host_is_named_with_both(ddlrun: Run, bed: Testbed, tmp_path: Path) -> None:
    other = tmp_path / "__init__.py"
    other.write_text('__version__ = "0.0.9"\n')
    target = str(ROOT / "ddl/src/ddl/__init__.py")
    bed.run("h1", ["mount", "--bind", str(other), target], check=True)
    try:
        done = ddlrun("-H", "h0,h1,h2", "true", PYTHONDONTWRITEBYTECODE="1")
    finally:
        bed.run("h1", ["umount", target], check=True)
    assert done.returncode == 3
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ddlrun: error")]
    assert line.startswith("ddlrun: error: host h1: it has ddl 0.0.9, and this host has")


# NVML, as Python sees it, of a host with two GPUs.
PYNVML = """
from types import SimpleNamespace as Some
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetCpuAffinity(handle, words): return [1]
def nvmlDeviceGetName(handle): return "V100"
def nvmlDeviceGetPciInfo(handle): return Some(busId=f"00:{handle:02}")
def nvmlDeviceGetMemoryInfo(handle): return Some(total=32 << 30)
"""


def test_a_host_with_other_hardware_is_named_and_taken_only_where_the_ranks_are_counted(
    ddlrun: Run, bed: Testbed, tmp_path: Path
) -> None:
    nvml, other = tmp_path / "python/pynvml.py", tmp_path / "nvml_of_h1"
    nvml.parent.mkdir()
    nvml.write_text("raise ImportError\n")
    other.write_text(PYNVML)
    path = f"{nvml.parent}:{ROOT / 'ddl/src'}"
    bed.run("h1", ["mount", "--bind", str(other), str(nvml)], check=True)
    try:
        refused = ddlrun("-H", "h0,h1,h2", "true", PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1")
        counted = ddlrun("-np", "3", "-H", "h0,h1,h2", "hostname", PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1")
    finally:
        bed.run("h1", ["umount", str(nvml)], check=True)
    said = "host h1: it has 2 GPUs (V100), and h0, h2 have no GPU; leave it out, or say what you want of its GPUs"
    assert refused.returncode == 3, refused.stderr
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("ddlrun: error")]
    assert line.startswith(f"ddlrun: error: {said}")
    assert counted.returncode == 0, counted.stderr
    assert f"ddlrun: warning: {said}" in counted.stderr
    assert sorted(counted.stdout.splitlines()) == ["h0", "h1", "h2"]


def path_with_srun(folder: Path) -> str:
    """A PATH on which a stand-in for Slurm's srun comes first; it leaves what it was asked in `folder`/bin/log."""
    srun = folder / "bin/srun"
    srun.parent.mkdir()
    srun.write_text(SRUN.format(python=sys.executable, agent=AGENT))
    srun.chmod(0o755)
    return f"{srun.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"


def test_a_job_in_a_slurm_allocation_starts_with_srun(ddlrun: Run, tmp_path: Path) -> None:
    path = path_with_srun(tmp_path)
    done = ddlrun(
        "-np", "4", "sh", "-c", "echo $RANK $(hostname)", PATH=path, SLURM_JOB_ID="7", SLURM_JOBID="7",
        SLURM_JOB_NODELIST="h[1-2]", SLURM_NODELIST="h[1-2]", SLURM_TASKS_PER_NODE="1(x2)", SLURM_NNODES="2",
        SLURM_JOB_NUM_NODES="2", SLURM_JOB_CPUS_PER_NODE="2(x2)",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 h1", "1 h1", "2 h2", "3 h2"]
    assert "prted" in (tmp_path / "bin/log").read_text()


SRUN = """#!{python}
# As much of Slurm's srun as Open MPI's launcher uses: a command once on each host of the allocation.
import os, pathlib, shlex, subprocess, sys
if "--version" in sys.argv:
    print("slurm 23.11.4")
    sys.exit()
with open(pathlib.Path(__file__).parent / "log", "a") as log:
    print(*sys.argv, file=log)
words = sys.argv[1:]
hosts = ["h1", "h2"]
while words[0].startswith("-"):
    word = words.pop(0)
    if word.startswith("--nodelist="):
        hosts = word.partition("=")[2].split(",")
kept = [f"{{k}}={{v}}" for k, v in os.environ.items() if k.startswith(("PRTE_", "PMIX_", "OMPI_", "SLURM_", "PATH"))]
running = []
for at, host in enumerate(hosts):
    mine = ["env", *kept, f"SLURM_NODEID={{at}}", f"SLURM_PROCID={{at}}"]
    running.append(subprocess.Popen(["{agent}", host, shlex.join(mine) + " " + " ".join(words)]))
sys.exit(max(one.wait() for one in running))
"""


def test_a_host_that_srun_does_not_reach_is_named_by_srun(ddlrun: Run, tmp_path: Path) -> None:
    path = path_with_srun(tmp_path)
    done = ddlrun(
        "true", PATH=path, PRTE_MCA_plm_ssh_agent="", SLURM_JOB_ID="7", SLURM_JOBID="7", SLURM_JOB_NODELIST="h[1,9]",
        SLURM_NODELIST="h[1,9]", SLURM_TASKS_PER_NODE="1(x2)", SLURM_NNODES="2", SLURM_JOB_NUM_NODES="2",
    )  # fmt: skip
    assert done.returncode == 3
    assert "ddlrun: error: host h9: it cannot be reached (testbed agent: host 'h9'" in done.stderr
    assert "try: srun --nodes=1 --ntasks=1 --nodelist=h9 true" in done.stderr


def test_a_host_that_dies_ends_the_job_and_a_spare_one_takes_its_place(ddlrun: Run, bed: Testbed) -> None:
    # The last test of this bed: h3 stays dead.
    import threading

    killer = threading.Event()

    def kill_when_started() -> None:
        while not killer.is_set():
            if any("sleep 300" in one.command for one in bed.processes("h3")):
                bed.kill("h3")
                return

    thread = threading.Thread(target=kill_when_started)
    thread.start()
    try:
        done = ddlrun(
            "-np", "4", "-H", "h0:2,h3:2,h1:2", "--restarts", "1", "sh", "-c",
            'test -z "$DDL_RESTART" && exec sleep 300; echo $RANK $(hostname)',
        )  # fmt: skip
    finally:
        killer.set()
        thread.join()
    assert done.returncode == 0, done.stderr
    assert "ddlrun: the program ended with exit status 1; restart 1 of 1" in done.stderr
    assert "ddlrun: without h3; h1 instead" in done.stderr
    ours = [line for line in done.stdout.splitlines() if re.match(r"\d h\d$", line)]  # mpirun writes there, too
    assert sorted(ours) == ["0 h0", "1 h0", "2 h1", "3 h1"]
    assert [one for host in ("h0", "h1", "h2") for one in bed.processes(host)] == []
