"""Collectives of one tensor through which gradients flow: forward and backward, as PyTorch's autograd calls them.

The scale is Horovod's, not always that of the derivative of the sum of all ranks' losses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddl.frontends.core.ops import Op, need_linear
from ddl.horovod.torch import starting
from ddl.horovod.torch.process_sets import ProcessSet
from ddl.horovod.torch.starting import Reduction


def allreduce(tensor: Tensor, how: Reduction, name: str | None = None) -> Tensor:
    """A new tensor, reduced; the gradient is the same reduction of everyone's gradients."""
    return _applied(_Allreduce, tensor, how, name)


def reduce_scatter(tensor: Tensor, how: Reduction, name: str | None = None) -> Tensor:
    """This rank's rows of the reduced tensor; the gradient is everyone's gradients, gathered; of a sum, times size."""
    return _applied(_ReduceScatter, tensor, how, name)


def allgather(tensor: Tensor, process_set: ProcessSet, name: str | None = None) -> Tensor:
    """Everyone's rows; the gradient is this rank's rows of the average of everyone's gradients."""
    return _applied(_Allgather, tensor, process_set, name)


def broadcast(tensor: Tensor, root_rank: int, process_set: ProcessSet, name: str | None = None) -> Tensor:
    """The root's tensor; its gradient is the average of everyone's gradients, and the others' is 0."""
    return _applied(_Broadcast, tensor, root_rank, process_set, name)


def alltoall(
    tensor: Tensor, splits: list[int] | None, process_set: ProcessSet, name: str | None = None
) -> tuple[Tensor, Tensor]:
    """Everyone's rows for this rank, and how many each sent; the gradient goes back the way that the rows came."""
    received, rows = _Alltoall.apply(tensor, splits, process_set, name)  # type: ignore[no-untyped-call]
    return received, rows


def copy_of(tensor: Tensor) -> Tensor:
    """Another tensor with the same content, whose elements lie one after the other."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, how: Reduction, name: str | None) -> Tensor:
        context.how = how
        return starting.reduce_in_place([copy_of(tensor)], how, name).wait()[0]

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        need_linear(context.how.op)
        return starting.reduce_in_place([copy_of(gradient)], context.how).wait()[0], None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, how: Reduction, name: str | None) -> Tensor:
        context.how = how
        return starting.scatter_reduced([tensor], how, name).wait()[0]

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        how = context.how
        need_linear(how.op)
        factor = how.prescale * how.postscale * (how.process_set.size() if how.op is Op.Sum else 1)
        return starting.gather([gradient], how.process_set).wait()[0] * factor, None, None


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, process_set: ProcessSet, name: str | None) -> Tensor:
        context.process_set = process_set
        context.rows = tensor.shape[0] if tensor.dim() else 1
        return starting.gather([tensor], process_set, name).wait()[0]

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        process_set = context.process_set
        rows = starting.gather([torch.tensor([context.rows])], process_set).wait()[0].tolist()
        average = starting.reduce_in_place([copy_of(gradient)], _average_over(process_set)).wait()[0]
        first = sum(rows[: process_set.rank()])
        return (average[first : first + context.rows], None, None)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, root: int, process_set: ProcessSet, name: str | None) -> Tensor:
        context.arguments = (root, process_set)
        return starting.broadcast_in_place([copy_of(tensor)], root, process_set, name).wait()[0]

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        root, process_set = context.arguments
        average = starting.reduce_in_place([copy_of(gradient)], _average_over(process_set)).wait()[0]
        keeps = process_set.number_of(root) == process_set.rank()
        return (average if keeps else torch.zeros_like(average), None, None, None)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, tensor: Tensor, splits: list[int] | None, process_set: ProcessSet, name: str | None
    ) -> tuple[Tensor, Tensor]:
        received, rows = starting.exchange_rows(tensor, splits, process_set, name).wait()
        context.arguments = (rows, process_set)
        sent = torch.tensor(rows, dtype=torch.int32)
        context.mark_non_differentiable(sent)
        return received, sent

    @staticmethod
    def backward(context: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return (starting.exchange_rows(gradient, *context.arguments).wait()[0], None, None, None)


def _average_over(process_set: ProcessSet) -> Reduction:
    return Reduction(Op.Average, 1, 1, process_set)


def _applied(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result
