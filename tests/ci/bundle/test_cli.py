import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from small_channel import PLATFORM, Small

from bundle import base, explicit, lock, mirror, stand_in
from bundle.cli import main
from bundle.errors import ToolError
from bundle.folders import Folders

ROOT = Path(__file__).parents[3]


def test_help_says_what_each_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for command in ("channel", "env", "mirror", "render", "bench"):
        assert f"\n    {command} " in shown


def test_it_runs_as_make_calls_it() -> None:
    command = [sys.executable, "-m", "bundle", "render", "recipes/lms/meta.yaml"]
    variables = os.environ | {"PYTHONPATH": "ci:recipes/bascule-tools/src"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=True, timeout=60)
    assert yaml.safe_load(done.stdout)["package"]["name"] == "lms"


def test_an_error_is_one_line_with_the_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "meta.yaml"
    path.write_text("pakage:\n  name: x\n")
    assert main(["--out", str(tmp_path), "render", str(path)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"bundle: error: {path}:1: 'pakage' is no key of a recipe here")


def test_an_environment_before_there_is_a_channel_says_what_makes_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path), "env", "pytorch"]) == 1
    assert "run `make channel` first" in capsys.readouterr().err


def test_an_environment_that_is_not_there_is_answered_with_those_that_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path), "env", "pytroch"]) == 1
    assert "there are all, base, pytorch, snapml, tensorflow" in capsys.readouterr().err


def test_the_bench_does_not_empty_the_folder_of_the_channel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 1
    assert "name one of its own" in capsys.readouterr().err


@pytest.mark.timeout(600)  # it may make the small channel
def test_folders_with_files_of_others_are_left_alone(
    small: Small, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    (home / "envs").mkdir(parents=True)
    (home / "envs/mine").write_text("dear to me")
    commands = [
        ["--out", str(home), "bench"],
        ["--out", str(out), "mirror", "base", "--target", str(home)],
        env(small, out, "--prefix", str(home)),
    ]
    for command in commands:
        assert main(command) == 1
        said = capsys.readouterr().err
        assert f"{home} " in said
        assert "name an empty or a new folder" in said
        assert [str(path.relative_to(home)) for path in sorted(home.rglob("*"))] == ["envs", "envs/mine"]


@pytest.fixture
def out(small: Small, tmp_path: Path) -> Path:
    """A folder as a run of `make channel` leaves it."""
    shutil.copytree(small.where.channel, tmp_path / "out/channel")
    (tmp_path / "out/bundle").mkdir()
    base.remember(small.base, Folders(small.where.tree, tmp_path / "out"))
    return tmp_path / "out"


def env(small: Small, out: Path, *more: str) -> list[str]:
    return ["--out", str(out), "env", str(small.where.tree / "envs/small.yaml"), "--no-smoke", *more]


@pytest.mark.timeout(600)  # it may make the small channel
def test_a_lock_file_is_of_a_real_channel_and_never_of_the_stand_in(
    small: Small, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = str(out.parent / "elsewhere")
    shutil.copytree(small.base.channels[0].removeprefix("file://").replace("%20", " "), elsewhere)
    (Path(elsewhere) / stand_in.MARK).unlink()  # as a channel of real packages is
    locked = out / f"envs/small-{PLATFORM}.lock.txt"
    assert main(env(small, out, "--base", elsewhere)) == 0
    assert f"{locked} names every package" in capsys.readouterr().err
    head, mark, *lines = locked.read_text().splitlines()
    assert (head[0], mark) == ("#", "@EXPLICIT")
    assert [line.rpartition("/")[2].partition("-")[0] for line in lines] == ["python", "bascule", "small"]
    assert main(env(small, out)) == 0
    assert not locked.exists()
    (Path(elsewhere) / stand_in.MARK).touch()
    assert main(env(small, out, "--base", elsewhere)) == 0
    assert not locked.exists()


@pytest.mark.timeout(600)  # it may make the small channel
def test_a_lock_file_that_cannot_be_made_takes_nothing_from_the_environment(
    small: Small, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_md5(*_: object) -> None:
        raise ToolError("python has no MD5 in its channel's index")

    monkeypatch.setattr(explicit, "write", no_md5)
    monkeypatch.setattr(base.Base, "is_stand_in", False)
    assert main(env(small, out)) == 0
    assert "no lock file was made: python has no MD5" in capsys.readouterr().err
    assert (out / "envs/small.cdx.json").exists()


@pytest.mark.timeout(600)  # it may make the small channel
def test_a_framework_that_the_stand_in_lacks_comes_with_the_command_that_adds_it(
    small: Small, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    for spec, says in (("tensorflow", True), ("bascule-tools >=7", False)):
        path.write_text(f"{(small.where.tree / 'envs/small.yaml').read_text()}  - {spec}\n")
        assert main(["--out", str(out), "env", str(path)]) == 1
        said = capsys.readouterr().err
        assert "no set of packages has" in said
        assert ('and not tensorflow: `make channel FRAMEWORKS="pytorch tensorflow"`' in said) == says


@pytest.mark.parametrize("name", ["bundle.json", ".lock", "SHA256SUMS"])
def test_a_folder_is_not_taken_for_ours_by_a_name_that_others_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).touch()
    assert main(["--out", str(tmp_path / "mine"), "bench"]) == 1
    assert "name an empty or a new folder" in capsys.readouterr().err
    with pytest.raises(ToolError, match="name an empty or a new folder"):
        mirror.claim(tmp_path / "mine", Folders(tmp_path, tmp_path / "out"), tar=True)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == [name]


@pytest.mark.parametrize("name", ["", "channel", "channel/noarch", "bundle/new", "stand-in"])
def test_a_mirror_is_not_written_over_what_it_is_made_of(tmp_path: Path, name: str) -> None:
    with pytest.raises(ToolError, match="is no place for a mirror"):
        mirror.claim(tmp_path / "out" / name, Folders(tmp_path, tmp_path / "out"), tar=True)
    assert not (tmp_path / "out").exists()


def begun(*arguments: str) -> subprocess.Popen[str]:
    variables = os.environ | {"PYTHONPATH": f"{ROOT}/ci:{ROOT}/recipes/bascule-tools/src"}
    command = [sys.executable, "-m", "bundle", *arguments]
    return subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def first_words(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.readline()


@pytest.mark.parametrize("command", [("channel", "--base", "stand-in"), ("mirror", "base")])
def test_a_second_run_waits_before_it_touches_anything(tmp_path: Path, command: tuple[str, ...]) -> None:
    folder = tmp_path / {"channel": "bundle", "mirror": "mirror"}[command[0]]
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle/base.json").write_text('{"name": "stand-in", "channels": []}')
    folder.mkdir(exist_ok=True)
    (folder / ".mirror").touch()
    with lock.held(folder), begun("--out", str(tmp_path), *command) as second:
        assert f"another run (process {os.getpid()}) works in {folder}" in first_words(second)
        second.kill()
    there = {path.name for path in tmp_path.rglob("*")}
    assert there <= {"bundle", "base.json", "mirror", ".mirror", ".lock", "channel", "stand-in"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["channel", "stand-in"])
def test_an_installation_waits_while_the_channel_is_published_or_the_stand_in_is_made(
    small: Small, out: Path, name: str
) -> None:
    with lock.held(out / name):
        second = begun(*env(small, out))
        assert f"another run (process {os.getpid()}) works in {out / name}" in first_words(second)
        assert not (out / "envs/small").exists()
    said, _ = second.communicate(timeout=100)
    assert second.returncode == 0, said


def test_make_says_where_all_goes_as_the_message_about_spaces_tells(tmp_path: Path) -> None:
    for target in ("channel", "env", "mirror", "image"):
        command = ["make", "--no-print-directory", "--dry-run", target, f"OUT={tmp_path}", "ARGS=--help"]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        called = shlex.split(said[-1])
        assert called[called.index("--out") + 1] == str(tmp_path)
        if target != "image":  # the bundle's is an option before the command
            assert called.index("--out") < called.index(target)


@pytest.mark.timeout(600)
def test_two_installations_at_once_take_turns(small: Small, out: Path) -> None:
    with lock.held(out / "envs"):
        second = begun(*env(small, out))
        assert f"another run (process {os.getpid()}) works in {out / 'envs'}" in first_words(second)
        assert not (out / "envs/small").exists()
    said, _ = second.communicate(timeout=100)
    assert second.returncode == 0, said
    assert (out / "envs/small/bin/bascule").exists()
