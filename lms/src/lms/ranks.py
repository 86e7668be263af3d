"""The ranks of a job, as its launcher says in the environment: LMS runs in each of them, and they share a host.

Understood are torchrun's variables, which ddlrun sets too, and those of Open MPI's and MPICH's own launchers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def rank_of(environ: Mapping[str, str]) -> int | None:
    """This process's rank if it is one of several; None if it is alone."""
    return _number(_RANK, environ, 0) if _number(_SIZE, environ, 1) > 1 else None


def local_rank_of(environ: Mapping[str, str]) -> int:
    """This process's number among the ranks of its host; 0 if nothing says it."""
    return _number(_LOCAL_RANK, environ, 0)


def job_of(environ: Mapping[str, str]) -> str | None:
    """A name that the ranks of a job share and no other job on their hosts has; None if this process is alone."""
    if environ.get("MASTER_PORT"):  # a process that joins later has no rank yet
        return f"{environ.get('MASTER_ADDR', '')}:{environ['MASTER_PORT']}"
    if rank_of(environ) is None:
        return None
    return next((environ[name] for name in ("PMIX_NAMESPACE", "PMI_JOBID") if environ.get(name)), "ranks")


def sharing(environ: Mapping[str, str]) -> int:
    """How many ranks share this host, this one included: 1 if nothing says more."""
    return max(1, _number(_LOCAL_SIZE, environ, 1))


def own_file(path: Path, rank: int | None) -> Path:
    """Where a rank writes what all would write to one `path`: rank 0 there, others to a name with their number."""
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path


def _number(names: tuple[str, ...], environ: Mapping[str, str], default: int) -> int:
    text = next((environ[name] for name in names if environ.get(name)), "")
    return int(text) if text.isdecimal() else default
