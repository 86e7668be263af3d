"""Which GPU a process takes, and what GPUs there are."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from bascule_caffe.errors import CaffeError
from bascule_caffe.job import Job
from bascule_caffe.log import Log


def named(text: str | None) -> list[int]:
    """The GPUs that -gpu names. Raises CaffeError if one is not there."""
    if text is None:
        return []
    there = torch.cuda.device_count()
    has = f"there are {there}, from 0" if there else "PyTorch finds no GPU; leave -gpu out to run on the CPU"
    try:
        asked = list(range(there)) if text == "all" else [int(word) for word in text.split(",")]
    except ValueError:
        raise CaffeError(f"-gpu {text}: give the number of a GPU, several (0,1) or all") from None
    if len(set(asked)) < len(asked):
        raise CaffeError(f"-gpu {text} names a GPU twice: one process a GPU is trained on: name each once")
    missing = ", ".join(str(gpu) for gpu in asked if gpu not in range(there))
    if missing or not asked:
        raise CaffeError(f"-gpu {text}: there is no GPU {missing}".rstrip() + f": {has}")
    return asked


def own(gpus: Sequence[int], job: Job, log: Log, *, wanted: bool, default: int = 0) -> torch.device:
    """The device of this rank: its own of the GPUs of -gpu, or of all GPUs that it sees; or the CPU.

    One process without -gpu takes `default`. Raises CaffeError on every rank if one has no GPU of its own.
    """
    if not wanted:
        return torch.device("cpu")
    there = torch.cuda.device_count()
    mine = list(gpus) or (list(range(there)) if job.size > 1 else [default])
    # A launcher such as srun --gpus-per-task=1 shows each rank its own GPU only, which is number 0 in all of them.
    by_slurm = os.environ.get("SLURM_LOCALID") == str(job.local_rank)  # and not ddlrun inside one task of Slurm's
    index = 0 if job.size > 1 and not gpus and there == 1 and by_slurm else job.local_rank
    lacks = there > 0 and index >= len(mine)
    if job.most(int(lacks)):
        if not lacks:
            raise CaffeError("another rank has no GPU of its own; its line says more")
        found = f"-gpu names {len(mine)}" if gpus else f"the host has {len(mine)}"
        way = "let -gpu name more, or leave it out" if gpus else "start fewer ranks"
        here = f"this is rank {job.local_rank} of its host, from 0"
        raise CaffeError(f"each rank needs a GPU of its own: {here}, and {found}: {way}")
    if not there:
        log.warn("caffe.cpp:227", "PyTorch finds no GPU: using the CPU (solver_mode: CPU says so without this line)")
        return torch.device("cpu")
    number = mine[index]
    if number >= there:
        raise CaffeError(f"device_id is {number}: there are {there} GPUs, from 0: give another, or -gpu")
    log.info("caffe.cpp:218", f"Using GPU {number}")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def described(gpus: Sequence[int]) -> list[str]:
    """Lines about GPUs, in Caffe's words."""
    lines = [] if gpus else ["No GPU: PyTorch finds none, and nets run on the CPU."]
    for index in gpus:
        gpu = torch.cuda.get_device_properties(index)
        lines += [
            f"Device id:                     {index}",
            f"Major revision number:         {gpu.major}",
            f"Minor revision number:         {gpu.minor}",
            f"Name:                          {gpu.name}",
            f"Total global memory:           {gpu.total_memory}",
            f"Number of multiprocessors:     {gpu.multi_processor_count}",
            f"Warp size:                     {gpu.warp_size}",
        ]
    return lines
