"""Training steps: what their times mean, and the whole in small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runs import Goodput, Run
from steps import ALONE, Steps, faults, judge, rows
from training import ALL, Training, report, verdicts

ROOT = Path(__file__).parents[3]
LOSSES = [2.0, 1.0]


def steps(
    same_bits: bool = True, losses: dict[str, list[float]] | None = None, **seconds: list[float]
) -> dict[str, Steps]:
    seconds = {"ddl": [4.0, 4.0, 4.0], "gloo": [6.0, 6.0, 6.0], ALONE: [1.0, 1.0, 1.0]} | seconds
    its = losses or {}
    return {name: Steps(name, its.get(name, LOSSES), same_bits, [], taken) for name, taken in seconds.items()}


def test_communication_is_what_a_step_takes_beyond_the_same_rounds_step_without_it() -> None:
    found = steps(ddl=[4.0, 9.0, 5.0], gloo=[6.0, 11.0, 8.0], **{ALONE: [1.0, 6.0, 1.0]})
    ours, theirs = rows(found, bound=2.0)
    assert (ours.name, ours.step, ours.communication, ours.ratio) == ("ddl", 5.0, 3.0, 1.0)
    assert (theirs.communication, theirs.ratio) == (5.0, pytest.approx(5 / 3))  # of 5/3, 5/3 and 7/4
    assert ours.over_floor == 2.0  # of 4/2, 9/6 and 5/2


def test_what_cannot_be_seen_beside_the_computation_has_no_ratio() -> None:
    found = steps(ddl=[1.02, 0.99, 1.01], gloo=[1.2, 1.2, 1.2])
    assert [row.ratio for row in rows(found, bound=0.0)] == [None, None]
    (first, _) = judge(found, bound=0.5)
    assert (first.reached, first.why) == (None, "there is none to be seen")


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ([3.0, 3.0, 3.0], ["reached    communication of gloo over ours: 2.500", "reached    step over"]),
        ([5.0, 5.0, 5.0], ["MISSED     communication of gloo over ours: 1.250", "MISSED     step over"]),
    ],
)
def test_verdicts_are_of_both_figures(ours: list[float], words: list[str]) -> None:
    said = judge(steps(ddl=ours), bound=2.8)
    assert all(str(one).startswith(word) for one, word in zip(said, words, strict=True))


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (steps(losses={"gloo": [2.0, 1.001]}), "gloo: losses"),
        (steps(losses={"gloo": [2.0, float("nan")]}), "gloo: losses"),
        (steps(losses={ALONE: [3.0, 1.0]}), "no_sync: the first loss is 3.0"),
        (steps(same_bits=False), "ddl: the ranks' parameters have different bits"),
        (steps(losses={"ddl": [2.0, 2.0], "gloo": [2.0, 2.0]}), "ddl: it learns nothing"),
    ],
)
def test_a_contestant_that_computes_something_else_is_named(found: dict[str, Steps], word: str) -> None:
    assert faults(found)[0].startswith(word)


def test_what_one_rank_does_alone_need_not_be_the_same_elsewhere() -> None:
    found = steps(losses={"gloo": [2.0, 1.00001], ALONE: [2.0, 0.1]})
    found[ALONE] = Steps(ALONE, [2.0, 0.1], False, [], found[ALONE].seconds)
    assert faults(found) == []


def test_the_bound_is_that_of_all_gradients_over_the_calibrated_links() -> None:
    record: dict[str, object] = {"bytes": 44_000_000, "steps": [vars(one) for one in steps().values()]}
    link = Goodput(link=24e6, uplink=12e6)
    shaped = Training("x", "x", racks=(2, 2), ranks=1, judged=True)
    made = Run(shaped, [record], link, link)
    assert made.bound(44_000_000) == pytest.approx(44 / 12)  # 2 (2-1)/2 of them through a rack's uplink
    assert verdicts(made)[0].value == pytest.approx(5 / 3)
    assert any("1.67" in line for line in report(made))
    here = Run(Training("x", "x", racks=(), ranks=2), [record])
    assert (here.bound(44_000_000), verdicts(here)) == (0.0, [])


def test_each_contestant_follows_each_other_equally_often() -> None:
    assert all(one.rounds % (2 * (len(one.contestants) + 1)) == 0 for one in ALL)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.usefixtures("needs_testbed")
@pytest.mark.timeout(600)
def test_the_whole_runs_in_small(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "ddl" / "bench" / "training.py", "--quick", "--output", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "training.json").read_text())
    assert [run["scenario"]["name"] for run in found["runs"]] == [one.name for one in ALL]
    for run in found["runs"]:
        (record,) = run["records"]
        assert [one["name"] for one in record["steps"]] == ["ddl", "gloo", ALONE]
        assert all(len(one["seconds"]) == 2 and min(one["seconds"]) > 0 for one in record["steps"])
    assert "bound of one allreduce of all gradients" in done.stdout
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == ["training_host.svg", "training_racks.svg"]
