"""Packages of the stand-in channel that hold no program: conda's MPI switch, compilers that are the system's own."""

from __future__ import annotations

import platform as machine
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bundle.recipes import Variants
from bundle.wheel import Described

_CXX = ("g++", "c++")
# Read when the environment is activated.
_ACTIVATE = """# Stand-in for conda-forge's compiler: the system's own.
for one in g++ c++; do
    if command -v "$one" >/dev/null 2>&1; then
        export CXX="$one"
        break
    fi
done
if [ -z "${CXX:-}" ]; then
    echo "no C++ compiler: looked for g++ and c++; install one (Debian, Ubuntu: g++)" >&2
    export CXX=no-C++-compiler-was-found
fi
"""


@dataclass(frozen=True)
class Stub:
    """A package whose one file is a text."""

    said: Described
    place: str
    text: str

    def stage(self, folder: Path) -> None:
        """Lay its file into `folder`."""
        (folder / self.place).parent.mkdir(parents=True)
        (folder / self.place).write_text(self.text)


def stubs(variants: Variants, platform: str) -> list[Stub]:
    """All of them, of the versions that recipes ask for. `platform` is conda's, as linux-64.

    What the system has in their place is said in their summaries, which makes them other packages when it changes: what
    was compiled is then compiled again.
    """

    def stub(name: str, version: str, build: str, summary: str, place: str = "", text: str = "") -> Stub:
        said = Described(name, version, build, (), "Apache-2.0", summary)
        return Stub(said, place or f"share/bascule-stand-in/{name}", text or f"{summary}\n")

    found = [stub("mpi", "1.0", one, f"stand-in: the MPI of this environment is {one}") for one in variants["mpi"]]
    library = f"stand-in: the system's own C library, {' '.join(machine.libc_ver())}"
    found += [stub(f"sysroot_{platform}", version, "0", library) for version in variants["c_stdlib_version"]]
    name, compiler = f"gxx_{platform}", f"stand-in: the system's own C++ compiler, {_compiler()}"
    place = f"etc/conda/activate.d/{name}.sh"
    return found + [stub(name, one, "0", compiler, place, _ACTIVATE) for one in variants["cxx_compiler_version"]]


def _compiler() -> str:
    """The first that is there, as it names itself with its version."""
    for path in filter(None, map(shutil.which, _CXX)):
        said = subprocess.run([path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
        return said.partition("\n")[0].strip() or path
    return "which is not there"
