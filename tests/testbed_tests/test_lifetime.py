import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from processes import guards
from testbed import Testbed, TestbedError, cluster, find, obstacle, running, start

HERE = Path(__file__).parents[1] / "testbed"
PYTHON = [sys.executable, "-E", "-S", "-c"]
OWNER = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from testbed import cluster, start
bed = start(cluster([2, 1], link="100mbit"), environment={{sys.argv[1]: "1"}})
bed.popen("h0", ["sleep", "1000"])
bed.run("h1", ["sh", "-c", "trap '' TERM HUP INT; setsid -f sleep 1000 >/dev/null 2>&1"], check=True)
print("up", flush=True)
sys.stdin.read()
"""

root = [pytest.mark.root, pytest.mark.alone, pytest.mark.usefixtures("needs_testbed", "untouched")]
SLOW = pytest.mark.slow  # all workers wait for these


def _inside(network: Path) -> list[str]:
    """The processes of a network namespace."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if (entry / "ns/net").readlink() == network:
                found.append(entry.name)
    return found


class TestWithRoot:
    pytestmark = root

    def test_nothing_is_left_when_it_is_taken_down(self, mark) -> None:
        with running(cluster([2, 2], link="100mbit"), environment=mark.environment) as bed:
            bed.run("h0", ["sh", "-c", "setsid -f sleep 1000 >/dev/null 2>&1"], check=True)
            assert [one.command for one in bed.processes()] == ["sleep 1000"]
            assert len(mark.processes()) > 5
        assert mark.processes() == []
        assert bed.name not in {guard.name for guard in guards()}
        bed.close()

    @SLOW
    def test_nothing_is_left_when_a_test_fails(self, mark) -> None:
        def fail() -> None:
            with running(cluster([2]), environment=mark.environment) as bed:
                sleepers.append(bed.popen("h0", ["sh", "-c", "echo there; exec sleep 1000"]))
                assert sleepers[0].stdout is not None
                sleepers[0].stdout.readline()
                raise ZeroDivisionError

        sleepers: list[subprocess.Popen[str]] = []
        with pytest.raises(ZeroDivisionError):
            fail()
        assert mark.processes() == []
        sleepers[0].communicate()
        assert sleepers[0].returncode == -signal.SIGKILL

    @pytest.mark.parametrize(
        "signo", [signal.SIGKILL, *(pytest.param(signo, marks=SLOW) for signo in (signal.SIGTERM, signal.SIGINT))]
    )
    def test_nothing_is_left_when_its_owner_is_killed(self, mark, signo: signal.Signals) -> None:
        with subprocess.Popen(
            [sys.executable, "-c", OWNER, mark.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as owner:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "up\n"
            assert len(mark.processes()) >= 6
            owner.send_signal(signo)
        mark.wait_until_gone()

    @SLOW
    def test_nothing_is_left_when_its_guard_is_killed_and_it_says_so(self, mark) -> None:
        with running(cluster([2]), environment=mark.environment) as bed:
            (guard,) = [guard for guard in guards() if guard.name == bed.name]
            os.kill(guard.pid, signal.SIGKILL)
            mark.wait_until_gone()
            with pytest.raises(TestbedError, match="is down"):
                bed.run("h0", ["true"])

    @SLOW
    def test_nothing_is_left_when_it_does_not_come_up(self, mark, tmp_path: Path) -> None:
        broken = tmp_path / "testbed"
        shutil.copytree(HERE, broken, ignore=shutil.ignore_patterns("__pycache__"))
        # A rate is the last thing that is set: by then all hosts are there.
        wiring = (broken / "wiring.py").read_text()
        assert "tbf rate" in wiring
        (broken / "wiring.py").write_text(wiring.replace("tbf rate", "tbf speed"))
        script = OWNER.replace(str(HERE), str(broken))
        done = subprocess.run([sys.executable, "-c", script, mark.name], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert "did not come up" in done.stderr
        assert "tbf speed 100000000bit" in done.stderr
        mark.wait_until_gone()

    def test_a_host_that_is_killed_leaves_no_process_and_no_link(self, mark) -> None:
        with running(cluster([3]), environment=mark.environment) as bed:
            stubborn = "trap '' TERM HUP INT; while :; do sleep 1000 & wait; done"
            bed.run("h1", ["sh", "-c", f'setsid -f sh -c "{stubborn}" >/dev/null 2>&1'], check=True)
            entered, other = (bed.popen(host, ["sh", "-c", "echo there; exec sleep 1000"]) for host in ("h1", "h0"))
            for process in (entered, other):
                assert process.stdout is not None
                process.stdout.readline()
            network = Path(f"/proc/{bed.processes('h1')[0].pid}/ns/net").readlink()
            assert len(_inside(network)) >= 3
            bed.kill("h1")
            assert entered.wait() == -signal.SIGKILL
            entered.communicate()
            assert bed.processes("h1") == []
            assert _inside(network) == []  # its keeper has ended, too
            assert other.poll() is None
            assert bed.state() == {"h1": "killed"}
            with pytest.raises(TestbedError, match="was killed"):
                bed.run("h1", ["true"])
            with pytest.raises(TestbedError, match="was killed"):
                bed.mend("h1")
            other.kill()
            other.communicate()

    @SLOW
    def test_a_host_that_is_killed_is_silent_to_its_peers(self) -> None:
        listen = (
            "import socket; s = socket.create_server(('', 5000)); print('ready', flush=True);"
            "c, _ = s.accept(); c.send(b'1'); c.recv(1)"
        )
        connect = (
            "import socket, sys; s = socket.create_connection((sys.argv[1], 5000)); s.recv(1);"
            "print('connected', flush=True); sys.stdin.readline(); s.settimeout(0.5); s.send(b'1'); s.recv(1)"
        )
        with running(cluster([2])) as bed:
            server = bed.popen("h1", [*PYTHON, listen])
            assert server.stdout is not None
            server.stdout.readline()
            client = bed.popen("h0", [*PYTHON, connect, bed.topology.address("h1")])
            assert client.stdout is not None
            client.stdout.readline()
            bed.kill("h1")
            _, complaint = client.communicate("\n")
            assert "TimeoutError" in complaint
            server.communicate()

    @SLOW
    def test_a_name_that_is_taken_is_refused_and_the_first_stays(self) -> None:
        with running(cluster([1])) as bed:
            with pytest.raises(TestbedError, match="runs already"):
                start(cluster([1]), name=bed.name)
            assert find(bed.name).run("h0", ["hostname"]).stdout == "h0\n"

    @SLOW
    def test_a_testbed_that_does_not_run_is_named_with_those_that_do(self) -> None:
        with running(cluster([1])) as bed, pytest.raises(TestbedError, match=rf"'nowhere'.*{bed.name}"):
            find("nowhere")

    @SLOW
    def test_the_command_line_takes_a_testbed_through_its_life(self) -> None:
        name = f"life-{os.getpid()}"

        def command(*words: str, status: int = 0) -> str:
            done = subprocess.run(
                [sys.executable, HERE, words[0], "--name", name, *words[1:]],
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=60,
            )
            assert done.returncode == status, done
            return done.stdout + done.stderr

        try:
            assert "+-- h1" in command("up", "--hosts", "2+1", "--link", "100mbit", "--decoy", "docker0")
            assert "runs already" in command("up", status=1)
            assert command("run", "h2", "--", "hostname") == "h2\n"
            command("run", "h2", "--", "sh", "-c", "exit 7", status=7)
            assert "[CUT]" in command("cut", "rack1")
            assert "[CUT]" not in command("mend", "rack1")
            assert "[KILLED]" in command("kill", "h1")
            assert "h1 is killed" in command("check", status=1)
            assert "[KILLED]" in command("show")
            assert "h9" in command("run", "h9", "true", status=1)
        finally:
            command("down")
        assert "was asked for" in command("down", status=1)

    @SLOW
    def test_a_command_gets_a_logins_environment_and_what_is_added(self, bed: Testbed, tmp_path: Path) -> None:
        said = bed.run("h0", ["env"], env={"ADDED": "a b"}, cwd=tmp_path, check=True).stdout.splitlines()
        names = {line.partition("=")[0] for line in said}
        assert "ADDED=a b" in said
        assert {"HOME", "USER", "PATH", "TMPDIR"} <= names
        assert "PYTEST_CURRENT_TEST" in os.environ
        assert "PYTEST_CURRENT_TEST" not in names
        assert bed.run("h0", ["pwd"], cwd=tmp_path).stdout == f"{tmp_path}\n"
        assert Path(bed.run("h0", ["sh", "-c", "command -v python"]).stdout).parent == Path(sys.executable).parent

    @SLOW
    def test_a_command_that_cannot_be_started_is_named(self, bed: Testbed) -> None:
        done = bed.run("h0", ["no-such-command"])
        assert done.returncode == 127
        assert "no-such-command" in done.stderr
        assert bed.run("h0", ["true"], cwd="/nowhere").returncode == 127

    @SLOW
    def test_a_signal_reaches_the_command_once_and_its_end_is_ours(self, bed: Testbed) -> None:
        script = "import signal, sys; signal.pthread_sigmask(0, [15]); print(1, flush=True);" + (
            "signal.sigwait([15]); print(signal.sigtimedwait([15], 0.2), flush=True); sys.exit(3)"
        )
        for send in (os.kill, os.killpg):
            command = bed.command("h0", [*PYTHON, script])
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as started:
                assert started.stdout is not None
                started.stdout.readline()
                send(started.pid, signal.SIGTERM)
                assert started.stdout.read() == "None\n"
            assert started.returncode == 3
        assert bed.run("h0", ["sh", "-c", "kill -SEGV $$"]).returncode == -signal.SIGSEGV

    def test_a_command_ends_when_the_process_that_stands_for_it_is_killed(self, bed: Testbed) -> None:
        with pytest.raises(subprocess.TimeoutExpired):
            bed.run("h3", ["sleep", "1000"], timeout=0.5)
        for one in bed.processes("h3"):
            with os.fdopen(os.pidfd_open(one.pid)) as ending:
                assert select.select([ending], [], [], 10)[0]

    @SLOW
    def test_a_command_ignores_no_signal_that_a_login_would_not(self, bed: Testbed) -> None:
        status = bed.run("h0", ["grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"], check=True).stdout.split()
        ours = sum(1 << signo - 1 for signo in signal.valid_signals())  # the C library keeps two for itself
        assert [int(mask, 16) & ours for mask in status[1::2]] == [0, 0]


def test_without_root_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    reason = obstacle.__wrapped__()
    assert reason == "a testbed needs root, to make network namespaces"


def test_without_its_tools_it_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool, path: None if tool == "tc" else tool)
    assert obstacle.__wrapped__() == "a testbed needs tc, which is not installed (Debian: package iproute2)"


@pytest.mark.parametrize("command", ["", "up", "run", "show", "kill", "cut", "mend", "check", "down"])
def test_help_is_there_for_each_command(command: str) -> None:
    done = subprocess.run(
        [sys.executable, HERE, *command.split(), "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("usage: tests/testbed")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["up", "--hosts", "two"], "'two'"),
        (["up", "--link", "3furlong"], "'3furlong'"),
        (["up", "--decoy", "docker0=10.77.0.0/16"], "overlaps"),
        (["up", "--decoy", "docker0=10.9.0.0/24,mine"], "NAME=NETWORK,own"),
        (["check", "--seconds", "0"], "0.1 to 60"),
        (["explode"], "explode"),
    ],
)
def test_wrong_arguments_are_a_usage_error_that_names_them(words: list[str], named: str) -> None:
    done = subprocess.run([sys.executable, HERE, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert named in done.stderr
