import os
import subprocess
import sys

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
