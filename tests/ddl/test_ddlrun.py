import os
import pwd
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddl import ddlrun
from ddl.launch.errors import CheckError, LaunchError


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = ddlrun.main(words)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_help_and_version_go_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "--help")
    assert (status, err) == (0, "")
    assert out.startswith("usage: ddlrun [OPTIONS] PROGRAM")
    assert run(capsys)[1] == out
    assert run(capsys, "--version")[1].startswith("ddlrun 0.")


def test_a_wrong_command_line_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "-np", "x", "prog")
    assert (status, out) == (2, "")
    hint = "; `ddlrun --help` explains each option\n"
    assert err == f"ddlrun: error: argument -np/-n: 'x': expected a whole number, 1 or more{hint}"


def test_a_program_that_is_not_there_is_named_before_anything_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "-H", "nowhere", "./no-such-program")
    assert status == 2
    assert err.startswith("ddlrun: error: PROGRAM './no-such-program': no such file")


@pytest.mark.parametrize("name", ["bench", "plan"])
def test_bench_and_plan_have_help_of_their_own(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, out, _ = run(capsys, name, "--help")
    assert status == 0
    assert out.startswith(f"usage: ddlrun {name}")


def test_each_failed_check_is_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: list[str]) -> int:
        raise CheckError("host a", "gone", ("host b", "gone too"))

    monkeypatch.setattr(ddlrun, "_dispatch", fail)
    assert run(capsys) == (3, "", "ddlrun: error: host a: gone\nddlrun: error: host b: gone too\n")


def written_to(stdout: int, *words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "ddl.ddlrun", *words], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60
    )
    return done.returncode, done.stderr


ANSWERS = pytest.mark.parametrize(
    "line", ["--version", "doctor", "plan minsky", "plan minsky --json", "plan --list", "plan --help"]
)


@ANSWERS
def test_an_answer_that_cannot_be_written_is_an_error(line: str) -> None:
    with open("/dev/full", "wb") as full:
        said = "ddlrun: error: stdout could not be written: No space left on device\n"
        assert written_to(full.fileno(), *line.split()) == (1, said)


@ANSWERS
def test_an_answer_that_is_read_no_further_is_enough(line: str) -> None:
    end, pipe = os.pipe()
    os.close(end)
    assert written_to(pipe, *line.split()) == (0, "")
    os.close(pipe)


def test_a_character_that_stdout_cannot_say_is_written_as_its_code() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    program = "from ddl.launch.console import show; show('1.00 \u00b1 6%')"
    assert subprocess.check_output([sys.executable, "-c", program], env=environment) == b"1.00 \\xb1 6%\n"


def test_without_home_it_is_the_one_that_the_system_knows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = os.path.expanduser("~" + pwd.getpwuid(os.getuid()).pw_name)
    monkeypatch.delenv("HOME")
    assert run(capsys, "--version")[0] == 0
    assert os.environ["HOME"] == known


def test_ctrl_c_ends_a_simulation_of_minutes_at_once() -> None:
    words = [sys.executable, "-m", "ddl.ddlrun", "plan", "--hosts", "1048576"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as plan:
        deadline = time.monotonic() + 30
        seen = False  # Python's handler; libddl simulates once it is gone
        while time.monotonic() < deadline and not (seen and not catches_ctrl_c(plan.pid)):
            seen = seen or catches_ctrl_c(plan.pid)
            time.sleep(0.01)
        plan.send_signal(signal.SIGINT)
        _, said = plan.communicate(timeout=10)
    assert (plan.returncode, said) == (-signal.SIGINT, "")


def catches_ctrl_c(process: int) -> bool:
    (mask,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{process}/status").read_text())
    return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)


def test_ctrl_c_is_no_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(ddlrun, "_dispatch", interrupted)
    assert run(capsys) == (130, "", "")


def test_every_error_has_a_status_that_is_not_success() -> None:
    kinds = [LaunchError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert len(kinds) > 2
    assert all(kind.exit_status > 0 for kind in kinds)
