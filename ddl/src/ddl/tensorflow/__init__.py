"""DDL for TensorFlow: `import ddl.tensorflow as ddl`. ddl.keras has the same names; docs/tensorflow.md says more."""

import warnings

import tensorflow as tf

from ddl.errors import DDLError as DDLError
from ddl.frontends.core.ops import (
    Average as Average,
    Max as Max,
    Min as Min,
    Product as Product,
    Sum as Sum,
)
from ddl.tensorflow.callbacks import (
    BroadcastGlobalVariablesCallback as BroadcastGlobalVariablesCallback,
    DDLCallback as DDLCallback,
    DDLGlobalVariablesCallback as DDLGlobalVariablesCallback,
    LearningRateScheduleCallback as LearningRateScheduleCallback,
    LearningRateWarmupCallback as LearningRateWarmupCallback,
    MetricAverageCallback as MetricAverageCallback,
)
from ddl.tensorflow.collectives import (
    allgather as allgather,
    allreduce as allreduce,
    alltoall as alltoall,
    barrier as barrier,
    broadcast as broadcast,
    grouped_allgather as grouped_allgather,
    grouped_allreduce as grouped_allreduce,
    grouped_reducescatter as grouped_reducescatter,
    join as join,
    reducescatter as reducescatter,
)
from ddl.tensorflow.job import init as init, shutdown as shutdown
from ddl.tensorflow.objects import (
    allgather_object as allgather_object,
    broadcast_object as broadcast_object,
    broadcast_variables as broadcast_variables,
)
from ddl.tensorflow.optimizer import (
    DistributedOptimizer as DistributedOptimizer,
    PartialDistributedOptimizer as PartialDistributedOptimizer,
    load_model as load_model,
)
from ddl.tensorflow.process_sets import (
    ProcessSet as ProcessSet,
    add_process_set as add_process_set,
    cross_rank as cross_rank,
    cross_size as cross_size,
    global_process_set as global_process_set,
    is_homogeneous as is_homogeneous,
    is_initialized as is_initialized,
    local_rank as local_rank,
    local_size as local_size,
    rank as rank,
    remove_process_set as remove_process_set,
    size as size,
)
from ddl.tensorflow.tape import (
    DistributedGradientTape as DistributedGradientTape,
    PartialDistributedGradientTape as PartialDistributedGradientTape,
)
from ddl.tensorflow.compression import Compression as Compression
from ddl.tensorflow.data import shard as shard

_OLDEST, _NEWEST = (2, 16), (2, 21)  # that the tests ran with


def is_known(version: str) -> bool:
    """Whether DDL is made for that version of TensorFlow."""
    major, minor, *_ = version.split(".")
    return _OLDEST <= (int(major), int(minor)) <= _NEWEST


if not is_known(tf.__version__):
    warnings.warn(
        f"TensorFlow {tf.__version__}: DDL is made for {_OLDEST[0]}.{_OLDEST[1]} to {_NEWEST[0]}.{_NEWEST[1]}",
        stacklevel=2,
    )
