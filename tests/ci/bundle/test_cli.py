import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_channel import PLATFORM, Small

from bundle import base, process, stand_in
from bundle.cli import main
from bundle.folders import Folders

ROOT = Path(__file__).parents[3]
COMMANDS = ("channel", "env", "mirror")
WITH_CHANNEL = pytest.mark.timeout(600)  # it may make the small channel


def test_an_error_is_one_line_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in (
        ("pytorch", "run `make channel` first"),
        ("pytroch", "there are all, base, caffe, linear_models, pytorch, snapml, tensorflow, tune"),
    ):
        assert main(["--out", str(tmp_path), "env", name]) == 1
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1
        assert words in said[0]


@pytest.fixture
def out(small: Small, tmp_path: Path) -> Path:
    """A folder as a run of `make channel` leaves it."""
    shutil.copytree(small.where.channel, tmp_path / "out/channel")
    base.remember(small.base, Folders(small.where.tree, tmp_path / "out"))
    return tmp_path / "out"


def env(small: Small, out: Path, *more: str) -> list[str]:
    return ["--out", str(out), "env", str(small.where.tree / "envs/small.yaml"), "--no-smoke", *more]


@WITH_CHANNEL
def test_a_folder_with_files_of_others_is_left_alone(
    small: Small, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    for name in ("mine", ".lock", "SHA256SUMS"):  # names that others use, too
        (home / name).write_text("dear to me")
    assert main(env(small, out, "--prefix", str(home))) == 1
    assert "name an empty or a new folder" in capsys.readouterr().err
    assert sorted(path.name for path in home.rglob("*")) == [".lock", "SHA256SUMS", "mine"]


@WITH_CHANNEL
def test_a_lock_file_is_of_a_real_channel_and_never_of_the_stand_in(
    small: Small, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = str(out.parent / "elsewhere")
    shutil.copytree(small.base.address.removeprefix("file://").replace("%20", " "), elsewhere)
    (Path(elsewhere) / stand_in.MARK).unlink()  # as a channel of real packages is
    locked = out / f"envs/small-{PLATFORM}.lock.txt"
    assert main(env(small, out, "--base", elsewhere)) == 0
    assert f"{locked} names every package" in capsys.readouterr().err
    assert "@EXPLICIT" in locked.read_text()
    assert main(env(small, out)) == 0
    assert not locked.exists()


@WITH_CHANNEL
def test_a_framework_that_the_stand_in_lacks_comes_with_the_command_that_adds_it(
    small: Small, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    for spec, says in (("tensorflow", True), ("bascule-tools >=7", False)):
        path.write_text(f"{(small.where.tree / 'envs/small.yaml').read_text()}  - {spec}\n")
        assert main(["--out", str(out), "env", str(path)]) == 1
        said = capsys.readouterr().err
        assert "no set of packages has" in said
        assert ('`make channel BASE=stand-in FRAMEWORKS="tensorflow"`' in said) == says


@WITH_CHANNEL
def test_a_second_run_waits_before_it_touches_anything(small: Small, out: Path) -> None:
    variables = os.environ | {"PYTHONPATH": f"{ROOT}/ci:{ROOT}/recipes/bascule-tools/src"}
    command = [sys.executable, "-m", "bundle", *env(small, out)]
    with process.locked(out):
        second = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert second.stderr is not None
        assert f"another run (process {os.getpid()}) works in {out}" in second.stderr.readline()
        assert not (out / "envs").exists()
    said, _ = second.communicate(timeout=100)
    assert second.returncode == 0, said
    assert (out / "envs/small/bin/bascule").exists()
