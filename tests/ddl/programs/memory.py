"""Buffers in host memory and in the stub's GPU if the CUDA runtime cannot tell them apart.

What cudaPointerGetAttributes says is up to the stub (DDL_STUB_POINTER_ERROR). With the argument `missing` there is no
runtime but the machine's own, if it has one: only the driver, which the program has loaded, knows the stub's memory.
"""

import os
import sys

import gpu
import numpy as np

import ddl


def main() -> None:
    if "missing" in sys.argv:
        del os.environ["DDL_CUDA_LIB"]
    ddl.init("-mode r")
    ones = np.ones(1000, np.float32)
    assert (ddl.allreduce(ones.copy()) == ddl.size()).all()
    try:
        ddl.allreduce(gpu.Array(ones))
    except ddl.DDLError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    assert (ddl.allreduce(ones.copy()) == ddl.size()).all()  # nothing is broken by it
    ddl.barrier()
    if ddl.rank() == 0:
        print("host: right", flush=True)


main()
