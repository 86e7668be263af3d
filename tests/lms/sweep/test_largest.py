"""`lms plan --largest`: the forecast, the runs that prove it, and what is refused."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lms
from lms import cli
from lms.core.trace import Access, Tensor
from lms.sweep import largest
from lms.sweep.largest import ROOM, Need, Range, at, parse_range
from lms.trace import Trace
from lms.tune.metric import Log

MB = 10**6
BASE, EACH = 300 * MB, 10 * MB  # the floor of a batch is BASE + batch * EACH


@pytest.mark.parametrize("text", ["batch", "batch=8", "batch=8..8", "batch=0..8", "batch=8..1", "=1..8", "batch=a..b"])
def test_what_is_no_range_is_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch")
    assert cli.main(["plan", "--limit", "1GB", "--largest", text, "train.py"]) == 2
    assert f"--largest={text!r}: expected NAME=LOW..HIGH" in capsys.readouterr().err


def test_a_range_may_be_written_as_the_scripts_flag() -> None:
    assert parse_range("--batch-size=1..512") == Range("batch-size", 1, 512)


def test_a_budget_and_tensorflow_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lms.command.find_spec", lambda name: name)
    for framework, options, said in (("torch", ["--budget", "0"], "a budget does not bound"), ("keras", [], "PyTorch")):
        Path("train.py").write_text(f"import {framework}")
        assert cli.main(["plan", *options, "--largest", "batch=1..8", "train.py"]) == 2
        assert said in capsys.readouterr().err


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 10**6), st.integers(0, 10**4), st.integers(0, 10**7))
def test_the_largest_is_the_last_whose_forecast_floor_leaves_room(
    low: int, more: int, base: int, each: int, limit: int
) -> None:
    one, other = (Need(value, base + value * each, 0) for value in (low, low + more))
    found = largest.largest(one, other, limit, 500)
    room = limit - int(ROOM * limit)
    assert found <= 500
    if found >= low:
        assert at(found, one, other).floor <= room
    if found < 500 and each:
        assert base + (found + 1) * each > room


class Machine:
    """`lms plan` and `lms run` of a script whose memory is linear in its batch, in place of `execute`."""

    def __init__(
        self,
        *,
        most: int,
        recorded: int = 512,
        more: Mapping[int, int] = MappingProxyType({}),
        first: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.most = most  # the largest batch that runs
        self.recorded = recorded  # the largest batch that can be recorded
        self.more = more  # bytes that were measured by chance, by batch
        self.first = first  # bytes that the first step needs beside the forecast, by batch
        self.commands: list[str] = []

    def __call__(self, words: list[str], log: Path, tick: Callable[[float], None]) -> tuple[int, Log]:
        """Leave a trace or figures."""
        tick(0.5)
        command = " ".join(words[3:])  # without `python -m lms`
        self.commands.append(re.sub(r"/\S+/", "", command))
        batch = int(re.findall(r"batch=(\d+)", command)[0])
        log.write_text("lms: error: it is too much")
        if words[3] == "plan" and batch > self.recorded:
            return 3, Log(log)
        if words[3] == "plan":
            other = BASE + batch * EACH + self.more.get(batch, 0)
            accesses = (Access("write", 0, 1.0, other), Access("read", 0, 1.0, other))
            trace = Trace((Tensor(MB, 2, let_go=1),), accesses, capacity=10**10, tail=1.0, tail_other=BASE)
            trace.save(words[words.index("--trace") + 1])
            return 0, Log(log)
        figures = {"steps": 5, "peak": BASE + batch * EACH + self.first.get(batch, 0), "step_time": 1.0}
        Path(words[words.index("--stats") + 1]).write_text(json.dumps(figures))
        return 0 if batch <= self.most else 3, Log(log)


@pytest.fixture
def find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import torch")

    def found(machine: Machine, *, limit: str = "1GB", values: str = "1..512") -> int:
        monkeypatch.setattr(largest, "execute", machine)
        return cli.main(["plan", "--limit", limit, "--largest", f"batch={values}", "train.py", "--epochs=1"])

    return found


def test_small_values_and_one_half_way_are_recorded_and_the_forecast_is_proven(
    find: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(most=512)
    assert find(machine) == 0
    recorded = [f"plan --limit 1GB --trace {value}.trace train.py --epochs=1 --batch={value}" for value in (1, 2, 33)]
    assert machine.commands == [*recorded, "run --limit 1GB --stats 67.json train.py --epochs=1 --batch=67"]
    *_, forecast, proven, command = capsys.readouterr().out.splitlines()
    assert forecast.startswith("batch=67: floor 971 MB, unswapped ")
    assert proven == "batch=67: proven by a run: peak 970 MB of 1 GB, 5 steps, 1 s each"
    assert command == "lms run --limit 1GB train.py --epochs=1 --batch=67"


def test_small_values_that_mislead_are_followed_by_larger_ones(find: Callable[..., int]) -> None:
    machine = Machine(most=512, more={2: 100 * MB})
    assert find(machine) == 0
    values = [int(re.findall(r"batch=(\d+)", command)[0]) for command in machine.commands]
    assert values == [1, 2, 3, 33, 67]


def test_a_value_that_fails_gives_way_to_a_smaller_one(
    find: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(most=55)
    assert find(machine) == 0
    tried = [int(re.findall(r"batch=(\d+)", command)[0]) for command in machine.commands if command.startswith("run")]
    assert tried == sorted(tried, reverse=True)
    assert tried[-1] <= 55 < tried[-2]
    assert "batch=67: failed: it is too much" in capsys.readouterr().out


def test_a_first_step_over_the_limit_proves_nothing(
    find: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert find(Machine(most=512, first={67: 60 * MB})) == 0
    told = capsys.readouterr().out
    assert "batch=67: failed: peak 1.03 GB of 1 GB, memory went over the limit in the first step\n" in told
    assert "batch=59: proven by a run: peak 890 MB of 1 GB" in told


def test_a_value_half_way_that_cannot_be_recorded_gives_way_to_smaller_ones(
    find: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(most=20, recorded=20)
    assert find(machine) == 0
    out = capsys.readouterr().out
    assert "batch=33 could not be recorded: it is too much" in out
    assert re.search(r"^batch=(19|20): proven", out, re.MULTILINE)


def test_what_nothing_proves_ends_with_the_limits_status(
    find: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(most=0)
    assert find(machine) == 3
    assert "no value was proven" in capsys.readouterr().out


def test_a_limit_below_the_smallest_values_floor_is_an_error(
    find: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert find(Machine(most=512), limit="305MB") == 3
    assert "is too low for batch=1, which needs 317 MB: its floor and 2% to spare" in capsys.readouterr().err


def test_the_range_bounds_what_is_tried(find: Callable[..., int]) -> None:
    machine = Machine(most=512)
    assert find(machine, limit="9GB", values="2..3") == 0
    assert [command.split()[-1] for command in machine.commands] == ["--batch=2", "--batch=3", "--batch=3"]


TRAIN = """
import sys

import torch

batch = int(sys.argv[1].removeprefix("--batch="))
layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(4)]
optimizer = torch.optim.SGD([one for layer in layers for one in layer.parameters()], lr=0.1)
for step in range(4):
    x = torch.randn(4096 * batch, 64)
    for layer in layers:
        x = layer(x)
    x.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_training_is_proven_to_stay_within_the_limit(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "lms", "plan", "--limit", "500MB", "--largest", "batch=4..256", "train.py"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LMS_")}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(Path(lms.__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    value, peak = re.findall(
        r"^batch=(\d+): proven by a run: peak (\d+) MB of 500 MB, 4 steps", done.stdout, re.MULTILINE
    )[0]
    assert int(value) > 8, "more than what was recorded first"
    assert 400 < int(peak) <= 502, "close to the limit"
