"""Rank 2 dies between two starts of the library; the others print what their second start says, and after how long.

The argument is an empty folder in which the ranks tell one another how far they are.
"""

import os
import signal
import sys
import time
from pathlib import Path

import ddl

folder = Path(sys.argv[1])


def tell(what: str, *, ranks: int) -> None:
    """Note that this rank has come so far, and wait until so many have."""
    (folder / f"{what}{rank}").touch()
    until = time.monotonic() + 20
    while len(list(folder.glob(f"{what}*"))) < ranks and time.monotonic() < until:
        time.sleep(0.01)


ddl.init()
rank = ddl.rank()
ddl.barrier()
ddl.finalize()
tell("finalized", ranks=4)  # else rank 2 might die while others are still in the barrier
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
start = time.monotonic()
try:
    ddl.init()
except ddl.DDLError as error:
    print(f"rank {rank} after {time.monotonic() - start:.0f} s: {type(error).__name__}: {error}", flush=True)
tell("told", ranks=3)  # a rank that ends before the others have heard of rank 2's death would be a second one that died
os._exit(0)  # MPI would wait for the rank that is gone
