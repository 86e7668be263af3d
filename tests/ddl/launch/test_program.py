"""Which program is run, by its words, PATH and the files that there are."""

import os

import pytest

from ddl.launch.errors import UsageError
from ddl.launch.program import choose

PY = "/venv/bin/python"
FILES = {"train.py": 0o644, "./train.py": 0o644, "./run.py": 0o755, "./data": 0o644, "tool": 0o755}
FILES |= {"/venv/bin/lms": 0o755, "/venv/bin/activate": 0o644, "/venv/bin/tool2": 0o755}


def chosen(line: str, on_path: str = "python tool2") -> tuple[tuple[str, ...], str]:
    files = {os.path.normpath(path): mode for path, mode in FILES.items()}

    def which(name: str) -> str | None:
        if "/" not in name:
            return f"/bin/{name}" if name in on_path.split() else None
        return name if files.get(os.path.normpath(name), 0) & 0o111 else None

    return choose(line.split(), PY, which, lambda path: os.path.normpath(path) in files)


def test_a_python_file_that_is_not_executable_is_run_with_this_python() -> None:
    assert chosen("train.py --epochs 3")[0] == (PY, "train.py", "--epochs", "3")
    assert chosen("./train.py")[0] == (PY, "./train.py")
    assert chosen("./run.py a")[0] == ("./run.py", "a")


def test_python_is_this_one_where_path_has_none() -> None:
    assert chosen("python train.py")[0] == ("python", "train.py")
    assert chosen("python train.py", on_path="")[0] == (PY, "train.py")


def test_what_is_not_on_path_may_lie_beside_this_python() -> None:
    words, why = chosen("lms run train.py")
    assert words == ("/venv/bin/lms", "run", "train.py")
    assert why == "lms is not on PATH, but beside the python that runs ddlrun: /venv/bin/lms"
    assert chosen("tool2 a")[0] == ("tool2", "a")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("activate", "PROGRAM 'activate': not found on PATH"),
        ("gone", "PROGRAM 'gone': not found on PATH; give its path"),
        ("tool", "PROGRAM 'tool': not found on PATH; there is a file of this name here: use ./tool"),
        ("./gone", "PROGRAM './gone': no such file"),
        ("./data", "PROGRAM './data': it is not executable: chmod"),
        (".", "PROGRAM '.': not found on PATH"),
        ("..", "PROGRAM '..': not found on PATH"),
        ("gone.py", "PROGRAM 'gone.py': not found on PATH"),
    ],
)
def test_a_program_that_cannot_be_run_is_named(line: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        chosen(line)
    assert str(raised.value).startswith(message)
