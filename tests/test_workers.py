"""What tests/conftest.py arranges where several workers run tests."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parent / "conftest.py"
OPTIONS = ["-p", "no:cacheprovider", "-o", "markers=alone", "-rA", "-n", "2"]

# Each test writes down its worker, and when it began and ended.
NOTES = """
import json, os, time
from pathlib import Path
import pytest

FOLDER = Path(__file__).parent

@pytest.fixture(autouse=True)
def note(request):
    begin = time.monotonic()
    yield
    what = [os.environ["PYTEST_XDIST_WORKER"], begin, time.monotonic()]
    (FOLDER / f"{request.node.name}.json").write_text(json.dumps(what))

"""
# Passes where the other one runs meanwhile.
MEETS = """
def test_{one}():
    (FOLDER / "{one}").touch()
    while not (FOLDER / "{other}").exists():
        time.sleep(0.01)

"""
ALONE = "@pytest.mark.alone\ndef test_{name}():\n    time.sleep(0.1)\n\n"


def run(folder: Path, *, ci: bool = False, **sources: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    for name, source in sources.items():
        (folder / f"test_{name}.py").write_text(NOTES + source)
    environment = {name: value for name, value in os.environ.items() if name != "CI" and "PYTEST" not in name}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--rootdir", str(folder), *OPTIONS, str(folder)],
        env=environment | ({"CI": "true"} if ci else {}),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
    )


def notes(folder: Path) -> dict[str, tuple[str, float, float]]:
    """Worker, begin and end of each test."""
    return {path.stem.removeprefix("test_"): tuple(json.loads(path.read_text())) for path in folder.glob("*.json")}


def test_two_tests_run_at_once_and_none_beside_one_that_is_alone(tmp_path: Path) -> None:
    meeting = [MEETS.format(one=one, other=other) for one, other in (("here", "there"), ("there", "here"))]
    work = "def test_work():\n    time.sleep(0.5)\n\n"
    done = run(
        tmp_path,
        here=ALONE.format(name="first") + meeting[0],
        there=meeting[1] + work + ALONE.format(name="second"),
        third=ALONE.format(name="third"),
    )
    assert "6 passed" in done.stdout, done.stdout
    found = notes(tmp_path)
    assert found["first"][0] == found["here"][0] != found["there"][0] == found["work"][0] == found["second"][0]
    for name in ("first", "second", "third"):
        _, begin, end = found.pop(name)
        assert all(before <= begin or end <= after for _, after, before in found.values()), (name, found)


def test_a_failure_is_named_once_and_by_its_own_name(tmp_path: Path) -> None:
    done = run(tmp_path, some="def test_it(): assert False\n", other="def test_other(): pass\n")
    assert done.returncode == 1
    assert [line for line in done.stdout.splitlines() if line.startswith("FAILED ")] == [
        "FAILED test_some.py::test_it - assert False"
    ]


def test_what_is_kept_together_exists() -> None:
    spec = importlib.util.spec_from_file_location("the_conftest", CONFTEST)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    for folders in module.TOGETHER.values():
        assert len({module.scope(f"{folder}::test_it") for folder in folders}) == 1
        assert all((CONFTEST.parents[1] / folder).exists() for folder in folders)
    assert module.scope("tests/test_workers.py::test_it") == "tests/test_workers.py"


@pytest.mark.parametrize("ci", [False, True])
def test_a_skip_of_a_module_is_one_line_of_the_report_and_in_ci_a_failure(tmp_path: Path, ci: bool) -> None:
    skipped = 'pytest.skip("the moon is full", allow_module_level=True)\n'
    done = run(tmp_path, ci=ci, some=skipped, other="def test_other(): pass\n")
    if ci:
        assert done.returncode not in (0, 5), done.stdout
        assert "skipped in CI, unexpectedly: the moon is full" in done.stdout
    else:
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("SKIPPED"))
        assert "the moon is full" in line
        assert done.returncode == 0
