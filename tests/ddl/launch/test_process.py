import ctypes
import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ddl.launch import process

ROOT = Path(__file__).parents[3]


def supervised(code: str) -> subprocess.Popen[str]:
    """A program of its own that runs `code` with `process` at hand: signals and adopted children are a process's."""
    source = "import os, signal, sys\nfrom ddl.launch import process\n" + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", source],
        env={**os.environ, "PYTHONPATH": str(ROOT / "ddl/src")},
        stdout=subprocess.PIPE,
        text=True,
    )


def gone(pid: int, seconds: float = 20) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(descriptor) as opened:
        return bool(select.select([opened], [], [], seconds)[0])


@pytest.mark.parametrize(("script", "status"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)])
def test_the_status_is_the_command_s(script: str, status: int) -> None:
    code = f"ended = process.run(['/bin/sh', '-c', {script!r}], os.environ)\nprint(ended.status, ended.asked)"
    with supervised(code) as program:
        assert program.communicate(timeout=60)[0].split() == [str(status), "False"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_goes_on_to_the_command_once(number: signal.Signals) -> None:
    script = f"n=0; trap 'n=$((n+1))' {number.name[3:]}; echo ready; while [ $n = 0 ]; do sleep 0.02; done; echo $n"
    code = f"ended = process.run(['/bin/sh', '-c', {script!r}], os.environ)\nprint(ended.status, ended.asked)"
    with supervised(code) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        program.send_signal(number)
        assert program.communicate(timeout=60)[0].split() == ["1", str(128 + number), "True"]


@pytest.mark.parametrize(
    ("number", "instead", "interrupted"), [(signal.SIGINT, "USR1", "True"), (signal.SIGHUP, "USR2", "False")]
)
def test_a_program_that_takes_signals_is_not_ended_for_them(
    number: signal.Signals, instead: str, interrupted: str
) -> None:
    script = f"trap 'exit 7' {instead}; echo W-2 takes signals >&2; echo ready >&2; while :; do sleep 0.02; done"
    code = f"""
        from ddl.launch.reports import Reports
        os.dup2(1, 2)
        ended = process.run(['/bin/sh', '-c', {script!r}], os.environ, Reports('T-1', 'W-2'))
        print(ended.status, ended.asked, ended.interrupted)
    """
    with supervised(code) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        program.send_signal(number)
        said, ended = program.communicate(timeout=60)[0].splitlines()
        assert (said[:34], ended) == ("ddlrun: the program gets this sign", f"7 False {interrupted}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_that_comes_late_changes_nothing(number: signal.Signals) -> None:
    script = f"trap 'exit 0' {number.name[3:]}; echo ready; while :; do sleep 0.02; done"
    code = f"""
        ended = process.run(['/bin/sh', '-c', {script!r}], os.environ)
        signal.raise_signal({int(number)})
        print(ended.status)
    """
    with supervised(code) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        program.send_signal(number)
        assert program.communicate(timeout=60)[0].split() == [str(128 + number)]
        assert program.returncode == 0


def test_what_the_command_leaves_behind_is_ended() -> None:
    code = "process.run(['/bin/sh', '-c', 'setsid sleep 300 & echo $!'], os.environ)"
    with supervised(code) as program:
        pid = int(program.communicate(timeout=60)[0])
    assert gone(pid, 0)


def test_the_command_ends_when_its_launcher_is_killed() -> None:
    code = "process.run(['/bin/sh', '-c', 'echo $$; exec sleep 300'], os.environ)"
    with supervised(code) as program:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        program.kill()
        assert gone(pid)


def test_a_command_that_takes_too_long_is_ended() -> None:
    code = """
    status, output, errors = process.capture(["/bin/sh", "-c", "echo early; exec sleep 300"], os.environ, 0.2)
    print(status, output.strip())
    """
    with supervised(code) as program:
        assert program.communicate(timeout=60)[0].split() == ["None", "early"]


def test_a_command_s_output_is_captured() -> None:
    code = 'print(process.capture(["/bin/sh", "-c", "echo out; echo err >&2; exit 4"], os.environ, 60))'
    with supervised(code) as program:
        assert program.communicate(timeout=60)[0].strip() == "(4, 'out\\n', 'err\\n')"


def test_a_program_that_is_missing_has_the_status_of_an_unreachable_host() -> None:
    status, _, errors = process.capture_plain(["/no/such/agent"], {}, 5)
    assert (status, errors) == (255, "/no/such/agent: No such file or directory")


def test_a_command_s_errors_are_passed_on_and_their_end_is_kept() -> None:
    code = """
    ended = process.run(["/bin/sh", "-c", "echo lost >&2; (sleep 300 >&2) & exit 0"], os.environ)
    print(repr(ended.errors))
    """
    with supervised(code) as program:
        assert program.communicate(timeout=60)[0].strip() == repr("lost\n")


def test_what_a_command_leaves_behind_is_not_waited_for() -> None:
    code = 'print(process.capture(["/bin/sh", "-c", "echo out; setsid sleep 300 & exit 4"], os.environ, 60))'
    with supervised(code) as program:
        assert program.communicate(timeout=20)[0].strip() == "(4, 'out\\n', '')"


def test_a_filter_stands_in_the_way_of_a_command_s_errors() -> None:
    code = """
    class Upper:
        def take(self, chunk): return chunk.upper()
        def rest(self): return b"!"
    ended = process.run(["/bin/sh", "-c", "printf 'oh no' >&2"], os.environ, Upper())
    print(ended.errors)
    """
    with supervised(code) as program:
        assert program.communicate(timeout=60)[0].strip() == "OH NO!"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_what_is_worked_with_is_put_back_and_ended_when_a_signal_comes(number: signal.Signals, tmp_path: Path) -> None:
    code = f"""
    import subprocess, tempfile, time
    kept = subprocess.Popen(["sleep", "300"])
    with process.unwinding(), tempfile.TemporaryDirectory(dir={str(tmp_path)!r}) as folder:
        with open(folder + "/log", "wb") as log:
            job = process.start(["/bin/sh", "-c", "trap '' TERM; setsid sleep 300 & echo $!; wait"], os.environ, log)
        while not os.path.getsize(folder + "/log"):
            time.sleep(0.01)
        print(kept.pid, job.pid, open(folder + "/log").read(), flush=True)
        time.sleep(300)
    """
    with supervised(code) as program:
        assert program.stdout is not None
        kept, job, orphan = map(int, program.stdout.readline().split())
        program.send_signal(number)
        assert program.wait(20) == 128 + number
    assert gone(job, 0)
    assert gone(orphan, 0)
    assert list(tmp_path.iterdir()) == []
    os.kill(kept, signal.SIGKILL)  # it was there before


def test_the_caller_is_no_longer_parent_of_others_children_afterwards() -> None:
    """A program that calls ddlrun as a library may not look after processes that it did not start."""

    def adopts() -> int:
        is_subreaper = ctypes.c_int()
        ctypes.CDLL(None).prctl(37, ctypes.byref(is_subreaper), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
        return is_subreaper.value

    before = adopts()
    with process.unwinding():
        assert adopts() == 1
    process.capture(["true"], {}, 5)
    assert adopts() == before
