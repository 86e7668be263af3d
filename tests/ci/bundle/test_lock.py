import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bundle import lock

ROOT = Path(__file__).parents[3]
HOLDER = """
import sys
from pathlib import Path
from bundle import lock
with lock.held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
    Path(sys.argv[1], "done").touch()
"""


def test_a_second_run_waits_for_the_first_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    first = subprocess.Popen(
        command, cwd=ROOT / "ci", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert first.stdout is not None
    assert first.stdin is not None
    assert first.stdout.readline() == "held\n"
    waiting = subprocess.Popen(command, cwd=ROOT / "ci", stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert waiting.stderr is not None
    assert f"another run (process {first.pid}) works in {tmp_path}" in waiting.stderr.readline()
    assert not (tmp_path / "done").exists()
    first.communicate("", timeout=60)
    waiting.communicate(timeout=60)
    assert (first.returncode, waiting.returncode) == (0, 0)
    with lock.held(tmp_path):
        assert (tmp_path / "done").exists()
    assert capsys.readouterr().err == ""


def test_a_lock_that_its_holder_removes_with_its_folder_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with lock.held(folder):
        waiting = subprocess.Popen(
            command,
            cwd=ROOT / "ci",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert waiting.stderr is not None
        assert "waiting for it" in waiting.stderr.readline()
        shutil.rmtree(folder)
    said, _ = waiting.communicate(timeout=60)
    assert (waiting.returncode, said) == (0, "held\n")
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "done"]


def test_readers_share_a_lock(tmp_path: Path) -> None:
    with lock.held(tmp_path, shared=True), lock.held(tmp_path, shared=True):
        assert (tmp_path / ".lock").read_text() == ""


def test_a_lock_that_was_released_names_nobody(tmp_path: Path) -> None:
    with lock.held(tmp_path):
        assert (tmp_path / ".lock").read_text() == str(os.getpid())
    assert (tmp_path / ".lock").read_text() == ""


def test_the_lock_of_a_run_that_was_killed_is_free(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT / "ci", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        first.kill()
    with lock.held(tmp_path):
        pass
