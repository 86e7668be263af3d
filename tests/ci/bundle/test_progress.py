import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

ROOT = Path(__file__).parents[3]
WORK = """
from bundle.progress import steps
with steps("mirror", 2_000_000, "B", lines=False) as step:
    step("one.conda", 1_500_000)
    step("two.conda", 500_000)
"""


def work(stderr: int) -> None:
    command = [sys.executable, "-c", WORK]
    subprocess.run(command, cwd=ROOT / "ci", stdin=subprocess.DEVNULL, stderr=stderr, check=True, timeout=60)


def test_on_a_terminal_a_bar_goes_along_with_what_is_done() -> None:
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    termios.tcsetwinsize(theirs, (24, 100))
    work(theirs)
    said = os.read(ours, 100_000).decode()
    os.close(ours)
    os.close(theirs)
    assert "mirror:   0%|" in said
    assert "/2.00M" in said
    assert "bundle: mirror: done in " in said.replace("\r", "\n")


def test_elsewhere_one_line_says_how_long_it_took(tmp_path: Path) -> None:
    with (tmp_path / "said").open("w") as file:
        work(file.fileno())
    (line,) = (tmp_path / "said").read_text().splitlines()
    assert line.startswith("bundle: mirror: done in ")
