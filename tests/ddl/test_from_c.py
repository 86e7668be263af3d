"""The instructions of docs/ddl.md for C, followed to the letter."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_manual_s_program_compiles_and_runs_as_the_manual_says(
    command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    _, _, section = (ROOT / "docs" / "ddl.md").read_text().partition("## From C\n")
    (program,) = re.findall(r"^```c\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    (session,) = re.findall(r"^```console\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    (tmp_path / "sum.c").write_text(program)
    lines = re.findall(r"^\$ (.*)$", session, re.MULTILINE)
    expected = [line for line in session.splitlines() if not line.startswith("$ ")]
    script = "\n".join(["set -e", f"cd {shlex.quote(str(tmp_path))}", *lines])
    done = command(["sh", "-c", script.replace(".venv/bin", str(Path(sys.executable).parent))], timeout=60)
    assert done.returncode == 0, done.stdout
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank ")) == expected
