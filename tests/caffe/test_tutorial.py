"""The commands of docs/caffe.md, run word by word."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/caffe.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    for name in (".venv", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    commands = re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE)
    program = next(text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "import Net," in text)
    line = "set -eo pipefail\n" + "\n".join(commands) + f"\n{sys.executable} - <<'EOF'\n{program}EOF\n"
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # nets this small wait for one another's threads
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=one_thread, capture_output=True, text=True, timeout=880
    )
    folder = tmp_path / "out/digits"
    logs = {path.stem: path.read_text() for path in folder.glob("*.log")}
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs.values()])[-5000:]
    assert "digits_train: 1500 images" in done.stdout
    assert re.search(r"Iteration 200, Testing net.*\n.*accuracy = 0\.9", done.stdout)
    pattern = r"(?:Iteration \d+.*, |T\w+ net output.*)loss = (\S+)"
    shown = {name: re.findall(pattern, log) for name, log in logs.items()}
    assert shown["swapped"] == shown["train"]
    assert shown["train"][-len(shown["resumed"]) :] == shown["resumed"]
    assert len(shown["resumed"]) == 7
    assert logs["ranks"].count("Iteration 200, Testing net") == 1  # rank 0 alone writes
    assert (folder / "lenet.safetensors").exists()
    assert re.search(r"^tensor\(", done.stdout, re.MULTILINE)
