from pathlib import Path

import pytest

from ddl.launch import mpi
from ddl.launch.errors import CheckError
from ddl.launch.mpi import Mpi, parse_version

HERE = Path("mpirun")


@pytest.mark.parametrize(
    ("text", "kind", "version"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to ...", "openmpi5", (5, 0, 11)),
        ("mpirun (Open MPI) 4.1.8\n", "openmpi4", (4, 1, 8)),
        ("mpirun.real (OpenRTE) 4.1.4\n", "openmpi4", (4, 1, 4)),
        ("mpirun (Open MPI) 6.1.0\n", "openmpi5", (6, 1, 0)),
        ("HYDRA build details:\n    Version:                                 5.0.2\n    CC: cc", "hydra", (5, 0, 2)),
    ],
)
def test_each_mpirun_is_known_by_what_it_prints(text: str, kind: str, version: tuple[int, ...]) -> None:
    found = parse_version(text, HERE)
    assert (found.kind, found.version) == (kind, version)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mpirun (Open MPI) 3.1.2", "is Open MPI 3.1.2, and 4 or later is needed"),
        ("LAM 7.1", "prints 'LAM 7.1', which is neither Open MPI nor MPICH's hydra"),
        ("", "prints 'nothing'"),
    ],
)
def test_an_mpirun_that_cannot_be_used_is_named(text: str, message: str) -> None:
    with pytest.raises(CheckError, match=message):
        parse_version(text, HERE)


def stub(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    program = folder / "mpirun"
    program.write_text(f"#!/bin/sh\necho '{text}'\n")
    program.chmod(0o755)
    return program


def test_the_one_beside_python_goes_before_the_one_on_path(tmp_path: Path) -> None:
    beside = stub(tmp_path / "venv", "mpirun (Open MPI) 5.0.11")
    other = stub(tmp_path / "usr", "mpirun (Open MPI) 4.1.4")
    found = mpi.find(beside=beside.parent, path=str(other.parent))
    assert (found.path, found.reason) == (beside, "beside this python")
    found = mpi.find(beside=tmp_path, path=str(other.parent))
    assert (found.path, found.reason) == (other, "the first on PATH")
    assert mpi.find(other, beside=beside.parent).kind == "openmpi4"


def test_no_mpirun_at_all_says_where_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match=r"mpirun: there is none in .* and none on PATH; install one: `pip install"):
        mpi.find(beside=tmp_path, path=str(tmp_path))
    with pytest.raises(CheckError, match=r"mpirun: .* is not a program that can be run"):
        mpi.find(tmp_path / "gone")


def test_an_mpirun_that_does_not_start_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "mpirun"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    with pytest.raises(CheckError, match="--version does not run"):
        mpi.find(broken)


def test_this_environment_has_one(real_mpi: Mpi) -> None:
    assert real_mpi.version >= (4,)
