"""Sets of the job's ranks."""

from __future__ import annotations

from ddl.frontends.core.calls import HostGroup, HostProcessSet, HostProcessSets, answer

ProcessSet = HostProcessSet
sets = HostProcessSets(ProcessSet, HostGroup, answer)
global_process_set = sets.everyone
add_process_set, remove_process_set = sets.add, sets.remove
is_initialized, is_homogeneous = sets.is_initialized, sets.is_homogeneous
rank, size, local_rank, local_size = sets.rank, sets.size, sets.local_rank, sets.local_size
cross_rank, cross_size = sets.cross_rank, sets.cross_size
