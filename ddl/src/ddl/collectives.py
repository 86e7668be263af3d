"""The collectives, for NumPy arrays and tensors that speak DLPack (PyTorch's on a CPU).

Arrays are contiguous, of float16, bfloat16 (`ml_dtypes`, PyTorch), float32, float64, int8, int32, int64 or uint8; any
shape and any size, 0 too. Every rank of `comm` (None: all ranks) makes the same calls, with the same shapes, types and
operations, in the same order.

Each function blocks and lets other Python threads run meanwhile; its `_async` form returns a `Request` at once. They
raise ArgumentError (an array, operation or root that is not allowed: nothing was started), MismatchError (ranks called
different things), RankTimeoutError and PeerLostError (another rank is missing, or dead), StateError.
"""

from __future__ import annotations

from typing import Literal

from ddl import library
from ddl.buffers import ArrayT, Buffer, buffer_of, empty_like
from ddl.communicator import Communicator, handle_of, number_of
from ddl.errors import ArgumentError
from ddl.request import Call, Request

Op = Literal["sum", "average", "min", "max", "product"]
OPS: dict[Op, int] = {"sum": 0, "average": 1, "min": 2, "max": 3, "product": 4}  # ddl_op of ddl.h
# ddl.h: tags of collectives that are made of messages; torch.distributed's tags have 32 bits
GATHER, SCATTER, ALLTOALL = 1 << 40, 1 << 41, 1 << 42


def allreduce(array: ArrayT, op: Op = "sum", *, comm: Communicator | None = None) -> ArrayT:
    """Reduce `array` over all ranks, element by element and in place, and return it.

    The result has the same bits on every rank. float16 and bfloat16 are added in float32 and rounded at each hop;
    integers wrap around; "average" divides the sum once, integers towards zero.
    """
    return _allreduce(array, op, comm).run()


def allreduce_async(array: ArrayT, op: Op = "sum", *, comm: Communicator | None = None) -> Request[ArrayT]:
    """`allreduce` that returns at once."""
    return _allreduce(array, op, comm).start()


def broadcast(array: ArrayT, root: int = 0, *, comm: Communicator | None = None) -> ArrayT:
    """Copy the root's `array` over everyone's, in place, and return it."""
    return _broadcast(array, root, comm).run()


def broadcast_async(array: ArrayT, root: int = 0, *, comm: Communicator | None = None) -> Request[ArrayT]:
    """`broadcast` that returns at once."""
    return _broadcast(array, root, comm).start()


def allgather(array: ArrayT, *, comm: Communicator | None = None) -> ArrayT:
    """Everyone's `array`, stacked: a new array of shape `(size, *array.shape)` whose row r is rank r's."""
    return _allgather(array, comm).run()


def allgather_async(array: ArrayT, *, comm: Communicator | None = None) -> Request[ArrayT]:
    """`allgather` that returns at once."""
    return _allgather(array, comm).start()


def reduce_scatter(array: ArrayT, op: Op = "sum", *, comm: Communicator | None = None) -> ArrayT:
    """This rank's row of the reduced `array`: that one has shape (size, ...), the new array that is returned (...)."""
    return _reduce_scatter(array, op, comm).run()


def reduce_scatter_async(array: ArrayT, op: Op = "sum", *, comm: Communicator | None = None) -> Request[ArrayT]:
    """`reduce_scatter` that returns at once."""
    return _reduce_scatter(array, op, comm).start()


def alltoall(array: ArrayT, *, comm: Communicator | None = None) -> ArrayT:
    """Row r of `array` goes to rank r: from shape (size, ...) to a new array of the same shape, with a row of each."""
    return _alltoall(array, comm).run()


def alltoall_async(array: ArrayT, *, comm: Communicator | None = None) -> Request[ArrayT]:
    """`alltoall` that returns at once."""
    return _alltoall(array, comm).start()


def barrier(*, comm: Communicator | None = None) -> None:
    """Return when every rank has called it."""
    _barrier(comm).run()


def barrier_async(*, comm: Communicator | None = None) -> Request[None]:
    """`barrier` that returns at once."""
    return _barrier(comm).start()


def _allreduce(array: ArrayT, op: Op, comm: Communicator | None) -> Call[ArrayT]:
    buffer = buffer_of(array, writable=True)
    address = buffer.address
    arguments = (address, address, buffer.count, buffer.type, _number_of(op), handle_of(comm))
    return Call("allreduce", arguments, buffer, array)


def _broadcast(array: ArrayT, root: int, comm: Communicator | None) -> Call[ArrayT]:
    buffer = buffer_of(array, writable=True)
    arguments = (buffer.address, buffer.count, buffer.type, number_of(root, "root"), handle_of(comm))
    return Call("broadcast", arguments, buffer, array)


def _allgather(array: ArrayT, comm: Communicator | None) -> Call[ArrayT]:
    buffer = buffer_of(array, writable=False)
    return _movement("allgather", array, buffer, buffer.count, (_size_of(comm), *buffer.shape), comm)


def _reduce_scatter(array: ArrayT, op: Op, comm: Communicator | None) -> Call[ArrayT]:
    buffer = _rows_of(array, comm)
    output = empty_like(array, buffer.shape[1:])
    target = buffer_of(output, writable=True)
    arguments = (buffer.address, target.address, target.count, buffer.type, _number_of(op), handle_of(comm))
    return Call("reduce_scatter", arguments, (buffer, target), output)


def _alltoall(array: ArrayT, comm: Communicator | None) -> Call[ArrayT]:
    buffer = _rows_of(array, comm)
    return _movement("alltoall", array, buffer, buffer.count // buffer.shape[0], buffer.shape, comm)


def _barrier(comm: Communicator | None) -> Call[None]:
    return Call("barrier", (handle_of(comm),), None, None)


def _movement(
    name: str, array: ArrayT, buffer: Buffer, count: int, shape: tuple[int, ...], comm: Communicator | None
) -> Call[ArrayT]:
    output = empty_like(array, shape)
    target = buffer_of(output, writable=True)
    arguments = (buffer.address, target.address, count, buffer.type, handle_of(comm))
    return Call(name, arguments, (buffer, target), output)


def _rows_of(array: ArrayT, comm: Communicator | None) -> Buffer:
    buffer = buffer_of(array, writable=False)
    size = _size_of(comm)
    if size == 0:
        raise ArgumentError("this communicator is DDL_COMM_NULL: this rank joined no group in ddl.split")
    if not buffer.shape or buffer.shape[0] != size:
        raise ArgumentError(f"array has shape {buffer.shape}: its first dimension must be {size}, a row for each rank")
    return buffer


def _size_of(comm: Communicator | None) -> int:
    handle_of(comm)  # raises before `size` is asked of what is no communicator
    return library.number("ddl_size", None) if comm is None else comm.size


def _number_of(op: Op) -> int:
    try:
        return OPS[op]
    except (KeyError, TypeError):
        raise ArgumentError(f"op is {op!r}: allowed are {', '.join(OPS)}") from None
