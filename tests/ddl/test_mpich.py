"""libddl over MPICH: built with its compiler wrapper, run by its launcher."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SWEEP = Path(__file__).parent / "programs" / "sweep.py"
FAULTS = Path(__file__).parent / "programs" / "faults.py"


@pytest.fixture(scope="module")
def mpich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own with PyPI's MPICH; its bin folder."""
    venv = tmp_path_factory.mktemp("mpich") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=60)
    # The system's pip, as in ci/setup: .venv has none.
    python = shutil.which("python3", path=os.defpath + os.pathsep + os.environ.get("PATH", "")) or sys.executable
    pip = [python, "-m", "pip", "--python", venv / "bin" / "python", "--disable-pip-version-check", "--no-input"]
    done = subprocess.run(
        [*pip, "install", "--constraint", ROOT / "ci" / "constraints.txt", "mpich"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return venv / "bin"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_collectives_are_right_and_a_dead_rank_is_named(
    mpich: Path,
    tmp_path: Path,
    native: Callable[..., Path],
    command: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    folder = native(tmp_path, "ddl_all", f"-DMPI_CXX_COMPILER={mpich / 'mpicxx'}", "-DDDL_TESTS=OFF")
    library = str(folder / "libddl.so")
    launch = [mpich / "mpiexec", "-n", "4", sys.executable]
    swept = command([*launch, SWEEP, "4"], timeout=120, DDL_LIBRARY=library)
    assert swept.returncode == 0, swept.stdout
    assert "-mode r:2x2: right" in swept.stdout
    killed = command([*launch, FAULTS, "kill"], timeout=40, DDL_LIBRARY=library)
    assert killed.returncode != 0
    assert "ddl: rank 1 (host " in killed.stdout, killed.stdout
