import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "ci/fresh_machine"
SKIPPED = 77


def run(*arguments: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=timeout
    )


def test_help_names_every_option() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert all(option in done.stdout for option in ("--command", "--suite", "--keep"))


@pytest.mark.parametrize("arguments", [["--sweet", "bookworm"], ["--suite"], ["make test"]])
def test_wrong_arguments_are_a_usage_error_that_names_them(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert arguments[0] in done.stderr


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("command", ["make demo", "make test", "make test-builds"])
def test_the_command_works_on_a_fresh_machine(command: str) -> None:
    # The stand-in for conda-forge cannot be made of Debian's own Python, which is said before anything is fetched.
    refused = "! make channel BASE=stand-in 2>said.txt && tail -n2 said.txt && [[ ! -e out/stand-in ]]"
    done = run("--command", command, "--command", "make setup", "--command", refused, timeout=5400)
    if done.returncode == SKIPPED:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    assert "setup: .venv is up to date" in done.stdout  # the second set-up found nothing to do
    assert "keeps packages in other folders than a CPython from python.org does" in done.stdout
    assert "make setup PYTHON=..." in done.stdout
