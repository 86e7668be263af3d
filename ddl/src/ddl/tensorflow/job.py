"""Joining the job, and leaving it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence

import ddl
from ddl.errors import LaunchError, UnsupportedError
from ddl.membership import under_mpi
from ddl.tensorflow import operations
from ddl.tensorflow.process_sets import ProcessSet, sets

_joined = False  # by us: the script has not called ddl.init itself


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | None = None) -> None:
    """Join the other ranks; blocks until all have called it. A second call does nothing.

    `comm` may list ranks, as long as it lists all of them. `process_sets` are put to use as by `add_process_set`.
    Raises LaunchError: another launcher started several processes; and what `ddl.init` raises.
    """
    global _joined
    if sets.is_initialized():
        return
    check_launcher(os.environ)
    if not ddl.is_initialized():
        ddl.init()
        _joined = True
    try:
        sets.begin()
        if comm is not None and sorted(comm) not in ([], sets.everyone.ranks):
            raise UnsupportedError(f"init(comm={comm!r}): a job is all ranks that were started: use process sets")
        for process_set in process_sets or ():
            sets.add(process_set)
    except BaseException:
        shutdown()
        raise
    if sets.rank() == 0 and operations.library() is None:
        print(f"ddl: TensorFlow's tensors go through {operations.described()}", file=sys.stderr)


def shutdown() -> None:
    """Leave the job. `init` may be called again."""
    global _joined
    leaves, _joined = _joined, False
    if leaves:
        ddl.finalize()  # before the communicators go: a rank that waits for this one is told that it has left
    sets.end()


def check_launcher(environment: Mapping[str, str]) -> None:
    """Raise LaunchError if another launcher started several ranks; say so if none started this process."""
    if under_mpi(environment) or "WORLD_SIZE" in environment:
        return
    script = " ".join(["python", *sys.argv])
    try:
        workers = len(json.loads(environment.get("TF_CONFIG") or "{}").get("cluster", {}).get("worker", []))
    except (ValueError, AttributeError):
        workers = 0
    for name, count in (("HOROVOD_SIZE", int(environment.get("HOROVOD_SIZE", "1"))), ("TF_CONFIG", workers)):
        if count > 1:
            raise LaunchError(
                f"init(): {name} names {count} ranks, but does not say how DDL's ranks find one another: start them "
                f"with `ddlrun -np {count} {script}`, on several hosts with -H host1,host2"
            )
    if "SLURM_PROCID" not in environment:
        print(f"ddl: no launcher started this process: it trains alone; try `ddlrun -np 4 {script}`", file=sys.stderr)
