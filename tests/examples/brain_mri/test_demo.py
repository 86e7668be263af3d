from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import demo
import pytest
from pictures import Report


def report(held: int = 200) -> Report:
    """What train.py would write for two steps, under LMS."""
    step: dict[str, Any] = {"dice": [0.9, 0.1, 0.5, 0.5], "seconds": 2.0, "peak": 1000}
    return {
        "device": "cpu",
        "parameters": 7,
        "steps": [{"step": 1, "loss": 2.5, **step}, {"step": 2, "loss": 1.25, **step}],  # type: ignore[typeddict-item]
        "sha256": {"parameters": "aa", "gradients": "bb"},
        "memory": [(0.0, 900), (1.0, 1000)],
        "mapped_peak": 1500,
        "lms": {"held_peak": held, "largest": 50, "peak": 1100, "last_out": 600, "last_in": 600},
        "timeline": None,
    }


def new(out: Path) -> demo.Demo:
    return demo.Demo(steps=2, resolution=4, width=4, device="cpu", out=out)


def verdicts(subject: demo.Demo) -> list[str]:
    return [claim.verdict for claim in subject.claims]


def test_equal_runs_are_identical_and_a_quarter_of_the_saved_bytes_may_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subject = new(tmp_path)
    subject._compare(report(), report(), saved=800)
    assert "identical: yes" in capsys.readouterr().out
    assert verdicts(subject) == ["ok", "ok"]


@pytest.mark.parametrize("difference", ["loss", "parameters", "gradients"])
def test_one_bit_of_a_loss_a_parameter_or_a_gradient_fails_the_claim(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], difference: str
) -> None:
    other = copy.deepcopy(report())
    if difference == "loss":
        other["steps"][1]["loss"] += 2.0**-52
    else:
        other["sha256"][difference] = "ab"
    subject = new(tmp_path)
    subject._compare(report(), other, saved=800)
    assert "identical: NO" in capsys.readouterr().out
    assert verdicts(subject) == ["FAILED", "ok"]


def test_more_than_a_quarter_of_the_saved_bytes_fails_the_claim(tmp_path: Path) -> None:
    subject = new(tmp_path)
    subject._compare(report(), report(held=201), saved=800)
    assert verdicts(subject) == ["ok", "FAILED"]


def under_the_cap(monkeypatch: pytest.MonkeyPatch, out: Path, **attempts: demo.Attempt) -> demo.Demo:
    """A demo whose runs under the cap end as given."""
    subject = new(out)
    monkeypatch.setattr(subject, "_attempt", lambda name, *_, **__: attempts[name])
    monkeypatch.setattr(demo.cap, "method", lambda: "cgroup v2")
    monkeypatch.setattr(demo.cap, "can_swap", lambda: None if "swap" in attempts else "switching swap on takes root")
    subject._prove(report(), report(), budget=200)
    return subject


KILLED = demo.Attempt(finished=False, killed=True, ending="out of memory, in step 1", losses=[], seconds=[])
DONE = demo.Attempt(finished=True, killed=False, ending="finished", losses=[2.5, 1.25], seconds=[3.0, 2.0])
SLOW = demo.Attempt(finished=True, killed=False, ending="finished", losses=[2.5, 1.25], seconds=[3.0, 7.0])


def test_the_proof_holds_when_plain_is_killed_and_lms_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = under_the_cap(monkeypatch, tmp_path, plain=KILLED, lms=DONE, swap=SLOW)
    assert verdicts(subject) == ["ok", "ok", "ok"]
    assert "3.50 x the 2.0 s of LMS" in subject.claims[-1].text


def test_what_is_not_permitted_here_is_skipped_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = under_the_cap(monkeypatch, tmp_path, plain=KILLED, lms=DONE)
    assert verdicts(subject) == ["ok", "ok", "skipped"]
    assert "switching swap on takes root" in subject.claims[-1].text


def test_swap_that_is_too_slow_is_no_failure_of_lms_but_swap_that_breaks_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = demo.Attempt(False, killed=False, ending="stopped by us after 99 s", losses=[], seconds=[], late=True)
    subject = under_the_cap(monkeypatch, tmp_path, plain=KILLED, lms=DONE, swap=late)
    assert verdicts(subject) == ["ok", "ok", "skipped"]
    assert "stopped by us after 99 s" in subject.claims[-1].text
    broken = demo.Attempt(False, killed=False, ending="exit status 1", losses=[], seconds=[])
    assert verdicts(under_the_cap(monkeypatch, tmp_path, plain=KILLED, lms=DONE, swap=broken))[-1] == "FAILED"


def test_the_proof_fails_when_plain_fits_or_ends_for_another_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = demo.Attempt(finished=False, killed=False, ending="exit status 1", losses=[], seconds=[])
    for plain in (DONE, broken):
        assert verdicts(under_the_cap(monkeypatch, tmp_path, plain=plain, lms=DONE))[0] == "FAILED"


def test_the_proof_fails_when_lms_is_killed_or_its_loss_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = demo.Attempt(finished=True, killed=False, ending="finished", losses=[2.5, 1.3], seconds=[3.0, 2.0])
    for managed in (KILLED, other):
        assert verdicts(under_the_cap(monkeypatch, tmp_path, plain=KILLED, lms=managed))[1] == "FAILED"


def test_a_slow_machine_runs_fewer_steps_under_the_cap_and_two_at_least(tmp_path: Path) -> None:
    subject = demo.Demo(steps=4, resolution=4, width=4, device="cpu", out=tmp_path)
    assert subject._affordable(1.0) == 4
    assert subject._affordable(35.0) in (2, 3)
    assert subject._affordable(1000.0) == 2


def test_the_steps_of_a_run_that_was_killed_are_read_from_its_output() -> None:
    assert demo._STEP.findall("step 1 loss 2.5 seconds 3.00\nstep 2 loss nan seconds 1.25\nstep 3 lo") == [
        ("1", "2.5", "3.00"),
        ("2", "nan", "1.25"),
    ]


def test_the_table_shows_both_runs_side_by_side() -> None:
    text = demo._table(report(), report(), {"saved": 800, "floor": 700})
    for words in ("peak memory", "floor", "moved out", "step time", "loss after step 2", "1.25"):
        assert words in text


@pytest.mark.parametrize(("held", "status"), [(True, 0), (False, 1)])
def test_the_exit_status_says_whether_every_claim_held(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, held: bool, status: int
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo.py", "--out", str(tmp_path)])
    monkeypatch.setattr(demo.Demo, "run", lambda self: held)
    assert demo.main() == status


def test_a_run_that_does_not_end_well_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: demo.Demo) -> None:
        demo._must(subprocess.CompletedProcess([], 1, "", "train.py: no brain\n"), "plain")

    monkeypatch.setattr(sys, "argv", ["demo.py", "--out", str(tmp_path)])
    monkeypatch.setattr(demo.Demo, "_prepare", fail)
    assert demo.main() == 1
    assert capsys.readouterr().err == "demo.py: plain ended with exit status 1\ntrain.py: no brain\n"


def test_files_of_other_runs_are_removed_and_no_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("plain.json", "memory.png", "notes.txt"):
        (tmp_path / name).write_text("old")

    def stop(self: demo.Demo) -> None:
        raise demo.DemoError("far enough")

    monkeypatch.setattr(demo.Demo, "_prepare", stop)
    with pytest.raises(demo.DemoError):
        new(tmp_path).run()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_claim_holds_on_this_machine(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(demo.__file__)), "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "identical: yes" in done.stdout
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "report.html").read_text()
