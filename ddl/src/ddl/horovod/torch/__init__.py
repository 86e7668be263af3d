"""Horovod's interface for PyTorch: `import ddl.horovod.torch as hvd`.

The names, arguments and meanings are those of Horovod 0.28. What differs is said in docs/horovod.md.
"""

from ddl.errors import DDLError
from ddl.frontends.core.built import (
    ccl_built as ccl_built,
    ddl_built as ddl_built,
    gloo_built as gloo_built,
    gloo_enabled as gloo_enabled,
    mpi_built as mpi_built,
    mpi_enabled as mpi_enabled,
    mpi_threads_supported as mpi_threads_supported,
    nccl_built as nccl_built,
    rocm_built as rocm_built,
)
from ddl.frontends.core.handle import (
    Handle as Handle,
    poll as poll,
    synchronize as synchronize,
)
from ddl.frontends.core.ops import (
    Adasum as Adasum,
    Average as Average,
    Max as Max,
    Min as Min,
    Product as Product,
    Sum as Sum,
)
from ddl.horovod.torch.collectives import (
    allgather as allgather,
    allgather_async as allgather_async,
    allreduce as allreduce,
    allreduce_ as allreduce_,
    allreduce_async as allreduce_async,
    allreduce_async_ as allreduce_async_,
    alltoall as alltoall,
    alltoall_async as alltoall_async,
    barrier as barrier,
    broadcast as broadcast,
    broadcast_ as broadcast_,
    broadcast_async as broadcast_async,
    broadcast_async_ as broadcast_async_,
    reducescatter as reducescatter,
    reducescatter_async as reducescatter_async,
)
from ddl.horovod.torch.compression import (
    Compression as Compression,
)
from ddl.horovod.torch.grouped import (
    grouped_allgather as grouped_allgather,
    grouped_allgather_async as grouped_allgather_async,
    grouped_allreduce as grouped_allreduce,
    grouped_allreduce_ as grouped_allreduce_,
    grouped_allreduce_async as grouped_allreduce_async,
    grouped_allreduce_async_ as grouped_allreduce_async_,
    grouped_reducescatter as grouped_reducescatter,
    grouped_reducescatter_async as grouped_reducescatter_async,
)
from ddl.horovod.torch.job import (
    cross_rank as cross_rank,
    cross_size as cross_size,
    cuda_built as cuda_built,
    init as init,
    is_homogeneous as is_homogeneous,
    is_initialized as is_initialized,
    local_rank as local_rank,
    local_size as local_size,
    rank as rank,
    shutdown as shutdown,
    size as size,
)
from ddl.horovod.torch.objects import (
    allgather_object as allgather_object,
    broadcast_object as broadcast_object,
    broadcast_optimizer_state as broadcast_optimizer_state,
    broadcast_parameters as broadcast_parameters,
)
from ddl.horovod.torch.optimizer import (
    DistributedOptimizer as DistributedOptimizer,
)
from ddl.horovod.torch.process_sets import (
    ProcessSet as ProcessSet,
    add_process_set as add_process_set,
    global_process_set as global_process_set,
    join as join,
    remove_process_set as remove_process_set,
)
from ddl.horovod.torch.sparse import (
    sparse_allreduce_async as sparse_allreduce_async,
)

HorovodInternalError = DDLError
