"""Calls on two ranks or more, beside their results: errors, requests, communicators, tensors."""

import gc
import sys
import time
import weakref
from collections.abc import Callable
from ctypes import byref, c_int, c_void_p

import numpy as np
import pytest

import ddl
from ddl import library


def raises(kind: type[Exception], *parts: str, call: Callable[[], object]) -> None:
    """Fail unless `call()` raises `kind` with every part in its message."""
    with pytest.raises(kind) as caught:
        call()
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, f"{caught.value} lacks {missing}"


def arguments() -> None:
    """Wrong arguments are ValueErrors, and break nothing."""
    ones = np.ones((4, 4), np.float32)
    raises(ddl.ArgumentError, "op is 'mean'", "average", call=lambda: ddl.allreduce(ones, "mean"))
    raises(ValueError, "root 99 is no rank", call=lambda: ddl.broadcast(ones, 99))
    for root in (2**32, 1.0, "0"):
        raises(ddl.ArgumentError, f"root is {root!r}, but must be a", call=lambda root=root: ddl.broadcast(ones, root))
    raises(ddl.ArgumentError, "comm is 3: expected a communicator", call=lambda: ddl.allgather(ones, comm=3))
    raises(ddl.ArgumentError, "a rank is 4294967296", call=lambda: ddl.create_group([2**32]))
    raises(ValueError, "not contiguous", call=lambda: ddl.allreduce(ones[:, ::2]))
    raises(ValueError, "float32", "complex64", call=lambda: ddl.allreduce(ones.astype("complex64")))
    raises(ValueError, "a row for each rank", call=lambda: ddl.reduce_scatter(np.ones((ddl.size() + 1, 2))))
    raises(ValueError, "list", call=lambda: ddl.allreduce([1.0]))  # type: ignore[type-var]
    ones.flags.writeable = False
    raises(ValueError, "read-only", call=lambda: ddl.allreduce(ones))
    raises(ddl.StateError, "ddl_finalize", call=ddl.init)
    assert (ddl.allreduce(np.ones(3)) == ddl.size()).all()


def requests() -> None:
    """Several are in flight at once; dropped ones keep their buffers; waiting twice is allowed."""
    arrays = [np.full(10_000 + i, i, np.float64) for i in range(12)]
    flying = [ddl.allreduce_async(array) for array in arrays]
    for i, request in reversed(list(enumerate(flying))):
        assert request.wait() is arrays[i]
        assert request.test()
        assert (request.wait() == i * ddl.size()).all()
    dropped = []
    for _ in range(5):
        array = np.ones(300_000, np.float32)
        dropped.append(weakref.ref(array))
        ddl.allreduce_async(array)
        del array
        gc.collect()
    done = ddl.barrier_async()
    while not done.test():
        pass
    gathered = ddl.allgather_async(np.array(ddl.rank())).wait()
    assert gathered.tolist() == list(range(ddl.size()))
    # Wait until the dropped requests have ended on every rank and freed their buffers: if a rank left earlier, they
    # would fail on the others.
    while ddl.allreduce_async(np.array([sum(one() is not None for one in dropped)])).wait() > 0:
        pass


def communicators() -> None:
    """Parts of the job compute beside one another, in the order that was asked for."""
    rank, size = ddl.rank(), ddl.size()
    part = ddl.split(rank % 2, key=-rank)
    assert part
    members = [r for r in reversed(range(size)) if r % 2 == rank % 2]
    with part:
        assert (part.rank, part.size) == (members.index(rank), len(members))
        assert ddl.allgather(np.array(rank), comm=part).tolist() == members
        assert ddl.allreduce(np.ones(5, np.int32), comm=part).tolist() == [len(members)] * 5
    raises(ddl.StateError, "freed", call=lambda: ddl.barrier(comm=part))
    raises(ValueError, "color is 2147483648", call=lambda: ddl.split(2**31))
    raises(ValueError, "color is 0.5, but must be a whole number", call=lambda: ddl.split(0.5))
    with ddl.split(0 if rank == 0 else None) as alone:
        assert bool(alone) == (rank == 0)
        assert (alone.rank, alone.size) == ((0, 1) if rank == 0 else (-1, 0))
        ones = np.ones(3)
        if rank == 0:
            assert ddl.allreduce(ones, comm=alone).tolist() == [1, 1, 1]
        else:  # it is not the group of all ranks
            for call in (
                lambda: ddl.allreduce(ones, comm=alone),
                lambda: ddl.allgather(ones, comm=alone),
                lambda: ddl.alltoall(np.zeros((0, 3)), comm=alone),
                lambda: ddl.reduce_scatter(np.zeros((0, 3)), comm=alone),
                lambda: ddl.barrier_async(comm=alone),
                lambda: ddl.split(0, comm=alone),
                lambda: library.number("ddl_size", alone.handle),
                lambda: library.call("ddl_comm_free", alone.handle),
            ):
                raises(ddl.ArgumentError, "DDL_COMM_NULL", call=call)


def made(name: str, *arguments: object) -> tuple[int, int | None]:
    """The result of a call that makes a communicator, and what it stores."""
    handle = c_void_p(12345)
    return getattr(library.load(), name)(*arguments, byref(handle)), handle.value


def failures() -> None:
    """If a call makes no communicator and its result is ignored, the handle is none, and not that of all ranks."""
    null, rank = c_void_p(-1).value, ddl.rank()
    argument, state, unsupported = 1, 2, 9
    freed = ddl.split(rank)
    handle = freed.handle
    freed.free()

    def group(*ranks: int) -> tuple[int, int | None]:
        return made("ddl_comm_create_group", (c_int * len(ranks))(*ranks), len(ranks), 0)

    assert group() == group(rank, rank) == group(rank, 99) == group((rank + 1) % ddl.size()) == (argument, null)
    assert made("ddl_comm_create_group", None, 1, 0) == (argument, null)
    assert made("ddl_comm_split", null, 0, 0) == (argument, null)
    assert made("ddl_comm_split", handle, 0, 0) == (state, null)
    assert made("ddl_comm_split", None, -1, 0) == (0, null)
    held: list[int | None] = []
    while (last := group(rank))[0] == 0:
        held.append(last[1])
    assert last == (unsupported, null)
    assert len(held) > 1000
    assert made("ddl_comm_split", None, 0, 0) == (unsupported, null)
    for one in held:
        library.call("ddl_comm_free", one)
    assert (ddl.allreduce(np.ones(3)) == ddl.size()).all()
    ddl.barrier()
    ddl.finalize()
    assert group(rank) == made("ddl_comm_split", None, 0, 0) == (state, null)
    ddl.init()


def tensors() -> None:
    """PyTorch's tensors are reduced in place, bfloat16 too."""
    import torch

    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        tensor = torch.full((3, 5), ddl.rank() + 1).to(dtype)
        address = tensor.data_ptr()
        result = ddl.allreduce(tensor, "max")
        assert result is tensor
        assert tensor.data_ptr() == address
        assert (tensor == ddl.size()).all()
        gathered = ddl.allgather(tensor[0])
        assert isinstance(gathered, torch.Tensor)
        assert gathered.shape == (ddl.size(), 5)
        assert gathered.dtype == dtype
    raises(ValueError, "contiguous", call=lambda: ddl.allreduce(torch.ones(4, 4).T[1:]))
    raises(ValueError, "grad", call=lambda: ddl.allreduce(torch.ones(4, requires_grad=True)))
    raises(ValueError, "bool", call=lambda: ddl.allreduce(torch.ones(4, dtype=torch.bool)))


def finalizing() -> None:
    """Calls in flight at finalize get an error; afterwards nothing works until the next init."""
    ddl.barrier()
    time.sleep(0.5)  # for who is still in the barrier: an error ends all calls on its communicator
    missing = ddl.allreduce_async(np.ones(10)) if ddl.rank() == 0 else None
    part_of_old = ddl.split  # the name stays; calls need an init
    ddl.finalize()
    ddl.finalize()
    assert not ddl.is_initialized()
    if missing is not None:
        raises(ddl.ShutdownError, "was finalized with allreduce", call=missing.wait)
    raises(ddl.StateError, "call ddl_init first", call=lambda: part_of_old(0))
    raises(ddl.StateError, "call ddl_init first", call=ddl.rank)
    ddl.init()
    assert ddl.allgather(np.array(ddl.rank())).tolist() == list(range(ddl.size()))


raises(ddl.StateError, "call ddl_init first", call=lambda: ddl.allreduce(np.ones(1)))
ddl.init()
globals()[sys.argv[1]]()
ddl.barrier()
if ddl.rank() == 0:
    print(f"{sys.argv[1]}: right", flush=True)
# No finalize: leaving is the exit handler's.
