"""`lms sweep`: what it refuses, and whole sweeps."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import lms
from lms import cli
from lms.sweep import cli as sweep_cli
from lms.target import Target
from lms.torch import launcher
from lms.tune.metric import Log

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
pytest.importorskip("torch")

TRAIN = """
import sys

import torch
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh()) for _ in range(8)]
optimizer = torch.optim.SGD([one for layer in layers for one in layer.parameters()], lr=0.1)
for step in range(6):
    x = torch.randn(4096, 256)
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False) if "--checkpoint" in sys.argv else layer(x)
    x.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--limits", "200%", "script.py"], "expected a share of 0% to 100%"),
        (["--beside", "none.py --checkpoint", "script.py"], "SCRIPT='none.py': no such file"),
        (["--beside", "'", "script.py"], '--beside="\'": No closing quotation'),
        (["--beside", "fit.py", "script.py"], "SCRIPT='fit.py': it trains with TensorFlow"),
        (["-o", "script.py", "script.py"], "cannot be written to"),
        ([], "SCRIPT: none given"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(
    argv: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep_cli, "execute", lambda *_: pytest.fail("it ran"))
    Path("script.py").write_text("import torch")
    Path("fit.py").write_text("import keras")
    assert cli.main(["sweep", *argv]) == 2
    assert said in capsys.readouterr().err


STEPS = """
import torch

weight = torch.ones(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(3):
    weight.square().sum().backward()
    optimizer.step()
raise SystemExit(7)
"""


def test_plain_leaves_steps_peak_and_step_time_though_the_script_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(STEPS)
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with pytest.raises(SystemExit):
        launcher.plain(Target(str(script)), tmp_path / "stats.json")
    found = json.loads((tmp_path / "stats.json").read_text())
    assert found["steps"] == 3
    assert found["step_time"] > 0
    assert found["peak"] > 50_000_000, "PyTorch alone needs more"


class Runs:
    """Runs that take no time: their command lines, in place of `execute`."""

    def __init__(self, *, interrupted_at: int = 99) -> None:
        self.commands: list[list[str]] = []
        self.interrupted_at = interrupted_at

    def __call__(self, words: list[str], log: Path, tick: Callable[[float], None]) -> tuple[int, Log]:
        """Leave figures, and 200 MB as the saved bytes."""
        if len(self.commands) == self.interrupted_at:
            raise KeyboardInterrupt
        self.commands.append(words[2:])  # without `python -m`
        tick(0.5)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("the last line")
        if "plan" in words:
            Path(words[words.index("--json") + 1]).write_text('{"saved": 200000000}')
        else:
            stats = words[words.index("--stats") + 1] if "--stats" in words else words[3]
            Path(stats).write_text('{"steps": 9, "peak": 1000, "step_time": 0.5}')
        return 0, Log(log)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import torch")
    return tmp_path / "train.sweep"


def test_each_limit_is_a_run_of_lms_run_with_its_options(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs()
    monkeypatch.setattr(sweep_cli, "execute", runs)
    options = ["--limits", "75%,12GB", "--min-size", "1MB", "--verify", "--beside", "train.py --checkpoint"]
    assert cli.main(["sweep", *options, "train.py", "x y"]) == 0
    passed = ["--min-size", "1MB", "--verify"]
    assert runs.commands == [
        ["lms.sweep.plain", f"{script}/plain.json", "train.py", "x y"],
        ["lms", "plan", *passed, "--json", f"{script}/plan.json", "train.py", "x y"],
        ["lms", "run", "--budget", "150000000", *passed, "--stats", f"{script}/75%.json", "train.py", "x y"],
        ["lms", "run", "--limit", "12000000000", *passed, "--stats", f"{script}/12GB.json", "train.py", "x y"],
        ["lms.sweep.plain", f"{script}/beside1.json", "train.py", "--checkpoint"],
    ]
    assert [run["peak"] for run in json.loads((script / "sweep.json").read_text())["runs"]] == [1000] * 4


def test_sizes_alone_need_no_plan(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs()
    monkeypatch.setattr(sweep_cli, "execute", runs)
    assert cli.main(["sweep", "--limits", "12GB", "-o", str(script / "deep"), "-m", "package.train"]) == 0
    assert [command[-2:] for command in runs.commands] == [["-m", "package.train"]] * 2


def test_an_interrupt_prints_and_writes_what_there_is(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep_cli, "execute", Runs(interrupted_at=3))
    assert cli.main(["sweep", "train.py"]) == 130
    out, err = capsys.readouterr()
    assert "lms: interrupted: 3 of 6 runs are over\n" in err
    header, plain, managed = out.splitlines()
    assert (header.split()[0], plain.split()[0], managed.split()[:2]) == ("run", "plain", ["LMS", "75%"])
    assert "LMS 75%" in (script / "sweep.html").read_text()


def test_what_runs_is_said_before_the_first_run_is_over(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep_cli, "execute", Runs(interrupted_at=0))
    assert cli.main(["sweep", "--limits", "75%,12GB", "--beside", "train.py x", "train.py"]) == 130
    first, last = capsys.readouterr().err.splitlines()
    runs = "plain, lms plan, LMS 75%, LMS 12GB, train.py x"
    assert first == f"lms: runs of train.py, one after another: {runs}; their logs are in {script}"
    assert last == "lms: interrupted: 0 of 5 runs are over"


def test_without_the_saved_bytes_a_share_says_why_and_a_size_runs(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs()
    monkeypatch.setattr(
        sweep_cli, "execute", lambda words, log, tick: (4 if "plan" in words else 0, runs(words, log, tick)[1])
    )
    assert cli.main(["sweep", "--limits", "50%,12GB", "train.py"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("the saved bytes are not known: exit status 4: the last line")
    assert lines[3].startswith("LMS 12GB  limit 12 GB  1 KB")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_runs_the_script_plain_under_each_limit_and_beside(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "lms", "sweep", "--limits", "50%,0%,1MB", "--beside", "train.py --checkpoint"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LMS_")}
    done = subprocess.run(
        [*command, "train.py"], capture_output=True, text=True, check=False, cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(Path(lms.__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "train.sweep" / "sweep.json").read_text())
    runs = {run["name"]: run for run in document["runs"]}
    assert list(runs) == ["plain", "LMS 50%", "LMS 0%", "LMS 1MB", "train.py --checkpoint"]
    assert 0 < runs["LMS 50%"]["moved"] < runs["LMS 0%"]["moved"]
    assert runs["LMS 1MB"]["peak"] is None
    assert re.search("below the floor", runs["LMS 1MB"]["note"])
    assert {run["steps"] for run in document["runs"] if run["peak"]} == {6}
    assert runs["LMS 0%"]["peak"] < runs["plain"]["peak"]
    assert done.stdout.splitlines()[0].startswith("run ")
    assert "<svg" in (tmp_path / "train.sweep" / "sweep.html").read_text()
