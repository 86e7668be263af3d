"""Calls with buffers in the stub's GPUs: which are refused, and what they wait for."""

import ctypes
import sys

import gpu
import numpy as np
import pytest

import ddl
from ddl import library

SUM, FLOAT32, COUNT = 0, 2, 50_000


def allreduce(source: int, target: int) -> None:
    library.call("ddl_allreduce", source, target, COUNT, FLOAT32, SUM, None)


def refused(source: int, target: int, *words: str) -> None:
    """Fail unless the call is an argument error with these words; nothing is broken by it."""
    with pytest.raises(ddl.ArgumentError) as caught:
        allreduce(source, target)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{caught.value} lacks {missing}"


def main() -> None:
    gpu.runtime.stub_contexts.restype = ctypes.c_ulonglong
    ddl.init(sys.argv[1])
    rank, size = ddl.rank(), ddl.size()
    host = np.full(COUNT, rank + 1, np.float32)
    total = np.full(COUNT, size * (size + 1) / 2, np.float32)
    first, second = gpu.Array(host), gpu.Array(np.zeros_like(host))

    refused(host.ctypes.data, first.address, "the input is in host memory", f"the output in GPU {rank}'s memory")
    refused(first.address, host.ctypes.data, f"the input is in GPU {rank}'s memory", "the output in host memory")
    allreduce(first.address, second.address)
    assert (second.numpy() == total).all()
    assert (first.numpy() == host).all()
    assert (ddl.allreduce(host.copy()) == total).all()  # host memory, in the same session

    gpu.check(gpu.runtime.cudaSetDevice(size + rank), "cudaSetDevice")
    elsewhere = gpu.Array(host)
    gpu.check(gpu.runtime.cudaSetDevice(rank), "cudaSetDevice")
    refused(elsewhere.address, elsewhere.address, f"GPU {size + rank}'s memory", f"this rank uses GPU {rank}")

    # Messages between two ranks are host memory's.
    managed = ctypes.c_void_p()
    gpu.check(gpu.runtime.cudaMallocManaged(ctypes.byref(managed), host.nbytes, 1), "cudaMallocManaged")
    for address in (first.address, managed.value):
        arguments = (address, COUNT, FLOAT32, 1 - rank, 0, None)
        for call in (("ddl_send", *arguments), ("ddl_recv", *arguments, None)):
            with pytest.raises(ddl.ArgumentError, match="copy it to host memory first"):
                library.call(*call)

    # Work that a stream has still to do: the call waits for it.
    stream = ctypes.c_void_p()
    gpu.check(gpu.runtime.cudaStreamCreateWithFlags(ctypes.byref(stream), 1), "cudaStreamCreateWithFlags")
    pinned = ctypes.c_void_p()
    gpu.check(gpu.runtime.cudaHostAlloc(ctypes.byref(pinned), host.nbytes, 0), "cudaHostAlloc")
    for step in range(20):
        values = np.full(COUNT, (rank + 1) * step, np.float32)
        ctypes.memmove(pinned, values.ctypes.data, values.nbytes)
        for _ in range(5):  # so much that it cannot be done when the call is made
            gpu.runtime.cudaMemcpyAsync(first.address, pinned, values.nbytes, gpu.TO_DEVICE, stream)
        library.call("ddl_set_stream", stream)
        allreduce(first.address, first.address)
        assert (first.numpy() == total * step).all(), step
    library.call("ddl_set_stream", None)

    # Managed memory counts as host memory, which the GPU may still be writing.
    managed = ctypes.c_void_p()
    gpu.check(gpu.runtime.cudaMallocManaged(ctypes.byref(managed), host.nbytes, 1), "cudaMallocManaged")
    view = np.ctypeslib.as_array(ctypes.cast(managed, ctypes.POINTER(ctypes.c_float)), (COUNT,))
    library.call("ddl_set_stream", stream)
    for step in range(1, 6):
        values = np.full(COUNT, (rank + 1) * step, np.float32)
        ctypes.memmove(pinned, values.ctypes.data, values.nbytes)
        for _ in range(5):
            gpu.check(
                gpu.runtime.cudaMemcpyAsync(managed, pinned, host.nbytes, gpu.TO_DEVICE, stream), "cudaMemcpyAsync"
            )
        allreduce(managed.value or 0, managed.value or 0)
        assert (view == total * step).all(), step

    # A stream of another GPU.
    foreign = ctypes.c_void_p()
    gpu.check(gpu.runtime.cudaSetDevice(size + rank), "cudaSetDevice")
    gpu.check(gpu.runtime.cudaStreamCreateWithFlags(ctypes.byref(foreign), 1), "cudaStreamCreateWithFlags")
    gpu.check(gpu.runtime.cudaSetDevice(rank), "cudaSetDevice")
    library.call("ddl_set_stream", foreign)
    refused(first.address, first.address, f"the stream of ddl_set_stream is not of GPU {rank}")
    library.call("ddl_set_stream", None)

    with ddl.split(rank % 2) as group:  # by rings, whatever the mode of all ranks
        part = ddl.allreduce(gpu.Array(host), comm=group).numpy()
        assert (part == sum(r + 1 for r in range(rank % 2, size, 2))).all()
    ddl.barrier()
    # On no GPU but those that the program has used, whichever thread did the work.
    assert gpu.runtime.stub_contexts() == 1 << rank | 1 << (size + rank), f"{gpu.runtime.stub_contexts():b}"
    if rank == 0:
        print("device: right", flush=True)


main()
