from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import train

EXAMPLE = Path(train.__file__).parent
GOLDEN = Path(__file__).parent / "assets" / "losses.json"


def run(tmp_path: Path, folder: Path, *arguments: str) -> dict[str, Any]:
    """Train a small net on the coarse volume in this process, and return what it wrote to --json."""
    report = tmp_path / "report.json"
    report.unlink(missing_ok=True)
    small = ["--width", "2", "--depth", "2", "--device", "cpu", "--quiet"]
    status = train.main([*small, "--data", str(folder), "--json", str(report), *arguments])
    assert status == 0
    document: dict[str, Any] = json.loads(report.read_text())
    return document


def losses(report: dict[str, Any]) -> list[float]:
    return [step["loss"] for step in report["steps"]]


def test_three_steps_give_the_losses_of_record(tmp_path: Path, folder: Path) -> None:
    golden = json.loads(GOLDEN.read_text())
    report = run(tmp_path, folder, *golden["arguments"])
    # Another processor sums in another order, by its vector width and its threads, which moves a float32 loss in its
    # sixth or seventh digit, and each step multiplies that. A change of the mathematics moves the first three.
    assert losses(report) == pytest.approx(golden["losses"], rel=1e-3)
    assert report["parameters"] == golden["parameters"]


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(tmp_path: Path, folder: Path) -> None:
    first, again, other = (run(tmp_path, folder, "--steps", "2", "--seed", seed) for seed in ("3", "3", "4"))
    assert losses(first) == losses(again)
    assert first["sha256"] == again["sha256"]
    assert losses(first) != losses(other)
    assert first["sha256"]["gradients"] != other["sha256"]["gradients"]


def test_a_resumed_run_is_bit_for_bit_the_uninterrupted_one(tmp_path: Path, folder: Path) -> None:
    checkpoint = str(tmp_path / "state.pt")
    whole = run(tmp_path, folder, "--steps", "4")
    first = run(tmp_path, folder, "--steps", "2", "--checkpoint", checkpoint)
    torch.manual_seed(99)  # whatever the generator is at, the checkpoint has its own
    rest = run(tmp_path, folder, "--steps", "4", "--checkpoint", checkpoint, "--resume")
    assert losses(first) + losses(rest) == losses(whole)
    assert [step["step"] for step in rest["steps"]] == [3, 4]
    assert rest["sha256"] == whole["sha256"]
    assert rest["dice"] == whole["dice"]


def test_a_process_killed_in_the_middle_of_a_checkpoint_leaves_the_old_one(tmp_path: Path, folder: Path) -> None:
    checkpoint = tmp_path / "state.pt"
    run(tmp_path, folder, "--steps", "1", "--checkpoint", str(checkpoint))
    old = checkpoint.read_bytes()
    program = """if True:
        import io, os, signal, sys, torch, train
        whole = torch.save
        def half(state, file):
            buffer = io.BytesIO()
            whole(state, buffer)
            file.write(buffer.getvalue()[: buffer.tell() // 2])
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        torch.save = half
        torch.set_num_threads(1)
        train.main(sys.argv[1:])
    """
    arguments = ["--width=2", "--depth=2", "--device=cpu", "--quiet", "--steps=2", f"--data={folder}"]
    command = [sys.executable, "-c", program, *arguments, f"--checkpoint={checkpoint}", "--resume"]
    done = subprocess.run(command, cwd=EXAMPLE, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert checkpoint.read_bytes() == old
    resumed = run(tmp_path, folder, "--steps", "2", "--checkpoint", str(checkpoint), "--resume")
    assert [step["step"] for step in resumed["steps"]] == [2]


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one_and_nothing_beside_it(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "state.pt"
    run(tmp_path, folder, "--steps", "1", "--checkpoint", str(checkpoint))
    old, names = checkpoint.read_bytes(), set(os.listdir(tmp_path)) - {"report.json"}

    def full(state: object, file: Any) -> None:
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path, folder, "--steps", "2", "--checkpoint", str(checkpoint), "--resume")
    assert checkpoint.read_bytes() == old
    assert set(os.listdir(tmp_path)) == names


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--resume", "--checkpoint", "missing.pt"], ["no checkpoint at", "missing.pt"]),
        (["--resume", "--checkpoint", __file__], ["is no checkpoint of this example"]),
    ],
)
def test_a_checkpoint_that_is_none_is_one_clear_error(
    arguments: list[str], words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(["--device", "cpu", "--quiet", "--data", str(folder), *arguments]) == 1
    error = capsys.readouterr().err
    assert all(word in error for word in words)
    assert error.count("\n") == 1


def test_a_checkpoint_of_another_net_is_refused_by_name(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = str(tmp_path / "state.pt")
    run(tmp_path, folder, "--steps", "1", "--checkpoint", checkpoint)
    same = ["--depth=2", "--device=cpu", "--quiet", f"--data={folder}", f"--checkpoint={checkpoint}", "--resume"]
    assert train.main([*same, "--width=4"]) == 1
    assert "was written with --width 2, and 4 was asked for" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--resolution", "3"], "--resolution"),
        (["--width", "7"], "--width: '7': expected an even number"),
        (["--steps", "0"], "--steps: '0': expected a whole number, 1 or more"),
        (["--lr", "fast"], "--lr"),
        (["--resume"], "--resume: give the --checkpoint"),
        (["--memory-fraction", "1.5"], "--memory-fraction: '1.5': expected a share above 0 and at most 1"),
        (["--memory-fraction", "0.5", "--device", "cpu"], "--memory-fraction: bounds a GPU's memory"),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_allowed(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        train.main(arguments)
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err


def test_training_learns_and_writes_what_was_asked_for(tmp_path: Path, folder: Path) -> None:
    picture = tmp_path / "slices.png"
    report = run(tmp_path, folder, "--steps", "6", "--lr", "0.03", "--plot", str(picture))
    values = losses(report)
    assert values == sorted(values, reverse=True)
    assert values[-1] < 0.95 * values[0]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert all(step["seconds"] > 0 and step["peak"] > 1e7 and len(step["dice"]) == 4 for step in report["steps"])
    times = [seconds for seconds, _ in report["memory"]]
    assert times == sorted(times)
    assert times[0] == 0
    assert max(nbytes for _, nbytes in report["memory"]) <= report["steps"][-1]["peak"] * 1.01
    assert report["lms"] is None


def test_a_plain_run_never_loads_lms(tmp_path: Path, folder: Path) -> None:
    program = (
        "import sys, train; train.main(sys.argv[1:]); sys.exit(any(n.split('.')[0] == 'lms' for n in sys.modules))"
    )
    arguments = ["--width=2", "--depth=1", "--device=cpu", "--quiet", "--steps=1", f"--data={folder}"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], cwd=EXAMPLE, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_says_that_it_is_one_averaged_brain(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "one averaged brain" in text
    assert "not that the model generalises" in text
    assert "--lms-limit" in text


def test_a_wrong_option_of_lms_is_one_clear_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--width=2", "--depth=1", "--device=cpu", f"--data={folder}", "--lms", "--lms-limit", "5 bananas"]
    assert train.main(arguments) == 2
    error = capsys.readouterr().err
    assert "--lms-limit='5 bananas'" in error
    assert error.count("\n") == 1


def test_under_lms_every_bit_is_that_of_a_plain_run(tmp_path: Path, folder: Path) -> None:
    trace = tmp_path / "trace.json"
    plain = run(tmp_path, folder, "--steps", "3")
    managed = run(tmp_path, folder, "--steps", "3", "--lms", "--lms-budget", "0", "--trace", str(trace))
    assert losses(managed) == losses(plain)
    assert managed["sha256"] == plain["sha256"]
    assert managed["lms"]["swapped_out"] > managed["lms"]["saved"]  # three passes, each of which swapped
    assert managed["timeline"]["spans"]
    assert trace.stat().st_size > 1000
