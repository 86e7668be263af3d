"""`run`: a function of a script on the ranks of a job, for scripts that start themselves, as with `horovod.run`."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import spawn
from pathlib import Path
from typing import TypeVar

from ddl.errors import DDLError, StateError

ResultT = TypeVar("ResultT")

PROGRAM = "ddl.horovod.function_rank"
TASK = "task"  # the file, in the folder that the ranks are told, that says what they do
RESULT = "result.{rank}"  # and those in which they say what came of it
_NOT_FOR_RANKS = ("authkey", "start_method", "name")  # what multiprocessing tells its own children besides

is_rank = False  #: this process is one that `run` has started


class JobError(DDLError):
    """The job of a function failed; its ranks have said why."""


def run(
    func: Callable[..., ResultT],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    np: int = 1,
    hosts: str | None = None,
    hostfile: str | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    verbose: int | None = None,
    executable: str | None = None,
) -> list[ResultT]:
    """Call `func(*args, **kwargs)` on `np` ranks that ddlrun starts; what each has returned, in the order of ranks.

    The ranks import the script anew, as the processes of multiprocessing do: what only its first process does stands
    under `if __name__ == "__main__"`. `hosts` ("h0:2,h1:2") and `hostfile` are ddlrun's; the folder of temporary files
    (TMPDIR) must then be one that all of them have. `executable` is their Python. `use_gloo` and `use_mpi` are ignored:
    MPI it is.

    Raises ValueError: np is below 1, or the function or an argument is not one that another process can have. JobError:
    a rank failed. StateError: called by a rank.
    """
    if is_rank:
        raise StateError('run() was called by a rank of a run(): put the call under `if __name__ == "__main__"`')
    if np < 1:
        raise ValueError(f"run({_name_of(func)}, np={np}): np is the number of ranks: expected 1 or more")
    task = described(func, args, dict(kwargs or {}))
    with tempfile.TemporaryDirectory(prefix="ddl-run-") as name:
        folder = Path(name)
        (folder / TASK).write_bytes(task)
        status = subprocess.run(command(folder, np, hosts, hostfile, verbose, executable)).returncode
        if status:
            raise JobError(
                f"run({_name_of(func)}, np={np}): the job ended with status {status}, for a reason said above"
            )
        return [pickle.loads((folder / RESULT.format(rank=rank)).read_bytes()) for rank in range(np)]


def described(func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> bytes:
    """What a rank needs to know. Raises ValueError."""
    preparation = spawn.get_preparation_data("rank")
    try:
        content = pickle.dumps((func, tuple(args), kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"run({_name_of(func)}): its ranks cannot be given it ({error}): pass a function that stands at the top of "
            "a file, and arguments that can be pickled"
        ) from None
    if func.__module__ == "__main__" and not {"init_main_from_path", "init_main_from_name"} & preparation.keys():
        raise ValueError(f"run({_name_of(func)}): its ranks cannot import it: define it in a file, not by hand")
    told = {key: value for key, value in preparation.items() if key not in _NOT_FOR_RANKS}
    return pickle.dumps((told, content))


def command(
    folder: Path, np: int, hosts: str | None, hostfile: str | None, verbose: int | None, executable: str | None
) -> list[str]:
    """The command line of the job."""
    words = [sys.executable, "-m", "ddl.ddlrun", "-np", str(np)]
    words += ["-H", hosts] if hosts else []
    words += ["-hostfile", hostfile] if hostfile else []
    words += ["-v"] if verbose else []
    return [*words, executable or sys.executable, "-m", PROGRAM, str(folder)]


def _name_of(func: Callable[..., object]) -> str:
    return getattr(func, "__name__", repr(func))
