"""Packages of the stand-in channel that hold no program: conda's MPI switch, compilers that are the system's own."""

from __future__ import annotations

import platform as machine
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_ACTIVATE = """# Stand-in for conda-forge's compilers: the system's own.
for one in {candidates}; do
    if command -v "$one" >/dev/null 2>&1; then
        export {variable}="$one"
        break
    fi
done
if [ -z "${{{variable}:-}}" ]; then
    echo "no {language} compiler: looked for {candidates}; install one (Debian, Ubuntu: {package})" >&2
    export {variable}=no-{language}-compiler-was-found
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
        for package, language, variable, candidates in (
            (f"gxx_{platform}", "C++", "CXX", "g++ c++"),
            (f"gcc_{platform}", "C", "CC", "gcc cc"),
        ):
            script = _ACTIVATE.format(
                candidates=candidates, variable=variable, language=language, package=candidates.split()[0]
            )
            summary = f"stand-in: the system's own {language} compiler, {_compiler(candidates)}"
            made.append(Stub(package, version, "0", summary=summary, activate=script))
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
