"""ddl and mpi4py in one process: arguments say which initialises MPI, with which threads, and which ends it."""

import sys

import mpi4py
import numpy as np
import pytest

import ddl

FIRST, mpi4py.rc.thread_level, LAST = sys.argv[1:]  # mpi4py|ddl, multiple|serialized|..., mpi4py|ddl|exit

if FIRST == "mpi4py":
    from mpi4py import MPI

    try:
        ddl.init()
    except ddl.UnsupportedError as error:
        print(f"refused: {error}", flush=True)
        sys.exit(0)
else:
    ddl.init()
    from mpi4py import MPI

assert MPI.Is_initialized()
assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
comm = MPI.COMM_WORLD
assert (comm.Get_rank(), comm.Get_size()) == (ddl.rank(), ddl.size())
for step in range(20):
    # Both have messages in flight, and neither takes the other's.
    ours, theirs = np.full(50_000, ddl.rank() + step, np.float64), np.full(50_000, ddl.rank() + 1.0)
    request = ddl.allreduce_async(ours)
    comm.Allreduce(MPI.IN_PLACE, theirs)
    neighbour = comm.sendrecv(ddl.rank(), (ddl.rank() + 1) % ddl.size(), source=(ddl.rank() - 1) % ddl.size())
    assert neighbour == (ddl.rank() - 1) % ddl.size()
    assert (request.wait() == sum(r + step for r in range(ddl.size()))).all()
    assert (theirs == sum(r + 1 for r in range(ddl.size()))).all()

if LAST == "mpi4py":
    MPI.Finalize()
    with pytest.raises(ddl.StateError, match="call ddl_init first"):
        ddl.barrier()
    with pytest.raises(ddl.StateError, match="MPI was finalized"):
        ddl.init()
elif LAST == "ddl":
    ddl.finalize()
    assert comm.allreduce(1) == comm.Get_size()
    ddl.init()  # MPI lives on, so it may come again
    assert (ddl.allreduce(np.ones(3)) == ddl.size()).all()
    ddl.finalize()
    comm.Barrier()
print("right", flush=True)
