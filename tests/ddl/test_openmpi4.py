"""libddl over Debian's Open MPI 4: built with its compiler wrapper, run by its launcher."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
MPIRUN, MPICXX = Path("/usr/bin/mpirun.openmpi"), Path("/usr/bin/mpicxx.openmpi")

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not (MPIRUN.exists() and MPICXX.exists()),
    reason=f"no {MPIRUN.name}: run ci/install_tools, or apt-get install openmpi-bin libopenmpi-dev",
)
def test_messages_collectives_and_a_dead_rank(tmp_path: Path, native: Callable[..., Path], command: Run) -> None:
    native(tmp_path, "ddl_all", f"-DMPI_CXX_COMPILER={MPICXX}")
    native(tmp_path, "ddl_mpi_tests", f"-DMPI_CXX_COMPILER={MPICXX}")
    linked = command(["ldd", tmp_path / "libddl_mpi.so"], timeout=20).stdout
    assert "libmpi.so.40 => /lib" in linked or "libmpi.so.40 => /usr/lib" in linked, linked
    launch = [MPIRUN, "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
    for size in ("2", "3"):
        messages = command([*launch, "-np", size, tmp_path / "ddl_mpi_tests"], timeout=60)
        assert messages.returncode == 0, messages.stdout
    library = str(tmp_path / "libddl.so")
    sweep, faults = ([sys.executable, PROGRAMS / name] for name in ("sweep.py", "faults.py"))
    for size, plan in (("4", "r:2x2"), ("3", "r:3")):
        swept = command([*launch, "-np", size, *sweep, size], timeout=200, DDL_LIBRARY=library)
        assert swept.returncode == 0, swept.stdout
        assert f"-mode {plan}: right" in swept.stdout
    killed = command([*launch, "-np", "4", *faults, "kill"], timeout=40, DDL_LIBRARY=library)
    assert killed.returncode != 0
    assert "ddl: rank 1 (host " in killed.stdout, killed.stdout
