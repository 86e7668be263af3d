"""Collectives of NumPy arrays, as requests of libddl, for front ends whose tensors lie in host memory.

Every rank has announced the call with the same types and shapes. Arrays are contiguous, and used where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddl.buffers import TYPES
from ddl.collectives import ALLTOALL, OPS
from ddl.communicator import Communicator
from ddl.errors import UnsupportedError
from ddl.frontends.core.ops import Op, check
from ddl.request import Call, Request

Array = NDArray[Any]
Requests = list[Request[None]]

_NUMBERS: dict[Op, int] = {op: OPS[op.value] for op in Op if op is not Op.Adasum}


def check_reducible(dtype: np.dtype[Any], op: Op) -> None:
    """Raise UnsupportedError if elements of that type cannot be reduced, and what `ops.check` raises."""
    check(op)
    if dtype.name not in TYPES:
        raise UnsupportedError(
            f"a reduction by {op.name} of {dtype.name}: there are reductions of {', '.join(TYPES)}: convert the tensor "
            "first"
        )


def neutral(op: Op, dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
    """An array that leaves the others of a reduction as they are: zeros for a sum."""
    value: float = 1 if op is Op.Product else 0
    if op in (Op.Min, Op.Max):
        if dtype.kind in "iu":
            value = np.iinfo(dtype).max if op is Op.Min else np.iinfo(dtype).min
        else:
            value = float("inf") if op is Op.Min else float("-inf")
    return np.full(tuple(shape), value, dtype)


def allreduce(array: Array, output: Array, op: Op, comm: Communicator) -> Requests:
    """Reduce `array` over all ranks into `output`, which may be the same array."""
    return [_start("allreduce", (array, output), array.size, TYPES[array.dtype.name], _NUMBERS[op], comm)]


def reduce_scatter(array: Array, output: Array, rows: Sequence[int], op: Op, comm: Communicator) -> Requests:
    """Reduce `array` into this rank's `output`; rank r keeps `rows[r]` rows."""
    if len(set(rows)) == 1:
        return [_start("reduce_scatter", (array, output), output.size, TYPES[array.dtype.name], _NUMBERS[op], comm)]
    blocks = _split(array, rows)
    targets = [output if rank == comm.rank else np.empty_like(block) for rank, block in enumerate(blocks)]
    return [its for block, target in zip(blocks, targets, strict=True) for its in allreduce(block, target, op, comm)]


def allgather(array: Array, output: Array, rows: Sequence[int], comm: Communicator) -> Requests:
    """Gather everyone's rows, `rows[r]` of rank r, into `output`."""
    if len(set(rows)) == 1:
        return [_start("allgather", (array, output), *_movable(array), comm)]
    blocks = _split(output, rows)
    blocks[comm.rank][...] = array
    return [its for rank, block in enumerate(blocks) for its in broadcast(block, rank, comm)]


def broadcast(array: Array, root: int, comm: Communicator) -> Requests:
    """Copy the root's array over everyone's."""
    count, number = _movable(array)
    return [_start("broadcast", (array,), count, number, root, comm)]


def alltoall(array: Array, output: Array, rows: Sequence[Sequence[int]], comm: Communicator) -> Requests:
    """Send `rows[r][s]` rows from each rank r to each rank s; this rank sends `array` and receives `output`."""
    if len({count for its in rows for count in its}) == 1:
        count, number = _movable(array)
        return [_start("alltoall", (array, output), count // comm.size, number, comm)]
    sent = _split(array, rows[comm.rank])
    received = _split(output, [its[comm.rank] for its in rows])
    received[comm.rank][...] = sent[comm.rank]
    # Every rank begins with its next neighbour, so that not all of them send to the same one.
    order = [(comm.rank + distance) % comm.size for distance in range(1, comm.size)]
    requests = [_message("recv", received[rank], rank, comm) for rank in reversed(order)]
    return requests + [_message("send", sent[rank], rank, comm) for rank in order]


def _start(name: str, arrays: Sequence[Array], *arguments: object) -> Request[None]:
    *others, comm = arguments
    assert isinstance(comm, Communicator)
    addresses = [_address(array) for array in arrays]
    return Call(name, (*addresses, *others, comm.handle), arrays, None).start()


def _message(name: str, array: Array, peer: int, comm: Communicator) -> Request[None]:
    source = (None,) if name == "recv" else ()
    return Call(name, (_address(array), *_movable(array), peer, ALLTOALL, comm.handle, *source), array, None).start()


def _movable(array: Array) -> tuple[int, int]:
    """The count and type of elements, for collectives that only move bits: bytes, if libddl has not the type."""
    number = TYPES.get(array.dtype.name)
    return (array.nbytes, TYPES["uint8"]) if number is None else (array.size, number)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _split(array: Array, rows: Sequence[int]) -> list[Array]:
    """Consecutive parts of the array, of as many rows each."""
    return [array[first:last] for first, last in pairwise(accumulate(rows, initial=0))]
