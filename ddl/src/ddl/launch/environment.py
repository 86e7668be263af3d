"""The environment of the ranks. Pure.

RANK and its kin differ from rank to rank, and only MPI knows them, on the host where the rank starts. A line of `sh`
translates them, starts the program, and reports its end (`reports`): this takes a millisecond, and nothing has to be
installed. A wrapper in Python would start an interpreter for each rank. Without a wrapper the command line would need a
section for each rank, and would grow with the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from ddl.launch import guard, leftovers
from ddl.launch.counts import quoted
from ddl.launch.dimensions import Dimensions
from ddl.launch.errors import UsageError
from ddl.launch.mpi import HYDRA, Mpi
from ddl.launch.options import Export, Mode, Options, check_ddl_words
from ddl.launch.reports import ASKED, BEGAN, VARIABLE

VISIBLE = "CUDA_VISIBLE_DEVICES"
FORWARDED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", VISIBLE)
FORWARDED_PREFIXES = ("DDL_", "NCCL_")
# Put before the name of a variable whose value is secret. Every user of a host can read command lines, so the value
# travels in the environment: Open MPI hands what begins with OMPI_ to every rank unasked, and hydra all variables.
HIDDEN_PREFIX = "OMPI_DDLRUN_X_"
SECRET = "DDL_SECRET"  # of a job, for its ranks alone; drawn when it is run, and not printed

# torchrun's name, and the variable in which each MPI has the value.
_OPENMPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
_HYDRA = {
    "RANK": "PMI_RANK",
    "LOCAL_RANK": "MPI_LOCALRANKID",
    "WORLD_SIZE": "PMI_SIZE",
    "LOCAL_WORLD_SIZE": "MPI_LOCALNRANKS",
}


def wrapper(mpi: Mpi, first: str = "", secrets: Sequence[str] = ()) -> tuple[str, ...]:
    """The words before the program that give each rank RANK and its kin, and that report its end (`reports`).

    The variables named in `secrets` arrive with HIDDEN_PREFIX before their names and get their own names here. Under
    their own names, LD_PRELOAD, PATH or TMPDIR for the ranks would also act on mpirun, its daemons and ssh.

    The first rank of each host starts the guard (`guard`) and reads its output to the end, which comes when the guard
    is connected to ddlrun, or cannot be. The guard is not a child of the program, because that might wait for it. It
    does not hold the rank's output, because MPI would wait for its end. Without a token there is nobody to report to,
    and the shell becomes the program. With a token the shell waits for the program:
    - in the foreground, because a shell takes stdin and SIGINT from what it starts in the background;
    - with a trap, which is not inherited, for what MPI sends: every MPI signals a rank's whole process group, so the
      program has its signal already. The shell must live on to report the program's end, and that MPI asked for it: a
      rank that was not asked is the cause;
    - started by `exec` in a subshell, because a program may have the name of a builtin of the shell;
    - with the shell's own stderr closed meanwhile, because dash writes "Terminated" for every rank that was ended
      (`_s=$?` stands inside for the same reason). Not under hydra: descriptor 9 may be the rank's way to PMI.

    `first` is a piece of sh that runs before all that.
    """
    names = _HYDRA if mpi.family == HYDRA else _OPENMPI
    hidden = [f"{HIDDEN_PREFIX}{name}" for name in secrets]
    given = [f'{name}="${source}"' for name, source in zip(secrets, hidden, strict=True)]
    settings = " ".join([*given, *(f"{name}=${source}" for name, source in names.items())])
    unset = " ".join((VARIABLE, guard.COMMAND, *hidden))
    # The shell's variables have names that no program uses: a program's own variable would be overwritten.
    start = '(exec "$@"); _s=$?' if mpi.family == HYDRA else '{ (exec "$@" 2>&9 9>&-); _s=$?; } 9>&2 2>/dev/null'
    script = (
        f"{first}export {settings}; _t=${VARIABLE} _g=${guard.COMMAND}; unset {unset}; "
        'if [ "$_g" ] && [ "$LOCAL_RANK" = 0 ]; then : "$(exec </dev/null 2>/dev/null; eval "$_g" &)"; fi; '
        f'unset {guard.KEY}; {leftovers.redirection(mpi.kind)}[ "$_t" ] || exec "$@"; '
        f'_k=; trap "_k=\\ {ASKED}" HUP INT QUIT TERM; trap : ABRT ALRM USR1 USR2; '
        f'_r="$_t $RANK {BEGAN}"; printf \'%s\\n\' "$_r" "$_r" >&2; {start}; '
        'trap \'\' PIPE; _r="$_t $RANK $_s$_k"; printf \'%s\\n\' "$_r" "$_r" >&2; exit $_s'
    )
    return ("/bin/sh", "-c", script, "ddlrun")


def exports(given: Sequence[Export], environ: Mapping[str, str], made: Mapping[str, str]) -> tuple[Export, ...]:
    """The variables of every rank: those that are always forwarded, those of `made`, and the user's, which win.

    DDL_TRANSPORT is that of `made`, which knows the user's.
    """
    chosen = {
        name: Export(name)
        for name in sorted(environ)
        if environ[name] and (name in FORWARDED or name.startswith(FORWARDED_PREFIXES))
    }
    if environ.get(VISIBLE) == "":  # empty means: no GPU
        chosen[VISIBLE] = Export(VISIBLE, "")
    chosen |= {name: Export(name, value) for name, value in made.items()}
    chosen |= {one.name: one for one in given if one.name != "DDL_TRANSPORT" or one.name not in made}
    return tuple(chosen.values())


def values(exported: Sequence[Export], environ: Mapping[str, str]) -> dict[str, str]:
    """The values of `exported`, as the ranks see them."""
    found = {one.name: environ.get(one.name) if one.value is None else one.value for one in exported}
    return {name: value for name, value in found.items() if value is not None}


def visible(given: Sequence[Export], environ: Mapping[str, str]) -> str | None:
    """CUDA_VISIBLE_DEVICES as the ranks see it; None if it is not set."""
    return values(exports(given, environ, {}), environ).get(VISIBLE)


def transport(asked: str, options: str, mpiargs: Sequence[str], *, fabric: bool, unknown: bool) -> tuple[str, str]:
    """DDL_TRANSPORT for libddl, whose DDL_OPTIONS are `options`, and the reason. `asked` is the user's.

    libddl's own TCP is faster than MPI's. But MPI knows fabrics, is told the network by `mpiargs`, and finds its way
    if the networks between hosts are `unknown`. Raises UsageError if there is no such transport as `asked`.
    """
    if asked in ("mpi", "tcp"):
        return asked, f"over {asked.upper()}, as DDL_TRANSPORT asks"
    if asked not in ("", "auto"):
        raise UsageError(f"DDL_TRANSPORT is {quoted(asked)}, but must be auto, mpi or tcp")  # as libddl says it
    if fabric:
        return "mpi", "over MPI, which knows the fabric"
    if "m" in modes_of(options):
        return "mpi", "over MPI, because mode m is its collectives"
    if chosen := [word for word in mpiargs if word.startswith(("btl", "pml", "mtl"))]:
        return "mpi", f"over MPI, for which --mpiarg sets {chosen[0]}"
    if unknown:
        return "mpi", "over MPI, because the networks between the hosts are not known"
    return "tcp", "over TCP, without MPI"


def modes_of(options: str) -> set[str]:
    """The letters of the modes in DDL_OPTIONS."""
    words = options.split()
    given = [value for name, value in pairwise(words) if name.lstrip("-") == "mode"]
    return set(given[-1].partition(":")[0]) if given else set()


def inherited_options(environ: Mapping[str, str]) -> str:
    """The user's own DDL_OPTIONS; "" if ddlrun runs inside another job, which set them for its own ranks."""
    return "" if guard.MARK in environ else environ.get("DDL_OPTIONS", "")


def ddl_options(
    mode: Mode,
    dimensions: Dimensions,
    more: Sequence[str],
    *,
    inherited: str = "",
    chosen: bool = True,
    verbose: bool = False,
) -> str:
    """DDL_OPTIONS for libddl: ddlrun's own, the `inherited` ones, and `more` from the command line.

    Each option stands once: the command line wins over inherited options, and these win over ddlrun's choice. `chosen`
    says that the command line gave the mode or the dimensions. With `verbose`, libddl prints what it measured and which
    plan it chose. Raises UsageError if the inherited options are not names and values.
    """
    sizes = f":{'x'.join(map(str, dimensions.sizes))}" if dimensions.sizes else ""
    ours = {"mode": mode.letters + sizes} | ({"dbg_level": "1"} if verbose else {})
    given = _names(more)
    words = inherited.split()
    check_ddl_words(words, "DDL_OPTIONS")
    pairs = [words[at : at + 2] for at in range(0, len(words), 2)]  # as libddl reads them: a name and its value
    asked = given | {"mode"} if chosen else given
    theirs = [word for pair in pairs if not asked & _names(pair) for word in pair]
    given |= _names(theirs)
    first = [word for name, value in ours.items() if name not in given for word in (f"-{name}", value)]
    return " ".join([*first, *theirs, *more])


def _names(words: Sequence[str]) -> set[str]:
    return {word.lstrip("-") for word in words if word.startswith("-")}


def figures(options: Options) -> dict[str, str]:
    """The variables by which each rank's figures are sampled: DDL's, and those of a session of LMS in the same rank."""
    asked = {
        "TENSORBOARD": options.tensorboard,
        "METRICS_PORT": options.metrics_port,
        "METRICS_ADDRESS": options.metrics_address,
    }
    given = {name: str(value) for name, value in asked.items() if value is not None}
    return {f"{part}_{name}": value for part in ("DDL", "LMS") for name, value in given.items()}


def threads(counts: Mapping[str, int], cores: Mapping[str, int]) -> int | None:
    """OMP_NUM_THREADS: the cores that each rank has for itself; None if a host's cores are not known."""
    if any(host not in cores for host in counts):
        return None
    return max(1, min(cores[host] // count for host, count in counts.items()))
