"""A process group of torch.distributed over a communicator of libddl.

Collectives start at once and run in libddl's own thread. Tensors are used where they lie; those that are not contiguous
go through a copy. torch.distributed calls most methods by two names, an older (`_allgather_base`) and one since 2.13
(`all_gather_single`).
"""

# The base declares each method also by forms that torch.distributed and PyTorch's C++ never call.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from ctypes import c_int
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from ddl import request
from ddl.communicator import Communicator
from ddl.errors import ArgumentError, StateError
from ddl.request import Request
from ddl.torch import point_to_point
from ddl.torch.streams import Order, order_of
from ddl.torch.tensors import (
    check,
    copy_back,
    flat,
    movable,
    overlap,
    packed,
    packed_on_host,
    reducible,
    same_size,
    same_type,
    target_of,
    target_on_host,
    unflatten,
)
from ddl.torch.work import Reaper, Work

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Finish = Callable[[], None]


class Options(Protocol):
    """What torch.distributed passes with a call (AllreduceOptions and others). Some have reduceOp, some rootRank."""

    asyncOp: bool


class ProcessGroup(dist.ProcessGroup):
    """`leave` is called when the group is destroyed, in the place of freeing its communicator."""

    def __init__(
        self, store: Store | None, comm: Communicator, name: str, leave: Callable[[], None] | None = None
    ) -> None:
        # The form with the store makes no group that Python may override.
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]
        self._store = store
        self._comm = comm
        self._leave = leave
        self._name = name
        self._description = "undefined"
        self._sequence = 0
        self._coalescing: list[Work] | None = None
        self._ended = False
        self._in_order = Reaper(f"ddl-group-{name}", any_order=False)
        self._in_any_order = Reaper(f"ddl-group-{name}-messages", any_order=True)

    # ---- What it is ----------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """The name that init_process_group knows it by."""
        return "ddl"

    def _get_backend_name(self) -> str:
        return "ddl"

    def name(self) -> str:
        """The same."""
        return "ddl"

    @property
    def group_name(self) -> str:
        """The name that torch.distributed gave it."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What torch.distributed says it is for."""
        return self._description

    def getGroupName(self) -> str:
        """`group_name`, for PyTorch's C++."""
        return self._name

    def getGroupDesc(self) -> str:
        """`group_desc`, for PyTorch's C++."""
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def get_group_store(self) -> Store | None:
        """The store that torch.distributed made for it."""
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def set_timeout(self, timeout: timedelta) -> None:
        """How long calls from now on wait for a rank."""
        self._comm.set_timeout(timeout.total_seconds())

    @property
    def communicator(self) -> Communicator:
        """What its calls go through."""
        return self._comm

    @property
    def has_ended(self) -> bool:
        """Whether it was shut down."""
        return self._ended

    def shutdown(self) -> None:
        """End the group, without waiting for calls in flight. With that of all ranks they end with ShutdownError."""
        if self._ended:
            return
        self._ended = True
        if self._leave is not None:
            self._leave()
        self._in_order.stop()
        self._in_any_order.stop()
        if self._leave is None:
            with suppress(StateError):  # the job is left already, or something is still awaited
                self._comm.free()

    def abort(self) -> None:
        """As `shutdown`."""
        self.shutdown()

    # ---- Reductions ----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Options | None = None) -> Work:
        """Reduce each tensor over all ranks, in place."""
        return self._each("allreduce", opts, tensors, [self._allreduce(tensor, opts) for tensor in tensors])

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Options | None = None) -> Work:
        """The same."""
        return self.allreduce(tensors, opts)

    def _allreduce(self, tensor: Tensor, opts: Options | None) -> Start:
        memory = packed(tensor)
        it, op = reducible(memory, _op(opts))
        arguments = (it.address, it.address, it.count, it.type, op, self._comm.handle)
        return Start("allreduce", arguments, memory, _back(memory, tensor))

    def reduce(self, tensors: list[Tensor], opts: Options | None = None) -> Work:
        """Reduce each tensor to the root's; the others' stay as they are."""
        keeps = _root(opts) == self._comm.rank
        starts = [self._allreduce(tensor, opts) if keeps else self._contribute(tensor, opts) for tensor in tensors]
        return self._each("reduce", opts, tensors, starts)

    def _contribute(self, tensor: Tensor, opts: Options | None, result: Tensor | None = None) -> Start:
        memory = packed(tensor)
        scratch = torch.empty_like(memory)
        it, op = reducible(memory, _op(opts))
        arguments = (it.address, scratch.data_ptr(), it.count, it.type, op, self._comm.handle)
        return Start("allreduce", arguments, (memory, scratch), None if result is None else _back(scratch, result))

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options | None = None) -> Work:
        """Reduce each list of tensors, one for each rank, and keep this rank's."""
        starts = []
        for output, blocks in zip(outputs, inputs, strict=True):
            self._need_one_for_each(blocks, "reduce_scatter: a list of inputs")
            same_type([*blocks, output], "reduce_scatter")
            for block in blocks:
                check(block)
            if same_size(blocks):
                starts.append(self._reduce_scatter(output, flat(blocks), opts))
            else:
                starts += self._reduce_to_each(output, blocks, opts)
        return self._each("reduce_scatter", opts, outputs, starts)

    def _reduce_to_each(self, output: Tensor, blocks: list[Tensor], opts: Options | None) -> list[Start]:
        own = blocks[self._comm.rank]
        if own.numel() != output.numel():
            raise ArgumentError(
                f"reduce_scatter: this rank's input has {own.numel()} elements, and its output {output.numel()}: give "
                "both the same size"
            )
        # By number: one tensor may stand for several blocks.
        return [
            self._contribute(block, opts, output if rank == self._comm.rank else None)
            for rank, block in enumerate(blocks)
        ]

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Options | None = None) -> Work:
        """Reduce `input`, and keep this rank's part of as many as there are ranks."""
        same_type([input, output], "reduce_scatter")
        return self._each("reduce_scatter", opts, [output], [self._reduce_scatter(output, packed(input), opts)])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options | None = None
    ) -> Work:
        """The same of several tensors."""
        starts = []
        for output, input in zip(outputs, inputs, strict=True):
            same_type([input, output], "reduce_scatter")
            starts.append(self._reduce_scatter(output, packed(input), opts))
        return self._each("reduce_scatter", opts, outputs, starts)

    def _reduce_scatter(self, output: Tensor, memory: Tensor, opts: Options | None) -> Start:
        self._need_multiple(memory, output, "reduce_scatter: input", "output")
        target = target_of(output)
        if overlap(memory, target):
            target = torch.empty_like(target)
        it, op = reducible(memory, _op(opts), self._comm.size)
        arguments = (it.address, target.data_ptr(), it.count, it.type, op, self._comm.handle)
        return Start("reduce_scatter", arguments, (memory, target), _back(target, output))

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- Movements -----------------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Options | None = None) -> Work:
        """The root's tensors over everyone's."""
        starts = [self._broadcast(tensor, _root(opts)) for tensor in tensors]
        return self._each("broadcast", opts, tensors, starts)

    def _broadcast(self, tensor: Tensor, root: int) -> Start:
        sends = root == self._comm.rank
        memory = packed(tensor) if sends else target_of(tensor)
        it = movable(memory)
        arguments = (it.address, it.count, it.type, root, self._comm.handle)
        return Start("broadcast", arguments, memory, None if sends else _back(memory, tensor))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options | None = None) -> Work:
        """Everyone's tensor to a list of one for each rank; of different sizes where the list says so."""
        starts = []
        for targets, input in zip(outputs, inputs, strict=True):
            starts += self._gather_to_list(targets, input)
        return self._each("allgather", opts, [target for targets in outputs for target in targets], starts)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options | None = None
    ) -> Work:
        """Several tensors of everyone; `outputs[r][i]` is tensor i of rank r."""
        by_input = [[its[index] for its in outputs] for index in range(len(inputs))]
        return self.allgather(by_input, inputs, opts)

    def _gather_to_list(self, targets: list[Tensor], input: Tensor) -> list[Start]:
        self._need_one_for_each(targets, "allgather: the list of outputs")
        same_type([input, *targets], "allgather")
        for target in targets:
            check(target)
        if input.numel() != targets[self._comm.rank].numel():
            raise ArgumentError(
                f"allgather: this rank, {self._comm.rank}, gives {input.numel()} elements, but its own output has "
                f"{targets[self._comm.rank].numel()}: give both the same size"
            )
        memory = packed(input)
        if not same_size(targets):
            targets[self._comm.rank].detach().copy_(memory.view(targets[self._comm.rank].shape))
            return [self._broadcast(target, rank) for rank, target in enumerate(targets)]
        gathered = memory.new_empty(memory.numel() * self._comm.size)
        start = self._allgather(gathered, memory)
        return [Start(start.name, start.arguments, start.buffers, lambda: unflatten(gathered, targets))]

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Options | None = None) -> Work:
        """Everyone's tensor to one, in the order of ranks."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options | None = None
    ) -> Work:
        """The same of several tensors."""
        starts = []
        for output, input in zip(outputs, inputs, strict=True):
            same_type([input, output], "allgather")
            self._need_multiple(output, input, "allgather: output", "input")
            memory, target = packed(input), target_of(output)
            place = target.data_ptr() + self._comm.rank * memory.nbytes
            if overlap(memory, target) and memory.data_ptr() != place:
                memory = memory.clone()
            start = self._allgather(target, memory)
            starts.append(Start(start.name, start.arguments, start.buffers, _back(target, output)))
        return self._each("allgather", opts, outputs, starts)

    def _allgather(self, target: Tensor, memory: Tensor) -> Start:
        it = movable(memory)
        arguments = (it.address, target.data_ptr(), it.count, it.type, self._comm.handle)
        return Start("allgather", arguments, (memory, target), None)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options | None = None) -> Work:
        """Everyone's tensor to the root's list."""
        targets = outputs[0] if outputs else []
        same_type([*inputs, *targets], "gather")
        blocks = [target_on_host(target) for target in targets]
        requests = point_to_point.gather(packed_on_host(inputs[0]), blocks, _root(opts), self._comm)
        return self._messages("gather", opts, requests, targets, _all_back(blocks, targets))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options | None = None) -> Work:
        """The root's list, a tensor to each rank."""
        blocks = [packed_on_host(block) for block in inputs[0]] if inputs else []
        same_type([*outputs, *blocks], "scatter")
        target = target_on_host(outputs[0])
        requests = point_to_point.scatter(target, blocks, _root(opts), self._comm)
        return self._messages("scatter", opts, requests, outputs, _all_back([target], outputs))

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Options | None = None,
    ) -> Work:
        """Parts of `input`'s first dimension to each rank, and theirs to `output`; in equal parts without splits."""
        same_type([output, input], "all_to_all_single")
        memory, target = packed_on_host(input), target_on_host(output)
        outputs = self._parts_of(target, output_splits, "output")
        inputs = self._parts_of(memory, input_splits, "input")
        requests = point_to_point.alltoall(outputs, inputs, self._comm)
        return self._messages("alltoall", opts, requests, [output], _all_back([target], [output]))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Options | None = None) -> Work:
        """A tensor to each rank, and one of each; all may be of different sizes."""
        same_type([*outputs, *inputs], "alltoall")
        targets = [target_on_host(output) for output in outputs]
        requests = point_to_point.alltoall(targets, [packed_on_host(input) for input in inputs], self._comm)
        return self._messages("alltoall", opts, requests, outputs, _all_back(targets, outputs))

    alltoall_base = all_to_all_single

    def _parts_of(self, tensor: Tensor, splits: Sequence[int], what: str) -> list[Tensor]:
        size = self._comm.size
        rows = tensor.shape[0] if tensor.dim() > 0 else 1
        if not splits:
            if rows % size != 0:
                raise ArgumentError(
                    f"all_to_all_single: {what} has {rows} rows, which cannot be parted equally over {size} ranks: "
                    f"give {what}_split_sizes"
                )
            splits = [rows // size] * size
        if len(splits) != size or sum(splits) != rows or min(splits) < 0:
            raise ArgumentError(
                f"all_to_all_single: {what}_split_sizes is {list(splits)}: it must have {size} sizes, one for each "
                f"rank, whose sum is {rows}, the rows of {what}"
            )
        return list(tensor.split(list(splits))) if tensor.dim() > 0 else [tensor]

    # ---- Messages and the barrier --------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """A tensor to another rank of the group."""
        requests = [point_to_point.send(packed_on_host(tensor), peer, tag, self._comm) for tensor in tensors]
        return self._messages("send", None, requests, tensors, None)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """A tensor from another rank of the group."""
        return self._receive(tensors, peer, tag, c_int(peer))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        """A tensor from whoever sends first: `Work.source_rank` says who."""
        return self._receive(tensors, point_to_point.ANY_RANK, tag, c_int(point_to_point.ANY_RANK))

    def _receive(self, tensors: list[Tensor], peer: int, tag: int, source: c_int) -> Work:
        targets = [target_on_host(tensor) for tensor in tensors]
        requests = [point_to_point.receive(target, peer, tag, self._comm, source) for target in targets]
        return self._messages("recv", None, requests, tensors, _all_back(targets, tensors), lambda: source.value)

    def barrier(self, opts: Options | None = None) -> Work:
        """Finished on no rank before every rank has called it."""
        return self._each("barrier", opts, [], [Start("barrier", (self._comm.handle,), None, None)])

    # ---- Starting ------------------------------------------------------------------------------------------------

    def _each(self, name: str, opts: Options | None, results: list[Tensor], starts: Sequence[Start]) -> Work:
        order = order_of(results)
        with nullcontext() if order is None else order.told():
            if len(starts) == 1 and self._coalescing is None and not getattr(opts, "asyncOp", True):
                # The caller waits at once: by itself it is faster than with libddl's thread awake beside it.
                starts[0].run()
                requests = []
            else:
                requests = [it.start() for it in starts]
        finish = _all([it.finish for it in starts])
        return self._begin(name, opts, requests, results, finish, self._in_order, None, order)

    def _messages(
        self,
        name: str,
        opts: Options | None,
        requests: list[Request[None]],
        results: list[Tensor],
        finish: Finish | None,
        source: Callable[[], int] | None = None,
    ) -> Work:
        return self._begin(name, opts, requests, results, finish, self._in_any_order, source, order_of(results))

    def _begin(
        self,
        name: str,
        opts: Options | None,
        requests: Sequence[Request[None]],
        results: list[Tensor],
        finish: Finish | None,
        reaper: Reaper,
        source: Callable[[], int] | None,
        order: Order | None,
    ) -> Work:
        self._sequence += 1
        work = Work(f"{name} of group {self._name!r}", requests, results, finish, reaper, source, order)
        if self._coalescing is not None:
            self._coalescing.append(work)
        # A caller that waits itself is faster; where it may not, the copies that are left to do must be done.
        if finish is not None and getattr(opts, "asyncOp", True):
            work.reap()
        return work

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device | None = None) -> Work:
        works, self._coalescing = self._coalescing or [], None

        def finish() -> None:
            for work in works:
                work.wait()

        requests = [request for work in works for request in work.requests]
        results = [tensor for work in works for tensor in work.result()]
        order = next((work.order for work in works if work.order is not None), None)
        return self._begin("coalesced calls", None, requests, results, finish, self._in_any_order, None, order)

    def _need_one_for_each(self, tensors: Sequence[Tensor], what: str) -> None:
        if len(tensors) != self._comm.size:
            raise ArgumentError(f"{what} has {len(tensors)} tensors: it must have {self._comm.size}, one for each rank")

    def _need_multiple(self, large: Tensor, small: Tensor, what: str, other: str) -> None:
        if large.numel() != small.numel() * self._comm.size:
            raise ArgumentError(
                f"{what} has {large.numel()} elements (shape {tuple(large.shape)}), and {other} {small.numel()} (shape "
                f"{tuple(small.shape)}): it must have {self._comm.size} times as many, a part for each rank"
            )


class Start:
    """A call of the library that is not made yet: where one argument is wrong, none is started."""

    __slots__ = ("arguments", "buffers", "finish", "name")

    def __init__(self, name: str, arguments: tuple[object, ...], buffers: object, finish: Finish | None) -> None:
        self.name = name
        self.arguments = arguments
        self.buffers = buffers
        self.finish = finish

    def start(self) -> Request[None]:
        """Begin it. Raises DDLError."""
        return request.start(f"ddl_i{self.name}", *self.arguments, result=None, buffers=self.buffers)

    def run(self) -> None:
        """Make it, to its end. Raises DDLError."""
        request.run(f"ddl_{self.name}", *self.arguments, buffers=self.buffers)


def _op(opts: Options | None) -> ReduceOp:
    return cast(ReduceOp, getattr(opts, "reduceOp", ReduceOp.SUM))


def _root(opts: Options | None) -> int:
    return cast(int, getattr(opts, "rootRank", 0))


def _back(memory: Tensor, tensor: Tensor) -> Finish | None:
    if memory.data_ptr() == tensor.data_ptr():
        return None
    return lambda: copy_back(memory, tensor)


def _all_back(memories: Sequence[Tensor], tensors: Sequence[Tensor]) -> Finish | None:
    return _all([_back(memory, tensor) for memory, tensor in zip(memories, tensors, strict=True)])


def _all(steps: Sequence[Finish | None]) -> Finish | None:
    wanted = [step for step in steps if step is not None]
    if len(wanted) < 2:
        return wanted[0] if wanted else None

    def finish() -> None:
        for step in wanted:
            step()

    return finish
