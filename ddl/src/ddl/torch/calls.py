"""The calls of libddl that make up a collective of torch.distributed.

The result of a call is the step that finishes it, or None. Nothing is started here, so nothing is in flight if one of
several tensors is wrong. Tensors are used in place; those that are not contiguous, and outputs that share memory with
inputs, go through a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ddl import request
from ddl.communicator import Communicator
from ddl.errors import ArgumentError
from ddl.torch.tensors import (
    check,
    copy_back,
    movable,
    need_one_for_each,
    overlap,
    packed,
    reducible,
    same_size,
    same_type,
    target_of,
)

Step = Callable[[], None]
Call: TypeAlias = request.Call[Step | None]


def allreduce(tensor: Tensor, op: ReduceOp, comm: Communicator) -> Call:
    """Reduce a tensor over all ranks, in place."""
    memory = packed(tensor)
    address = memory.data_ptr()
    arguments = (address, address, *reducible(memory, op), comm.handle)
    return Call("allreduce", arguments, memory, back(memory, tensor))


def contribute(tensor: Tensor, op: ReduceOp, comm: Communicator, result: Tensor | None = None) -> Call:
    """An allreduce that does not write to the tensor; the outcome goes to `result`, or is dropped."""
    memory = packed(tensor)
    scratch = memory.new_empty(memory.shape)
    arguments = (memory.data_ptr(), scratch.data_ptr(), *reducible(memory, op), comm.handle)
    return Call("allreduce", arguments, (memory, scratch), None if result is None else back(scratch, result))


def reduce_scatter(output: Tensor, input: Tensor, op: ReduceOp, comm: Communicator) -> Call:
    """Reduce `input`, and keep this rank's part: one of as many equal parts as there are ranks."""
    same_type([input, output], "reduce_scatter")
    _need_multiple(input, output, comm, "reduce_scatter: input", "output")
    memory, target = packed(input), target_of(output)
    if overlap(memory, target):
        target = target.new_empty(target.shape)
    arguments = (memory.data_ptr(), target.data_ptr(), *reducible(memory, op, comm.size), comm.handle)
    return Call("reduce_scatter", arguments, (memory, target), back(target, output))


def reduce_scatter_list(output: Tensor, blocks: Sequence[Tensor], op: ReduceOp, comm: Communicator) -> list[Call]:
    """Reduce tensors, one for each rank, which may be of different sizes, and keep this rank's."""
    need_one_for_each(blocks, comm.size, "reduce_scatter: a list of inputs")
    same_type([*blocks, output], "reduce_scatter")
    for block in blocks:
        check(block)
    if same_size(blocks):
        every = torch.cat([block.detach().reshape(-1) for block in blocks])
        return [reduce_scatter(output, every, op, comm)]
    own = blocks[comm.rank]
    if own.numel() != output.numel():
        raise ArgumentError(
            f"reduce_scatter: this rank's input has {own.numel()} elements, and its output {output.numel()}: give "
            "both the same size"
        )
    # By number: one tensor may stand for several blocks.
    return [contribute(block, op, comm, output if rank == comm.rank else None) for rank, block in enumerate(blocks)]


def broadcast(tensor: Tensor, root: int, comm: Communicator) -> Call:
    """Overwrite everyone's tensor with the root's."""
    sends = root == comm.rank
    memory = packed(tensor) if sends else target_of(tensor)
    finish = None if sends else back(memory, tensor)
    return Call("broadcast", (*movable(memory), root, comm.handle), memory, finish)


def allgather(output: Tensor, input: Tensor, comm: Communicator) -> Call:
    """Gather everyone's tensor into one, in the order of ranks."""
    same_type([input, output], "allgather")
    _need_multiple(output, input, comm, "allgather: output", "input")
    memory, target = packed(input), target_of(output)
    place = target.data_ptr() + comm.rank * memory.nbytes
    if overlap(memory, target) and memory.data_ptr() != place:
        memory = memory.clone()
    return _allgather(target, memory, comm, back(target, output))


def allgather_list(outputs: Sequence[Tensor], input: Tensor, comm: Communicator) -> list[Call]:
    """Gather everyone's tensor into a list, one for each rank. The tensors of the list may differ in size."""
    need_one_for_each(outputs, comm.size, "allgather: the list of outputs")
    same_type([input, *outputs], "allgather")
    for output in outputs:
        check(output)
    own = outputs[comm.rank]
    if input.numel() != own.numel():
        raise ArgumentError(
            f"allgather: this rank, {comm.rank}, gives {input.numel()} elements, but its own output has "
            f"{own.numel()}: give both the same size"
        )
    memory = packed(input)
    if not same_size(outputs):
        own.detach().copy_(memory.view(own.shape))
        return [broadcast(output, rank, comm) for rank, output in enumerate(outputs)]
    gathered = memory.new_empty(comm.size, memory.numel())

    def finish() -> None:
        for part, output in zip(gathered, outputs, strict=True):
            output.detach().copy_(part.view(output.shape))

    return [_allgather(gathered, memory, comm, finish)]


def barrier(comm: Communicator) -> Call:
    """Finished on no rank before every rank has called it."""
    return Call("barrier", (comm.handle,), None, None)


def back(memory: Tensor, tensor: Tensor) -> Step | None:
    """A step that copies `memory` to the tensor; None if it is the tensor's own memory."""
    if memory.data_ptr() == tensor.data_ptr():
        return None
    return lambda: copy_back(memory, tensor)


def all_back(memories: Sequence[Tensor], tensors: Sequence[Tensor]) -> Step | None:
    """`back` of each."""
    return all_of([back(memory, tensor) for memory, tensor in zip(memories, tensors, strict=True)])


def all_of(steps: Sequence[Step | None]) -> Step | None:
    """One step that runs all of them; None if there are none."""
    wanted = [step for step in steps if step is not None]
    if len(wanted) < 2:
        return wanted[0] if wanted else None

    def every() -> None:
        for step in wanted:
            step()

    return every


def _allgather(target: Tensor, memory: Tensor, comm: Communicator, finish: Step | None) -> Call:
    address, count, kind = movable(memory)
    return Call("allgather", (address, target.data_ptr(), count, kind, comm.handle), (memory, target), finish)


def _need_multiple(large: Tensor, small: Tensor, comm: Communicator, what: str, other: str) -> None:
    if large.numel() != small.numel() * comm.size:
        raise ArgumentError(
            f"{what} has {large.numel()} elements (shape {tuple(large.shape)}), and {other} {small.numel()} (shape "
            f"{tuple(small.shape)}): it must have {comm.size} times as many, a part for each rank"
        )
