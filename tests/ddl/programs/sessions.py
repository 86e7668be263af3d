"""Sessions one after the other in mode n, by a program that has not touched a GPU: what they leave behind."""

import ctypes
import os
import sys

import numpy as np

import ddl

stub = ctypes.CDLL(os.environ["DDL_CUDA_LIB"])
stub.stub_contexts.restype = ctypes.c_ulonglong


def main(device: bool) -> None:
    for _ in range(3):
        ddl.init("-mode n")
        rank, size = ddl.rank(), ddl.size()
        data: object = np.ones(100_000, np.float32)
        if device:
            import gpu

            data = gpu.Array(np.ones(100_000, np.float32))
        requests = [ddl.allreduce_async(data) for _ in range(3)]
        for request in requests:
            request.wait()
        alive = stub.stub_communicators()
        assert alive == 1, f"{alive} NCCL communicators, of which this session has one"
        if not device:  # gpu.py makes its GPU current, as programs do
            used = stub.stub_contexts()
            assert used == 1 << rank, f"rank {rank} has contexts on the GPUs {used:b}"
        ddl.barrier()
        ddl.finalize()
        assert stub.stub_communicators() <= 1
    if rank == 0:
        print(f"{size} ranks: right", flush=True)


main("device" in sys.argv)
