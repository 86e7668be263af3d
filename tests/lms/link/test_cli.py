"""`lms link compare`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lms import cli
from lms.core.trace import Access, Tensor
from lms.link import catalogue
from lms.trace import Trace

MB = 10**6


@pytest.fixture
def trace(tmp_path: Path) -> str:
    accesses = [Access("write", at, 1.0, 300 * MB) for at in range(8)]
    accesses += [Access("read", at, 1.0, 300 * MB) for at in reversed(range(8))]
    tensors = tuple(Tensor(100 * MB, 16 - at, let_go=at + 1) for at in range(8))
    Trace(tensors, tuple(accesses), capacity=10**9, tail=1.0, tail_other=300 * MB).save(tmp_path / "step.json")
    return str(tmp_path / "step.json")


def run(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> str:
    assert cli.main(["link", "compare", *argv]) == status
    out, err = capsys.readouterr()
    return err if status else out


def test_links_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "ac922-4", "pcie-3").splitlines()
    line = next(line for line in lines if line.startswith("GPU to host memory") and " out " in line)
    assert line.split()[-1] == "5.67"
    assert "(published)" in line


def test_a_step_is_priced_on_both(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "c.json"
    text = run(capsys, "ac922-4", "pcie-3", "--trace", trace, "--speedup", "2000", "--json", str(output))
    assert "its computation 2000 times as fast as recorded, over GPU to host memory" in text
    assert "largest batch, times the recorded one" in text
    one, other = json.loads(output.read_text())["step"]
    assert one["shares"][-1]["seconds"] < other["shares"][-1]["seconds"]
    assert one["shares"][-1]["stall"] < other["shares"][-1]["stall"]


def test_a_pass_is_called_one(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the optimizer's step and the waiting between passes, which docs/lms.md counts for a step."""
    text = run(capsys, "ac922-4", "pcie-3", "--trace", trace)
    assert "\none pass of the recorded step, over GPU to host memory\n" in text
    assert "A: pass  A: waiting" in text
    assert "A: step" not in text


def test_figures_are_plain_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = (Tensor(1000, 2, let_go=1),)
    Trace(tensors, (Access("write", 0, 1e-3, 0), Access("read", 0, 1e-3, 0)), capacity=10**9).save(tmp_path / "a.json")
    text = run(capsys, "ac922-4", "pcie-3", "--trace", str(tmp_path / "a.json"), "--speedup", "1000000")
    assert "its computation 1000000 times as fast" in text
    assert re.search(r"\nnothing swapped +4096 x  4096 x\n", text)
    assert not re.search(r"\de[+-]\d", text)


def test_what_is_compared_is_printed_though_its_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["link", "compare", "ac922-4", "pcie-3", "--json", "/dev/full"]) == 1
    out, err = capsys.readouterr()
    assert "GPU to host memory" in out
    assert "--json='/dev/full': not written: No space left on device" in err


def test_a_terminal_without_a_letter_gets_a_question_mark(tmp_path: Path) -> None:
    odd = tmp_path / "odd.json"
    odd.write_text(replace(catalogue.load("gh200"), name="Größe").to_json())
    command = [sys.executable, "-m", "lms", "link", "compare", str(odd), "pcie-3"]
    done = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=True)
    assert done.stdout.startswith(b"Gr??e: described")


@pytest.mark.parametrize("suffix", ["svg", "png"])
@pytest.mark.parametrize("with_trace", [True, False])
def test_it_is_drawn(
    trace: str, suffix: str, with_trace: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"c.{suffix}"
    more = ["--trace", trace] if with_trace else []
    run(capsys, "ac922-4", "pcie-3", *more, "--picture", str(path))
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") if suffix == "png" else b"68 GB/s, published" in content


def test_the_same_comparison_is_the_same_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        run(capsys, "ac922-4", "pcie-3", "--picture", str(tmp_path / name))
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("ac922-4", "nowhere.json"), "No such file"),
        (("ac922-4", "pcie-3", "--speedup", "2"), "without effect without --trace"),
        (("ac922-4", "pcie-3", "--trace", "none.json"), "TRACE='none.json'"),
        (("ac922-4", "pcie-3", "--picture", "a.gif"), "ends with .png or .svg"),
        (("ac922-4", "pcie-3", "--json", "/"), "a folder"),
    ],
)
def test_what_is_wrong_is_named(argv: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in run(capsys, *argv, status=2)


@pytest.mark.parametrize("bad", ["0", "-1", "x", "inf", "nan", "1e7", "1e-300"])
def test_a_speedup_that_is_none_is_refused(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["link", "compare", "ac922-4", "pcie-3", f"--speedup={bad}"])
    assert exit_.value.code == 2
    assert "expected a number from 0.000001 to 1000000" in capsys.readouterr().err


def test_a_name_with_dollar_signs_is_no_formula_in_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    odd = tmp_path / "odd.json"
    odd.write_text(replace(catalogue.load("gh200"), name="$x_$ at 2$").to_json())
    assert cli.main(["link", "compare", str(odd), "pcie-3", "--picture", str(tmp_path / "odd.svg")]) == 0
    assert "$x_$ at 2$" in (tmp_path / "odd.svg").read_text()
