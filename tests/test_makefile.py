import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TARGETS = ("setup", "demo", "test", "test-all", "lint", "bench", "gpu-check", "clean", "help")


def make(*arguments: str, **variables: str) -> str:
    command = ["make", "--no-print-directory", *arguments]
    environment = os.environ | variables
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_help_lists_every_target() -> None:
    rules = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    listed = [line.split()[1] for line in make("help").splitlines()]
    assert listed == rules
    assert set(TARGETS) <= set(listed)


def test_make_alone_prints_the_help() -> None:
    assert make() == make("help")


def test_every_target_is_phony() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony
    assert set(phony[1].split()) == set(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE))


def test_every_script_that_make_and_ci_call_exists_and_may_be_run() -> None:
    called = set(re.findall(r"(?<![\w/])ci/\w+", (ROOT / "Makefile").read_text())) | {".ci/run"}
    assert len(called) > 3
    for name in called:
        assert shutil.which(ROOT / name), f"{name} is missing or not executable"


def test_test_leaves_out_what_is_slow_or_needs_root_and_test_all_does_not() -> None:
    assert '-m "not slow and not root"' in make("--dry-run", "test")
    assert '-m "root and not slow"' in make("--dry-run", "test-root")
    assert "not slow" not in make("--dry-run", "test-all")


def test_what_test_leaves_to_test_builds_is_there_and_run_by_it() -> None:
    left = set(re.findall(r"--ignore=(\S+)", make("--dry-run", "test")))
    assert left
    assert all((ROOT / path).exists() for path in left)
    assert left <= set(make("--dry-run", "test-builds").split())


@pytest.mark.parametrize("target", ["test", "test-builds", "test-all"])
def test_the_tests_have_the_charts_tools_by_the_python_that_was_asked_for(target: str) -> None:
    assert '"python3.13" ci/chart_tools' in make("--dry-run", target, PYTHON="python3.13")


def test_what_is_imported_is_compiled_once_whatever_the_environment_says() -> None:
    """Containers set it, and a process that imports torch then takes twice as long."""
    shown = make("--eval", "shown: ; @env", "shown", PYTHONDONTWRITEBYTECODE="1", SOMETHING="else")
    assert "SOMETHING=else" in shown
    assert "PYTHONDONTWRITEBYTECODE" not in shown


def test_ci_runs_all_tests_but_the_slow_ones_and_ends_with_most_of_them() -> None:
    run = (ROOT / ".ci/run").read_text()
    called = re.findall(r"^make (\S+)", run, re.MULTILINE)
    assert {"lint", "docs", "test-builds", "test-root", "test-tensorflow", "test-integrations"} <= set(called)
    assert run.strip().splitlines()[-1].startswith("make test ")


def test_ci_runs_the_readmes_command_for_tests() -> None:
    assert re.search(r"^make test\b", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert re.search(r"^\s*make test\b", (ROOT / "README.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("target", ["lint", "format"])
def test_lint_and_format_reach_every_source_of_c_and_cpp(target: str) -> None:
    called = [line for line in make("--dry-run", target).splitlines() if "clang-format" in line]
    reached = set(" ".join(called).split())
    folders = ("ddl/csrc", "ddl/include", "lms/src", "tests")
    sources = {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".cc", ".h", ".c", ".cpp", ".hpp")
    }
    assert len(sources) > 80
    assert sources <= reached


@pytest.mark.parametrize("target", ["channel", "env", "mirror", "image", "images", "context", "bench-bundle"])
def test_what_happens_to_be_in_the_environment_is_not_asked_for(target: str) -> None:
    """A shell's own ENV, a build's PREFIX."""
    text = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"\$\((?:if |or )?\$?\(?([A-Z_]+)", text)) - {"PYTHON", "BIN"}
    asked = {name for name in named if not re.search(rf"^{name} :?= ?\S", text, re.MULTILINE)}
    assert {
        "ENV",
        "ENVS",
        "PREFIX",
        "BASE",
        "BASE_IMAGE",
        "ENGINE",
        "OUT",
        "ARGS",
        "FRAMEWORKS",
        "HOROVOD",
        "TENSORFLOW",
    } == asked
    assert make("--dry-run", target, **dict.fromkeys(asked, "surprise")) == make("--dry-run", target)
    assert "surprise" in make("--dry-run", target, *(f"{name}=surprise" for name in sorted(asked)))


def test_the_results_of_a_gpu_check_go_where_the_environment_says() -> None:
    """A machine with a GPU brings back what lies in its OUT."""
    assert 'OUT="/results" ci/gpu_check' in make("--dry-run", "gpu-check", OUT="/results")
    assert 'OUT="/results" ci/gpu_check' in make("--dry-run", "gpu-check", "OUT=/results")
