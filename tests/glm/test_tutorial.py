"""The programs of docs/linear_models.md, run as the page says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/linear_models.md").read_text()
PROGRAMS = dict(re.findall(r"save this as `(\w+\.py)`.*?```python\n(.*?)```", PAGE, re.DOTALL | re.IGNORECASE))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fit_array.py", r"objective \d+\.\d+, gap .*accuracy 0\.9"),
        ("file.py", r"do not fit into limit.*pass 1: .*stopped: the gap is at most tol.*accuracy 0\.8"),
        ("ranks.py", r"rank [01] of 2: objective \d"),
    ],
)
def test_a_program_of_the_tutorial_prints_what_the_page_says(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(PROGRAMS[name])
    line = re.search(rf"^    (\.venv/bin/.* {name})$", PAGE, re.MULTILINE)
    assert line
    command = [
        str(Path(sys.executable).with_name(Path(word).name)) if "/bin/" in word else word for word in line[1].split()
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert re.search(words, done.stdout, re.DOTALL), done.stdout
