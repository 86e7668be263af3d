"""Who takes part: what each contestant runs, and over which MPI it is started.

- DDL, as the job's own options make it, and DDL as one ring over all ranks in host order (what a well-ordered ring
  without any knowledge of the network can do);
- the MPI that starts the job: its default, and the settings of Open MPI's collective components that its users tune by;
- another MPI (MPICH beside Open MPI), through a worker that its own compiler wrapper compiles;
- gloo, through torch, where torch is installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from ddl import library
from ddl.launch.decide import Found
from ddl.launch.errors import CheckError
from ddl.launch.mpi import HYDRA, OPENMPI, Mpi
from ddl.launch.options import Export, Mode, Options

HERE = Path(__file__).parent
DDL, FLAT = "DDL", "DDL, one flat ring"
_NAMES = {HYDRA: "MPICH", OPENMPI: "Open MPI"}

# On several hosts han goes before tuned, whose settings then mean nothing for the ranks of all hosts: it is left out.
_WITHOUT_HAN = ("--mca", "coll", "^han")
_ALGORITHM = (*_WITHOUT_HAN, "--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm")
# Through shared memory; its component has another name in Open MPI 4.
_EAGER = ("--mca", "btl_sm_eager_limit", "20480", "--mca", "btl_vader_eager_limit", "20480")
# Numbers as `ompi_info --param coll tuned --level 9` lists them. 1 (linear) and 2 (reduce, then broadcast) are left
# out: at large sizes they take many times as long as any other.
OPENMPI_SETTINGS = {
    "tuned without han": _WITHOUT_HAN,
    "recursive doubling": (*_ALGORITHM, "3"),
    # The messages that DDL sends at once inside a host, which Open MPI by itself asks the receiver about from 4 KiB on.
    "recursive doubling, eager to 20 KiB": (*_ALGORITHM, "3", *_EAGER),
    "ring": (*_ALGORITHM, "4"),
    "segmented ring": (*_ALGORITHM, "5", "--mca", "coll_tuned_allreduce_algorithm_segmentsize", "262144"),
    "Rabenseifner": (*_ALGORITHM, "6"),
}


@dataclass(frozen=True)
class Contestant:
    """A job to be timed: `program` gets the controller's contacts as its last word."""

    name: str
    program: tuple[str, ...]
    mpi: Mpi
    family: str = ""
    mpiargs: tuple[str, ...] = ()
    exports: tuple[Export, ...] = ()
    mode: Mode | None = None  # None: as the options say

    def options(self, asked: Options, mpi: Mpi) -> Options:
        """The options of its job, where `asked` are those of all, for `mpi`."""
        theirs = asked.mpiargs if mpi.family == self.mpi.family else ()  # no word of one is known to another
        return replace(
            asked,
            mpiargs=(*theirs, *self.mpiargs),
            exports=(*asked.exports, *self.exports),
            mode=asked.mode if self.mode is None else self.mode,
            verbose=True,  # for libddl to say what it measured and chose
        )

    def found(self, found: Found) -> Found:
        """What its job is planned from."""
        return replace(found, program=self.program, mpi=self.mpi)


def of_ddl(mpi: Mpi) -> Contestant:
    """DDL as the options ask for it. Raises CheckError where its worker was not built."""
    return Contestant(DDL, (str(_worker("bench_ddl")),), mpi)


def peers(
    mpi: Mpi, ranks: int, interfaces: Sequence[str], others: Sequence[Mpi], wanted: Callable[[str], bool]
) -> list[Contestant]:
    """All there are to compare with whose name is `wanted`, for `ranks` ranks.

    `others` are further MPIs than the one that starts the job. Raises CheckError where a worker cannot be made.
    """
    found = [Contestant(FLAT, (str(_worker("bench_ddl")),), mpi, mode=Mode("r", (ranks,)))]
    found += _of_mpi(mpi, lambda: _worker("bench_mpi"), _NAMES[mpi.family], wanted)
    names = {_NAMES[mpi.family]}
    for other in others:
        name = _NAMES[other.family]
        if name in names:  # Open MPI 4 beside 5
            name = str(other)
        if name in names:
            raise CheckError((f"--peer-mpi {other.path}", f"{other} takes part already; name each MPI once"))
        names.add(name)
        found += _of_mpi(other, partial(compiled, other), name, wanted)
    if find_spec("torch") is not None:
        exports = [Export("GLOO_SOCKET_IFNAME", interfaces[0])] if len(interfaces) == 1 else []
        program = (sys.executable, str(HERE / "gloo_worker.py"))
        found.append(Contestant("gloo", program, mpi, exports=tuple(exports)))
    return [one for one in found if wanted(one.name)]


def compiled(mpi: Mpi) -> Path:
    """The worker for `mpi`, made by the compiler wrapper beside its launcher. Raises CheckError where that fails."""
    wrapper = shutil.which(mpi.path.parent / "mpicxx")
    if wrapper is None:
        why = f"there is no mpicxx beside {mpi.path}, which is needed to time it: install its headers"
        raise CheckError((str(mpi), why))
    source = _worker("allreduce.cc")
    made_of = f"{mpi.path.parent.resolve()} {mpi} {source.read_text()}"
    program = _cache() / f"bench_{mpi.family}-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}"
    if program.is_file():
        return program
    aside = program.with_name(f"{program.name}.{os.getpid()}")
    words = [wrapper, "-O2", "-std=c++17", "-DBENCH_MPI", str(source), "-o", str(aside)]
    words.append(f"-Wl,-rpath,{mpi.path.parent.parent / 'lib'}")
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise CheckError((str(mpi), f"{wrapper} cannot compile {source}: {done.stderr.strip()[:400]}"))
    aside.replace(program)
    return program


def _cache() -> Path:
    """A folder that all hosts see, as they share the user's home."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ddlrun")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _of_mpi(mpi: Mpi, worker: Callable[[], Path], name: str, wanted: Callable[[str], bool]) -> list[Contestant]:
    """An MPI's default and, of Open MPI, its settings; nothing is compiled for those that are not `wanted`."""
    settings = {"default": (), **({} if mpi.family == HYDRA else OPENMPI_SETTINGS)}
    chosen = {setting: words for setting, words in settings.items() if wanted(f"{name}, {setting}")}
    if not chosen:
        return []
    program = (str(worker()),)
    return [
        Contestant(f"{name}, {setting}", program, mpi, family=name if words else "", mpiargs=words)
        for setting, words in chosen.items()
    ]


def _worker(name: str) -> Path:
    """A file that is installed, or built, with the library."""
    # conda's package has a link to libddl's own library, and its programs beside that link.
    found = library.find()
    folders = (found.parent, found.resolve().parent)
    for path in (place for folder in folders for place in (folder / "bench" / name, folder / name)):
        if path.is_file():
            return path
    raise CheckError(("ddlrun bench", f"{name} is not beside {library.NAME} in {folders[-1]}; install ddl again"))
