"""Horovod's interface for TensorFlow: `import ddl.horovod.tensorflow as hvd`.

The names, arguments and meanings are those of Horovod 0.28. What differs is said in docs/horovod.md.
"""

import tensorflow as tf

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
from ddl.tensorflow.objects import (
    BroadcastGlobalVariablesHook as BroadcastGlobalVariablesHook,
    broadcast_ as broadcast_,
    broadcast_global_variables as broadcast_global_variables,
    local_rank_op as local_rank_op,
    local_size_op as local_size_op,
    process_set_included_op as process_set_included_op,
    rank_op as rank_op,
    size_op as size_op,
)
from ddl.frontends.core.ops import Adasum as Adasum
from ddl.tensorflow import *  # noqa: F403


def cuda_built() -> bool:
    """Whether TensorFlow was built with CUDA. Tensors on GPUs are copied to the host."""
    return bool(tf.test.is_built_with_cuda())
