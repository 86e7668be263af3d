"""Rank 2 dies between two starts of the library; the others print what their second start says, and after how long.

The argument is an empty folder in which the ranks tell one another that they have said it.
"""

import os
import signal
import sys
import time
from pathlib import Path

import ddl

ddl.init()
rank = ddl.rank()
ddl.barrier()
ddl.finalize()
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
start = time.monotonic()
try:
    ddl.init()
except ddl.DDLError as error:
    print(f"rank {rank} after {time.monotonic() - start:.0f} s: {type(error).__name__}: {error}", flush=True)
# A rank that ends before the others have heard of rank 2's death would be a second one that died.
told = Path(sys.argv[1])
(told / str(rank)).touch()
while len(list(told.iterdir())) < 3 and time.monotonic() - start < 20:
    time.sleep(0.01)
os._exit(0)  # MPI would wait for the rank that is gone
