"""`lms tune`: what it refuses before anything runs, what each trial is given, and a whole search."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lms import cli
from lms.tune.cli import _bounds

PARAM = ["--param", "lr=uniform:0:1"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("LMS_LIMIT", "LMS_FRAC", "LMS_BUDGET", "LMS_TUNE_STORAGE"):
        monkeypatch.delenv(name, raising=False)
    Path("train.py").write_text("import torch\n")
    Path("objective.py").write_text(
        "import os, torch\nos.chdir('/')\ndef objective(trial):\n    return trial.suggest_float('x', 1, 2) ** 2\n"
    )


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["train.py"], "defines no objective(trial)"),
        (["--metric", "loss", "train.py"], "nothing to search"),
        ([*PARAM, "train.py"], "expected one of them"),
        ([*PARAM, "--metric", "a", "--metric-regex", "(.)", "train.py"], "expected one of them"),
        ([*PARAM, "--metric", "", "train.py"], "expected one of them"),
        ([*PARAM, "--metric", "a", "--memory", "1GB", "--limit", "1GB", "train.py"], "--memory and --limit"),
        (["objective.py", "--epochs"], "takes no arguments"),
        (["--ranks", "2", "objective.py"], "is one process"),
        (["--storage", "journal.log", "objective.py"], "no heartbeats"),
        (["--sampler", "best", "objective.py"], "unknown"),
        ([*PARAM, "--metric", "a", "missing.py"], "no such file"),
        ([*PARAM, "--metric", "a", "--logs", "train.py", "train.py"], "--logs='train.py': 'train.py' is not a folder"),
        ([*PARAM, "--metric", "a", "--logs", "/proc/a", "train.py"], "--logs='/proc/a': no file can be made"),
    ],
)
def test_wrong_usage_is_refused_in_one_line_before_a_study_is_made(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
    assert not list(Path().glob("*.db"))


@pytest.mark.parametrize(
    ("options", "each", "alone"),
    [
        ([], "--frac 0.45", "--frac 0.9"),
        (["--memory", "8GB"], "--limit 4000000000", "--limit 8000000000"),
        (["--memory", "8GB", "--ranks", "2"], "--limit 2000000000", "--limit 4000000000"),
        (["--limit", "1GB"], "--limit 1000000000", "--frac 0.9"),
        (["--frac", "0.3"], "--frac 0.3", "--frac 0.6"),
        (["--budget", "1GB"], "--budget 1000000000", "--budget 1000000000"),
    ],
)
def test_trials_share_the_memory_and_one_alone_has_all(options: list[str], each: str, alone: str) -> None:
    args = cli._parser().parse_args(["tune", "--at-once", "2", *options])
    assert [" ".join(bound) for bound in _bounds(args, cli.from_flags(args))] == [each, alone]


@pytest.mark.slow
def test_an_objective_is_searched_and_another_search_of_its_name_is_refused() -> None:
    lms = [sys.executable, "-m", "lms", "tune"]
    done = subprocess.run([*lms, "--trials", "2", "objective.py"], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "2 trials, 2 with a value\n\nbest: x=1." in done.stdout
    other = [
        *lms,
        "--study",
        "objective",
        "--storage",
        "sqlite:///objective.db",
        *PARAM,
        "--metric",
        "loss",
        "train.py",
    ]
    refused = subprocess.run(other, capture_output=True, text=True, timeout=110)
    assert refused.returncode == 2
    assert "another search has this name" in refused.stderr
