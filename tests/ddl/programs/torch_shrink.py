"""dist.shrink_group takes the group that `ProcessGroup.shrink` returns: here one of the ranks that are left."""

import torch
import torch.distributed as dist

from ddl.communicator import create_group
from ddl.torch.process_group import ProcessGroup

torch.set_num_threads(1)
dist.init_process_group("ddl")
WIDE = dist.new_group(list(range(dist.get_world_size())))


def shrink(group: ProcessGroup, excluded: list[int], flags: int, options: object) -> ProcessGroup:
    left = [rank for rank in range(group.size()) if rank not in excluded]
    return ProcessGroup(group.get_group_store(), create_group(left, 77), "left")


ProcessGroup.supports_shrinking = True
ProcessGroup.shrink = shrink
if dist.get_rank() != 1:
    left = dist.shrink_group([1], group=WIDE)
    summed = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(summed, group=left)
    assert (left.size(), summed.item()) == (2, 4)
    assert dist.get_process_group_ranks(left) == [0, 2]
    print(f"rank {dist.get_rank()}: shrunk")
dist.barrier()
dist.destroy_process_group()
