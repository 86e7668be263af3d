"""A process group of torch.distributed over a communicator of libddl.

Collectives start at once and run in libddl's own thread; which calls of libddl they are is said in `calls`, and in
`point_to_point` for those that are made of messages. torch.distributed calls most methods by two names, an older
(`_allgather_base`) and one since 2.13 (`all_gather_single`).
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

from ddl.communicator import Communicator
from ddl.errors import DDLError, StateError, UnsupportedError
from ddl.job import timeout_or
from ddl.request import Request
from ddl.torch import calls, point_to_point
from ddl.torch.calls import Call, Step, all_back, all_of
from ddl.torch.streams import order_of
from ddl.torch.tensors import packed_on_host, same_type, target_on_host
from ddl.torch.work import Reaper, Work, explained

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class Options(Protocol):
    """The options of a call of torch.distributed (AllreduceOptions and others). Some have reduceOp, some rootRank."""

    asyncOp: bool


class ProcessGroup(dist.ProcessGroup):
    """If `leave` is given, it is called when the group is destroyed, and the communicator is not freed."""

    supports_shrinking = True

    def __init__(
        self, store: Store | None, comm: Communicator, name: str, leave: Callable[[], None] | None = None
    ) -> None:
        # The form with the store makes no group that Python may override.
        super().__init__(comm.rank, comm.size)  # type: ignore[call-arg]
        self._store = store
        self._comm = comm
        self._leave = leave
        self.on_shrink: Callable[[list[int]], object] | None = None  # makes the next default group; others have none
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

    name = _get_backend_name = getBackendName

    @property
    def group_name(self) -> str:
        """The name that torch.distributed gave it."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The description that torch.distributed gave it."""
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

    # torch.distributed asks these of the backend of a device: the group is its own backend.
    supports_coalescing = False
    supports_splitting = False
    supports_time_estimate = False

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        return self

    def get_group_store(self) -> Store | None:
        """The store that torch.distributed made for it."""
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long later calls wait for a rank: at most DDL_TIMEOUT, if that is set."""
        seconds = timeout.total_seconds()
        self._comm.set_timeout(min(seconds, timeout_or(seconds)))

    def shutdown(self) -> None:
        """End the group without waiting for calls in flight. Those of the group of all ranks end with ShutdownError."""
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

    abort = shutdown

    def shrink(self, excluded: list[int], flags: int = 0, options: object = None) -> object:
        """The group of the ranks that are left. Raises UnsupportedError if this is not the default group."""
        if self.on_shrink is None:
            raise UnsupportedError("shrink_group of backend ddl: only the default group can be shrunk: shrink that one")
        return self.on_shrink(excluded)

    # ---- Reductions ----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Options | None = None) -> Work:
        """Reduce each tensor over all ranks, in place."""
        op = _op(opts)
        return self._make("allreduce", opts, tensors, [calls.allreduce(tensor, op, self._comm) for tensor in tensors])

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Options | None = None) -> Work:
        """Reduce each tensor to the root's; the others' stay as they are."""
        call = calls.allreduce if _root(opts) == self._comm.rank else calls.contribute
        return self._make("reduce", opts, tensors, [call(tensor, _op(opts), self._comm) for tensor in tensors])

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options | None = None) -> Work:
        """Reduce each list of tensors, one for each rank, and keep this rank's."""
        made = []
        for output, blocks in zip(outputs, inputs, strict=True):
            made += calls.reduce_scatter_list(output, blocks, _op(opts), self._comm)
        return self._make("reduce_scatter", opts, outputs, made)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Options | None = None) -> Work:
        """Reduce `input`, and keep this rank's part of as many as there are ranks."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options | None = None
    ) -> Work:
        """The same of several tensors."""
        pairs = zip(outputs, inputs, strict=True)
        made = [calls.reduce_scatter(output, input, _op(opts), self._comm) for output, input in pairs]
        return self._make("reduce_scatter", opts, outputs, made)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- Movements -----------------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Options | None = None) -> Work:
        """Overwrite everyone's tensors with the root's."""
        made = [calls.broadcast(tensor, _root(opts), self._comm) for tensor in tensors]
        return self._make("broadcast", opts, tensors, made)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options | None = None) -> Work:
        """Gather everyone's tensor into a list, one for each rank. The tensors of the list may differ in size."""
        made = []
        for targets, input in zip(outputs, inputs, strict=True):
            made += calls.allgather_list(targets, input, self._comm)
        return self._make("allgather", opts, [target for targets in outputs for target in targets], made)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options | None = None
    ) -> Work:
        """Several tensors of everyone; `outputs[r][i]` is tensor i of rank r."""
        by_input = [[its[index] for its in outputs] for index in range(len(inputs))]
        return self.allgather(by_input, inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Options | None = None) -> Work:
        """Gather everyone's tensor into one, in the order of ranks."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options | None = None
    ) -> Work:
        """The same of several tensors."""
        pairs = zip(outputs, inputs, strict=True)
        made = [calls.allgather(output, input, self._comm) for output, input in pairs]
        return self._make("allgather", opts, outputs, made)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options | None = None) -> Work:
        """Gather everyone's tensor into the root's list."""
        targets = outputs[0] if outputs else []
        same_type([*inputs, *targets], "gather")
        blocks = [target_on_host(target) for target in targets]
        requests = point_to_point.gather(packed_on_host(inputs[0]), blocks, _root(opts), self._comm)
        return self._exchange("gather", opts, requests, targets, all_back(blocks, targets))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options | None = None) -> Work:
        """Send each rank its tensor of the root's list."""
        blocks = [packed_on_host(block) for block in inputs[0]] if inputs else []
        same_type([*outputs, *blocks], "scatter")
        target = target_on_host(outputs[0])
        requests = point_to_point.scatter(target, blocks, _root(opts), self._comm)
        return self._exchange("scatter", opts, requests, outputs, all_back([target], outputs))

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Options | None = None,
    ) -> Work:
        """Exchange parts of the first dimension of `input` with all ranks. Without splits, the parts are equal."""
        same_type([output, input], "all_to_all_single")
        memory, target = packed_on_host(input), target_on_host(output)
        outputs = point_to_point.parts_of(target, output_splits, "output", self._comm)
        inputs = point_to_point.parts_of(memory, input_splits, "input", self._comm)
        requests = point_to_point.alltoall(outputs, inputs, self._comm)
        return self._exchange("alltoall", opts, requests, [output], all_back([target], [output]))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Options | None = None) -> Work:
        """Send a tensor to each rank, and receive one from each. All may differ in size."""
        same_type([*outputs, *inputs], "alltoall")
        targets = [target_on_host(output) for output in outputs]
        requests = point_to_point.alltoall(targets, [packed_on_host(input) for input in inputs], self._comm)
        return self._exchange("alltoall", opts, requests, outputs, all_back(targets, outputs))

    alltoall_base = all_to_all_single

    # ---- Messages and the barrier --------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """Send a tensor to another rank of the group."""
        requests = [point_to_point.send(packed_on_host(tensor), peer, tag, self._comm) for tensor in tensors]
        return self._exchange("send", None, requests, tensors, None)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """Receive a tensor from another rank of the group."""
        return self._receive(tensors, peer, tag, c_int(peer))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        """Receive a tensor from whichever rank sends first: `Work.source_rank` says which."""
        return self._receive(tensors, point_to_point.ANY_RANK, tag, c_int(point_to_point.ANY_RANK))

    def _receive(self, tensors: list[Tensor], peer: int, tag: int, source: c_int) -> Work:
        targets = [target_on_host(tensor) for tensor in tensors]
        requests = [point_to_point.receive(target, peer, tag, self._comm, source) for target in targets]
        return self._exchange("recv", None, requests, tensors, all_back(targets, tensors), lambda: source.value)

    def barrier(self, opts: Options | None = None) -> Work:
        """Finish on no rank before every rank has called it."""
        return self._make("barrier", opts, [], [calls.barrier(self._comm)])

    # ---- Starting ------------------------------------------------------------------------------------------------

    def _make(self, name: str, opts: Options | None, results: list[Tensor], made: Sequence[Call]) -> Work:
        order = order_of(results)
        parts = "" if not made or made[0].name == name else made[0].name
        requests: list[Request[Step | None]] = []
        with nullcontext() if order is None else order.told():
            if len(made) == 1 and self._coalescing is None and not _returns_at_once(opts):
                # The caller waits at once: by itself it is faster than with libddl's thread awake beside it.
                try:
                    made[0].run()
                except DDLError as error:
                    if not parts:
                        raise
                    raise explained(error, self._called(name), parts) from None
            else:
                requests = [call.start() for call in made]
        finish = all_of([call.result for call in made])
        return self._begun(
            Work(self._called(name), requests, results, finish, self._in_order, None, order, parts), opts
        )

    def _exchange(
        self,
        name: str,
        opts: Options | None,
        requests: list[Request[None]],
        results: list[Tensor],
        finish: Step | None,
        source: Callable[[], int] | None = None,
    ) -> Work:
        order = order_of(results)
        return self._begun(Work(self._called(name), requests, results, finish, self._in_any_order, source, order), opts)

    def _begun(self, work: Work, opts: Options | None) -> Work:
        self._sequence += 1
        if self._coalescing is not None:
            self._coalescing.append(work)
        # A caller that waits is faster than the reaper. If the caller need not wait, results must be copied back.
        if work.finish is not None and _returns_at_once(opts):
            work.reap()
        return work

    def _called(self, name: str) -> str:
        return f"{name} of group {self._name!r}"

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
        called = self._called("coalesced calls")
        return self._begun(Work(called, requests, results, finish, self._in_any_order, None, order), None)


def _op(opts: Options | None) -> ReduceOp:
    return cast(ReduceOp, getattr(opts, "reduceOp", ReduceOp.SUM))


def _root(opts: Options | None) -> int:
    return cast(int, getattr(opts, "rootRank", 0))


def _returns_at_once(opts: Options | None) -> bool:
    return cast(bool, getattr(opts, "asyncOp", True))
