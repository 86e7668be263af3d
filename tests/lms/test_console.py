"""One line at a time, on stderr."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from lms.console import say, warn


def test_a_text_is_one_line_on_stderr_and_stdout_stays_the_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    say("  two lines\n    and\ta tab ")
    assert capsys.readouterr() == ("", "lms: two lines and a tab\n")


def test_a_warning_says_that_it_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    warn("--json: without\neffect")
    assert capsys.readouterr() == ("", "lms: warning: --json: without effect\n")


def test_of_several_ranks_each_says_which_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    say("here")
    assert capsys.readouterr() == ("", "lms: rank 1: here\n")


def test_a_line_is_out_at_once_though_a_process_that_is_killed_flushes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    below = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(below)))  # type: ignore[type-var]
    say("now")
    assert below.getvalue() == b"lms: now\n"


def test_without_stderr_nothing_is_said_on_stdout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    say("nobody hears it")
    assert capsys.readouterr().out == ""


_CHILD = """
import os, sys
open(sys.argv[1], "w").write(" ".join(os.readlink(f"/proc/self/fd/{number}") for number in range(3)))
"""
_DAEMON = """
import subprocess, sys
from lms import cli
try:
    cli.main(["--version"])
except SystemExit:
    subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]], check=True)
"""


def test_a_command_and_its_children_have_the_streams_that_a_daemon_has_closed(tmp_path: Path) -> None:
    found = tmp_path / "found"
    closed = 'exec "$0" -c "$1" "$2" "$3" <&- >&- 2>&-'
    subprocess.run(["sh", "-c", closed, sys.executable, _DAEMON, _CHILD, found], check=True)
    assert found.read_text() == "/dev/null /dev/null /dev/null"


def test_a_listener_that_has_gone_and_a_full_disk_end_nothing() -> None:
    for where in ("2>/dev/full", "2>&1 >&3 | true"):
        code = "import time, lms.console as c; time.sleep(0.3); [c.say('x') for _ in range(3)]; print('done')"
        done = subprocess.run(
            ["bash", "-c", f'set -o pipefail; exec 3>&1; "$0" -c "$1" {where}', sys.executable, code],
            stdout=subprocess.PIPE,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, b"done\n")
