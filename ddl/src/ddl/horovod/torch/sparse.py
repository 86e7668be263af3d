"""Reductions of sparse tensors: everyone's elements, gathered, and those of one index added up."""

from __future__ import annotations

import torch
from torch import Tensor

from ddl.horovod.torch import starting
from ddl.horovod.torch.handle import Handle
from ddl.horovod.torch.ops import Average, Op, of_torch
from ddl.horovod.torch.process_sets import ProcessSet, global_process_set
from ddl.horovod.torch.starting import Reduction
from ddl.torch.process_group import ProcessGroup


def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: Op = Average, process_set: ProcessSet = global_process_set
) -> Handle[Tensor]:
    """`tensor`, in PyTorch's coordinate format, summed or averaged over all ranks: a new one, coalesced.

    Returns as soon as every rank has said how many elements it has. `name` is ignored.
    """
    return reduce(tensor, Reduction(op, 1, 1, process_set))


def reduce(tensor: Tensor, how: Reduction, group: ProcessGroup | None = None) -> Handle[Tensor]:
    """The same. `group`: another one of the set. Raises ValueError: it is dense, or `op` neither Sum nor Average."""
    of_torch(how.op)  # raises
    if how.op not in (Op.Sum, Op.Average):
        raise ValueError(f"op={how.op.name} of a sparse tensor: only Sum and Average leave out what is not there")
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"a sparse tensor is needed (torch.sparse_coo), but this is {tensor.layout}: use allreduce")
    own = tensor.detach().coalesce()
    handle = starting.gather([own.indices().t().contiguous(), own.values()], how.process_set, group)

    def finish() -> Tensor:
        indices, values = handle.wait()
        # Checked: another rank's indices may lie outside of this one's shape.
        total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=True).coalesce()
        if how.op is Op.Average:
            whole = not (values.is_floating_point() or values.is_complex())
            total.values().div_(how.process_set.size(), rounding_mode="trunc" if whole else None)
        starting.scale(total.values(), how.prescale * how.postscale, "the factor")
        return total

    return Handle(handle.work, finish)
