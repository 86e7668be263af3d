"""Allreduces, and messages around the lengths that ride in shared memory, against NumPy; `without` a thing it needs.

`shared_memory.py [files|proc]`: rank 0 cannot make a file of any size, or rank 1 sees no processes.
"""

import ctypes
import os
import resource
import sys

import numpy as np

import ddl

rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"])
without = sys.argv[1] if len(sys.argv) > 1 else ""
if without == "files" and rank == 0:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
if without == "proc":
    ddl.init()  # MPI, which may need /proc for more; what follows is the second session's
    ddl.finalize()
if without == "proc" and rank == 1:
    libc = ctypes.CDLL(None, use_errno=True)
    CLONE_NEWNS, MS_REC_PRIVATE = 0x20000, 0x44000
    hidden = libc.unshare(CLONE_NEWNS) == 0 and libc.mount(None, b"/", None, MS_REC_PRIVATE, None) == 0
    hidden = hidden and libc.mount(b"none", b"/proc", b"tmpfs", 0, None) == 0
    assert hidden, os.strerror(ctypes.get_errno())
ddl.init()
for count in (0, 1, 3, 12, 256, 1024, 4090, 4096, 4097, 16_384, 16_385, 100_003):
    inputs = [np.random.default_rng([count, other]).integers(-9, 9, count) for other in range(ddl.size())]
    for _ in range(3):
        result = ddl.allreduce(inputs[ddl.rank()].astype(np.float32), "sum")
        assert (result == np.sum(inputs, axis=0)).all(), f"rank {ddl.rank()}: wrong at {count} elements"
    gathered = ddl.allgather(inputs[ddl.rank()])
    assert (gathered == np.stack(inputs)).all(), f"rank {ddl.rank()}: allgather is wrong at {count} elements"
    spread = ddl.alltoall(np.tile(inputs[ddl.rank()], (ddl.size(), 1)))
    assert (spread == np.stack(inputs)).all(), f"rank {ddl.rank()}: alltoall is wrong at {count} elements"
ddl.barrier()
if ddl.rank() == 0:
    print("right", flush=True)
