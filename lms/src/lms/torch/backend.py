"""The parts of LMS for a device: its memory, as the limit bounds it, and what moves bytes out of it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch

from lms.errors import UsageError
from lms.memory.capacity import memory_capacity
from lms.memory.device import CpuDevice, Device
from lms.memory.file import FileSlab
from lms.memory.host import HostSlab
from lms.memory.spill import spill_folder
from lms.ranks import sharing
from lms.torch.cpu import page_pool
from lms.torch.cpu.engine import CpuEngine
from lms.torch.cpu.pager import CpuPager
from lms.torch.cuda.device import CudaDevice
from lms.torch.cuda.engine import CudaEngine
from lms.torch.cuda.managed import ManagedMemory
from lms.torch.cuda.pager import CudaPager
from lms.torch.cuda.pinning import cuda_register, cuda_unregister
from lms.torch.cuda.streams import CudaStreams
from lms.torch.engine import Engine
from lms.torch.pager import Pager

_HOST_SHARE = 0.75  # of the host's memory: the pinned slab's limit when none is given


def make_engine(device: torch.device, *, spill_dir: Path | None, host_limit: int | None, verify: bool) -> Engine:
    """The engine for `device`: RAM to a file on a CPU, GPU to pinned memory (and past `host_limit` a file) on CUDA.

    `host_limit` is the host's, in bytes: the ranks of one host share it evenly; None takes three quarters of the host's
    memory. Raises UsageError, on a CPU, for a `spill_dir` in memory; SpillError for one that no file can be made in.
    """
    if device.type == "cpu":
        if host_limit is not None:
            warnings.warn(
                "host_limit has no effect on a CPU device: its tier is the file in spill_dir, without pinned memory",
                RuntimeWarning,
                stacklevel=2,
            )
        return CpuEngine(FileSlab(spill_folder(spill_dir), verify=verify))
    whole = int(memory_capacity() * _HOST_SHARE) if host_limit is None else host_limit
    host = HostSlab(cuda_register, cuda_unregister, limit=whole // sharing(os.environ))
    file = FileSlab(spill_dir, verify=verify) if spill_dir is not None else None
    return CudaEngine(CudaStreams(device), host, file, verify=verify)


def device_for(device: torch.device) -> Device:
    """The memory of `device`, a CPU or a GPU, that the limit bounds.

    The ranks of one host share its memory evenly if the device is the CPU; each rank has a GPU of its own.
    """
    if device.type == "cpu":
        return CpuDevice(page_pool.find(), sharing(os.environ))
    return CudaDevice(device)


def make_pager(engine: Engine) -> Pager:
    """What lets parameters, gradients and optimizer state leave the engine's device, at addresses that stay.

    Raises UsageError if the device has none.
    """
    if isinstance(engine, CudaEngine):
        memory = ManagedMemory(engine.device)
        if not memory.is_supported:
            raise UsageError(
                "swap: parameters and gradients of a GPU need managed memory that both the GPU and the CPU can touch "
                "at any time (concurrentManagedAccess), which this GPU or this system does not have; leave both out"
            )
        return CudaPager(engine.streams, memory)
    pool = page_pool.find()
    if pool is None or not pool.installed:
        raise UsageError(
            "swap: parameters and gradients need the page pool; compile it with `python -m lms.build torch`"
        )
    assert isinstance(engine, CpuEngine)
    return CpuPager(engine)
