"""Packages of the stand-in channel that hold no program: conda's MPI switch, compilers that are the system's own."""

from __future__ import annotations

import platform as machine
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_CXX = "g++ c++"
_ACTIVATE = f"""# Stand-in for conda-forge's compiler: the system's own.
for one in {_CXX}; do
    if command -v "$one" >/dev/null 2>&1; then
        export CXX="$one"
        break
    fi
done
if [ -z "${{CXX:-}}" ]; then
    echo "no C++ compiler: looked for {_CXX}; install one (Debian, Ubuntu: g++)" >&2
    export CXX=no-C++-compiler-was-found
fi
"""


@dataclass(frozen=True)
class Stub:
    """A package without files of its own, except what `activate` says."""

    name: str
    version: str
    build: str
    depends: tuple[str, ...] = ()
    summary: str = ""
    activate: str | None = None  # a shell script that is read when the environment is activated

    def stage(self, folder: Path) -> None:
        """Lay its files into `folder`; a package of rattler-build's holds one at least."""
        if self.activate is None:
            note = folder / "share" / "bascule-stand-in" / self.name
        else:
            note = folder / "etc" / "conda" / "activate.d" / f"{self.name}.sh"
        note.parent.mkdir(parents=True)
        note.write_text(self.activate or f"{self.summary}\n")


def stubs(cxx_versions: list[str], stdlib_versions: list[str], platform: str) -> list[Stub]:
    """All of them; the versions are the variants' that recipes ask for. `platform` is conda's, as linux-64.

    What the system has in their place is said in their summaries, which makes them other packages when it changes: what
    was compiled is then compiled again.
    """
    made = [
        Stub("mpi", "1.0", family, summary=f"stand-in: the MPI of this environment is {family}")
        for family in ("openmpi", "mpich")
    ]
    for version in cxx_versions:
        summary = f"stand-in: the system's own C++ compiler, {_compiler(_CXX)}"
        made.append(Stub(f"gxx_{platform}", version, "0", summary=summary, activate=_ACTIVATE))
    c_library = " ".join(machine.libc_ver())
    made += [
        Stub(f"sysroot_{platform}", version, "0", summary=f"stand-in: the system's own C library, {c_library}")
        for version in stdlib_versions
    ]
    return made


def _compiler(candidates: str) -> str:
    """The first of `candidates` that is there, as it names itself with its version."""
    for path in filter(None, map(shutil.which, candidates.split())):
        said = subprocess.run([path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
        return said.partition("\n")[0].strip() or path
    return "which is not there"
