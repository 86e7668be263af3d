"""Reductions of sparse tensors: everyone's elements, gathered, and those of one index added up."""

from __future__ import annotations

import torch
from torch import Tensor

from ddl.frontends.core.handle import Handle
from ddl.frontends.core.ops import Average, Op, check
from ddl.horovod.torch import starting
from ddl.horovod.torch.process_sets import ProcessSet, global_process_set
from ddl.horovod.torch.starting import Reduction


def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: Op = Average, process_set: ProcessSet = global_process_set
) -> Handle[Tensor]:
    """`tensor`, in PyTorch's coordinate format, summed or averaged over all ranks: a new one, coalesced.

    Raises ValueError: it is dense, or `op` neither Sum nor Average.
    """
    return reduce(tensor, Reduction(op, 1, 1, process_set), name).in_background()


def reduce(tensor: Tensor, how: Reduction, name: str | None) -> Handle[Tensor]:
    """The same, which begins when it is waited for."""
    check(how.op)
    if how.op not in (Op.Sum, Op.Average):
        raise ValueError(f"op={how.op.name} of a sparse tensor: only Sum and Average leave out what is not there")
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"a sparse tensor is needed (torch.sparse_coo), but this is {tensor.layout}: use allreduce")
    own = tensor.detach().coalesce()
    handle = starting.gather([own.indices().t().contiguous(), own.values()], how.process_set, name)

    def finish(gathered: list[Tensor]) -> Tensor:
        indices, values = gathered
        # Checked: another rank's indices may lie outside of this one's shape.
        total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=True).coalesce()
        if how.op is Op.Average:
            whole = not (values.is_floating_point() or values.is_complex())
            total.values().div_(how.process_set.size(), rounding_mode="trunc" if whole else None)
        starting.scale(total.values(), how.prescale * how.postscale, "the factor")
        return total

    return handle.then(finish)


def dense(tensor: Tensor) -> Tensor:
    """A sparse tensor as a dense one."""
    # PyTorch 2.13's own to_dense() loses values with a stride of 0, which the gradient of a sum has.
    values = tensor._values().clone(memory_format=torch.contiguous_format)
    return torch.sparse_coo_tensor(tensor._indices(), values, tensor.shape, check_invariants=True).to_dense()
