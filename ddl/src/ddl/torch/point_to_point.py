"""Messages between two ranks of a communicator, and the collectives that are made of them.

gather, scatter and alltoall exchange blocks that may be of different sizes, of which no rank knows all: each block is a
message of its own, and a rank's own block is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_int

from torch import Tensor

from ddl.collectives import ALLTOALL, GATHER, SCATTER
from ddl.communicator import Communicator
from ddl.errors import ArgumentError
from ddl.request import Call, Request
from ddl.torch.tensors import any_overlap, movable, need_one_for_each

ANY_RANK = -1


def send(memory: Tensor, peer: int, tag: int, comm: Communicator) -> Request[None]:
    """Begin to send a contiguous tensor."""
    return Call("send", (*movable(memory), peer, tag, comm.handle), memory, None).start()


def receive(memory: Tensor, peer: int, tag: int, comm: Communicator, source: c_int | None = None) -> Request[None]:
    """Begin to receive into a contiguous tensor; `source` gets the sender's rank, before it is finished."""
    arguments = (*movable(memory), peer, tag, comm.handle, None if source is None else byref(source))
    return Call("recv", arguments, (memory, source), None).start()


def gather(mine: Tensor, blocks: Sequence[Tensor], root: int, comm: Communicator) -> list[Request[None]]:
    """Gather each rank's `mine` into the root's `blocks`. Other ranks give no blocks."""
    if comm.rank != root:
        return [send(mine, root, GATHER, comm)]
    need_one_for_each(blocks, comm.size, "gather: the root's list of outputs")
    blocks[root].copy_(mine.view(blocks[root].shape))
    return [receive(block, rank, GATHER, comm) for rank, block in enumerate(blocks) if rank != root]


def scatter(mine: Tensor, blocks: Sequence[Tensor], root: int, comm: Communicator) -> list[Request[None]]:
    """Send the root's `blocks` to each rank's `mine`. Other ranks give no blocks."""
    if comm.rank != root:
        return [receive(mine, root, SCATTER, comm)]
    need_one_for_each(blocks, comm.size, "scatter: the root's list of inputs")
    mine.copy_(blocks[root].view(mine.shape))
    return [send(block, rank, SCATTER, comm) for rank, block in enumerate(blocks) if rank != root]


def alltoall(outputs: Sequence[Tensor], inputs: Sequence[Tensor], comm: Communicator) -> list[Request[None]]:
    """Send `inputs[r]` to rank r, receive `outputs[r]` from it. No output may share memory with an input."""
    need_one_for_each(inputs, comm.size, "alltoall: the list of inputs")
    need_one_for_each(outputs, comm.size, "alltoall: the list of outputs")
    if any_overlap(inputs, outputs):
        raise ArgumentError("alltoall: inputs and outputs overlap: it cannot work in place, give it two buffers")
    own, its = inputs[comm.rank], outputs[comm.rank]
    if own.numel() != its.numel():
        raise ArgumentError(
            f"alltoall: rank {comm.rank} sends itself {own.numel()} elements, but expects {its.numel()}: give both the "
            "same size"
        )
    its.detach().copy_(own.view(its.shape))  # detached, it may be a part of an inference tensor, too
    # Every rank begins with its next neighbour, so that not all of them send to the same one.
    order = [(comm.rank + distance) % comm.size for distance in range(1, comm.size)]
    requests = [receive(outputs[rank], rank, ALLTOALL, comm) for rank in reversed(order)]
    return requests + [send(inputs[rank], rank, ALLTOALL, comm) for rank in order]


def parts_of(tensor: Tensor, splits: Sequence[int], what: str, comm: Communicator) -> list[Tensor]:
    """A part of the tensor's first dimension for each rank: of as many rows as `splits` says, or all of the same."""
    rows = tensor.shape[0] if tensor.dim() > 0 else 1
    if not splits:
        if rows % comm.size != 0:
            raise ArgumentError(
                f"all_to_all_single: {what} has {rows} rows, which cannot be parted equally over {comm.size} ranks: "
                f"give {what}_split_sizes"
            )
        splits = [rows // comm.size] * comm.size
    if len(splits) != comm.size or sum(splits) != rows or min(splits) < 0:
        raise ArgumentError(
            f"all_to_all_single: {what}_split_sizes is {list(splits)}: it must have {comm.size} sizes, one for each "
            f"rank, whose sum is {rows}, the rows of {what}"
        )
    return list(tensor.split(list(splits))) if tensor.dim() > 0 else [tensor]
