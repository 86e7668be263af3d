"""The contestants: the program of each, and the MPI that starts it.

- DDL as the options say, the same over the other of TCP and MPI, and DDL as one ring over all ranks in host order (the
  best that a ring can do without knowing the network);
- the MPI that starts the job: its default, and the settings of Open MPI's collectives that its users tune;
- another MPI (MPICH beside Open MPI), with a worker that its own compiler wrapper compiles;
- gloo, through torch, if torch is installed.
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

# On several hosts the component han has precedence over tuned, whose settings then have no effect: han is disabled.
_WITHOUT_HAN = ("--mca", "coll", "^han")
_ALGORITHM = (*_WITHOUT_HAN, "--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm")
# For shared memory; the component has another name in Open MPI 4.
_EAGER = ("--mca", "btl_sm_eager_limit", "20480", "--mca", "btl_vader_eager_limit", "20480")
# The numbers are those of `ompi_info --param coll tuned --level 9`. 1 (linear) and 2 (reduce, then broadcast) are left
# out: at large sizes they take many times as long as the others.
OPENMPI_SETTINGS = {
    "tuned without han": _WITHOUT_HAN,
    "recursive doubling": (*_ALGORITHM, "3"),
    # By default Open MPI asks the receiver first, from 4 KiB on.
    "recursive doubling, eager to 20 KiB": (*_ALGORITHM, "3", *_EAGER),
    "ring": (*_ALGORITHM, "4"),
    "segmented ring": (*_ALGORITHM, "5", "--mca", "coll_tuned_allreduce_algorithm_segmentsize", "262144"),
    "Rabenseifner": (*_ALGORITHM, "6"),
}


@dataclass(frozen=True)
class Contestant:
    """A job to time: `program` gets the controller's contacts as its last argument."""

    name: str
    program: tuple[str, ...]
    mpi: Mpi
    family: str = ""
    mpiargs: tuple[str, ...] = ()
    exports: tuple[Export, ...] = ()
    mode: Mode | None = None  # None: the mode of the options
    port: int = 1  # of its first host's free ports, the one at which its ranks meet: all contestants run at once

    def options(self, asked: Options, mpi: Mpi) -> Options:
        """The options of its job: `asked`, which are meant for `mpi`, with its own added."""
        theirs = asked.mpiargs if mpi.family == self.mpi.family else ()  # one MPI does not know another's arguments
        return replace(
            asked,
            mpiargs=(*theirs, *self.mpiargs),
            exports=(*asked.exports, *self.exports),
            mode=asked.mode if self.mode is None else self.mode,
            verbose=True,  # libddl then prints what it measured and chose
        )

    def found(self, found: Found) -> Found:
        """The Found from which its job is planned."""

        def own(ports: tuple[int, ...]) -> tuple[int, ...]:
            return (*ports[:1], *ports[self.port :])

        machines = {name: replace(one, free_ports=own(one.free_ports)) for name, one in found.machines.items()}
        return replace(found, program=self.program, mpi=self.mpi, machines=machines, ports=own(found.ports))


def of_ddl(mpi: Mpi) -> Contestant:
    """DDL as the options say. Raises CheckError if its worker was not built."""
    return Contestant(DDL, (str(_worker("bench_ddl")),), mpi)


def peers(
    mpi: Mpi,
    ranks: int,
    interfaces: Sequence[str],
    others: Sequence[Mpi],
    wanted: Callable[[str], bool],
    *,
    transport: str,
) -> list[Contestant]:
    """The peers whose names are `wanted`, for `ranks` ranks. `transport` is DDL's own choice, "tcp" or "mpi".

    `others` are MPIs beside the one that starts the job. Raises CheckError if a worker cannot be made.
    """
    program = (str(_worker("bench_ddl")),)
    opposite = "mpi" if transport == "tcp" else "tcp"
    over_opposite = (Export("DDL_TRANSPORT", opposite),)
    found = [
        Contestant(FLAT, program, mpi, mode=Mode("r", (ranks,)), port=2),
        Contestant(f"{DDL} over {opposite.upper()}", program, mpi, exports=over_opposite, port=3),
    ]
    found += _of_mpi(mpi, lambda: _worker("bench_mpi"), _NAMES[mpi.family], wanted)
    names = {_NAMES[mpi.family]}
    for other in others:
        name = _NAMES[other.family]
        if name in names:  # Open MPI 4 beside 5
            name = str(other)
        if name in names:
            raise CheckError(f"--peer-mpi {other.path}", f"{other} takes part already; name each MPI once")
        names.add(name)
        found += _of_mpi(other, partial(compiled, other), name, wanted)
    if find_spec("torch") is not None:
        exports = [Export("GLOO_SOCKET_IFNAME", interfaces[0])] if len(interfaces) == 1 else []
        worker = (sys.executable, str(HERE / "gloo_worker.py"))
        found.append(Contestant("gloo", worker, mpi, exports=tuple(exports)))
    return [one for one in found if wanted(one.name)]


def compiled(mpi: Mpi) -> Path:
    """Compile the worker for `mpi` with the wrapper beside its launcher. Raises CheckError if that fails."""
    wrapper = shutil.which(mpi.path.parent / "mpicxx")
    if wrapper is None:
        why = f"to time it takes mpicxx, and there is none beside {mpi.path}: install its headers"
        raise CheckError(str(mpi), why)
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
        raise CheckError(str(mpi), f"{wrapper} cannot compile {source}: {done.stderr.strip()[:400]}")
    aside.replace(program)
    return program


def _cache() -> Path:
    """A folder in the user's home, which all hosts share."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ddlrun")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _of_mpi(mpi: Mpi, worker: Callable[[], Path], name: str, wanted: Callable[[str], bool]) -> list[Contestant]:
    """An MPI's default and, for Open MPI, its settings; compiles nothing if none is `wanted`."""
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
    """A file that is installed or built with the library."""
    folder = library.find().resolve().parent
    # Of a wheel, of a build, of an installed libddl.
    for path in (folder / "bench" / name, folder / name, folder.parent / "libexec/ddl" / name):
        if path.is_file():
            return path
    raise CheckError("ddlrun bench", f"{name} is not beside {library.NAME} in {folder}; install ddl again")
