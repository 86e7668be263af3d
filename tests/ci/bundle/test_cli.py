import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bundle.cli import main

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
