"""What GPUs there are: `caffe device_query`."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def describe_devices(ids: Sequence[int] | None = None) -> list[str]:
    """Lines about GPUs, in Caffe's words.

    Args:
        ids: the GPUs; None is all.

    Raises:
        ValueError: there is no GPU of that number.
    """
    count = torch.cuda.device_count()
    lines = [] if count else ["No GPU: PyTorch finds none, and nets run on the CPU."]
    for index in range(count) if ids is None else ids:
        if not 0 <= index < count:
            raise ValueError(f"there is no GPU {index}: PyTorch finds {count} ({torch.__version__})")
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
