"""Runs programs of tests/ddl/programs on several ranks."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
Run = Callable[..., subprocess.CompletedProcess[str]]


def environment(**variables: str) -> dict[str, str]:
    """Variables that a rank needs beside the caller's environment: the source tree, leave to run Open MPI as root."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("DDL_", "OMPI_MCA_", "PMIX_"))},
        "PYTHONPATH": str(ROOT / "ddl" / "src"),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **variables,
    }


def beside_python(name: str) -> str:
    """A tool of .venv, whether it is activated or not, else of the machine."""
    tool = Path(sys.executable).with_name(name)
    found = str(tool) if tool.exists() else shutil.which(name)
    assert found, f"{name} is missing: run `make setup`"
    return found


def run(command: Sequence[str | Path], *, timeout: float, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program; stderr is part of stdout. A hang is a failure, and leaves nothing.

    mpirun gets a folder of its own: one that was killed leaves `ompi.PID` in /tmp, and the next one with that process
    id would end with "The PMIx server's listener thread failed to start".
    """
    is_mpirun = Path(command[0]).name == "mpirun"
    with (
        tempfile.TemporaryDirectory(prefix="mpirun-") as folder,
        subprocess.Popen(
            command,
            env=environment(**{"PRTE_MCA_prte_local_tmpdir_base": folder} if is_mpirun else {}, **variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process,
    ):
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"{' '.join(map(str, command))}: no end after {timeout} s\n{output}") from error
    return subprocess.CompletedProcess(command, process.returncode, output)


def run_ranks(
    size: int, program: str | Path, *arguments: str, timeout: float = 60, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program (of `programs`, or any path) on `size` ranks of this host."""
    path = PROGRAMS / program  # an absolute path stays what it is
    # Ranks may outnumber cores: they are not bound to one each, and give way while they wait.
    command = [beside_python("mpirun"), "-np", str(size), "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    command += ["--mca", "mpi_yield_when_idle", "1"]
    command += [sys.executable] if path.suffix == ".py" else []
    return run([*command, str(path), *arguments], timeout=timeout, **variables)


def run_over_tcp(
    size: int, program: str, *arguments: str, timeout: float = 60, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program of `programs` on `size` processes that no MPI starts; the exit status is the first one not 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(PROGRAMS / program), *arguments]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DDL_TRANSPORT": "tcp"}
    shared = {"WORLD_SIZE": str(size), **address, **variables}

    def run_rank(rank: int) -> subprocess.CompletedProcess[str]:
        return run(command, timeout=timeout, RANK=str(rank), **shared)

    with ThreadPoolExecutor(size) as pool:
        done = list(pool.map(run_rank, range(size)))
    status = next((one.returncode for one in done if one.returncode), 0)
    return subprocess.CompletedProcess(command, status, "".join(one.stdout for one in done))


def build(folder: Path, target: str, *definitions: str) -> Path:
    """Configure ddl in `folder` and build one target; returns the folder."""
    configure = [beside_python("cmake"), "-S", str(ROOT / "ddl"), "-B", str(folder), "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={beside_python('ninja')}", "-DDDL_MPI=ON", *definitions]
    compile_target = [beside_python("cmake"), "--build", str(folder), "--target", target, "--parallel", "2"]
    for command, timeout in ((configure, 100), (compile_target, 1500)):
        done = run(command, timeout=timeout)
        assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture
def native() -> Callable[..., Path]:
    """`native(folder, target, ...)`: `build`."""
    return build


@pytest.fixture(scope="session")
def compiled() -> Callable[[str], Path]:
    """`compiled(target)`: build it where `make setup` compiles libddl, from the same objects; returns the folder."""
    folder = ROOT / "ddl/build" / f"py3-none-linux_{platform.machine()}"
    mpi = f"-DMPI_CXX_COMPILER={beside_python('mpicxx')}"
    return lambda target: build(folder, target, mpi, "-DDDL_TESTS=ON")


@pytest.fixture
def command() -> Run:
    """`command([...], timeout=...)`: `run`."""
    return run


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Run:
    """`ranks(4, "sweep.py", ...)`: `run_ranks`; `run_over_tcp` if the test is parametrized so."""
    return run_over_tcp if getattr(request, "param", "mpi") == "tcp" else run_ranks


@pytest.fixture
def tcp_ranks() -> Run:
    """`tcp_ranks(4, "sweep.py", ...)`: `run_over_tcp`."""
    return run_over_tcp
