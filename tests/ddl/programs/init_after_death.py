"""Rank 2 dies between two starts of the library; the others print what their second start says, and after how long."""

import os
import signal
import time

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
os._exit(0)  # MPI would wait for the rank that is gone
