"""Page-locking host memory for a GPU, through the CUDA runtime that PyTorch has loaded."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

import torch

from lms.errors import SpillError
from lms.units import format_size


def cuda_register(address: int, nbytes: int) -> None:
    """Lock pages for the GPU. Raises SpillError when the driver refuses."""
    cudart = torch.cuda.cudart()
    code = cudart.cudaHostRegister(address, nbytes, 0)
    if int(code):
        _forget_last_error()
        raise SpillError(
            f"locking {format_size(nbytes)} of host memory for the GPU failed "
            f"(cudaHostRegister: error {int(code)}, {cudart.cudaGetErrorString(code)})"
        )


def cuda_unregister(address: int) -> None:
    """Unlock what `cuda_register` locked."""
    if int(torch.cuda.cudart().cudaHostUnregister(address)):
        _forget_last_error()


def _forget_last_error() -> None:
    """Clear CUDA's last error on this thread: the next kernel launch would report it as its own.

    PyTorch does not pass `cudaGetLastError` on, so it is asked of the runtime library that PyTorch has loaded.
    """
    for path in _mapped_files("libcudart"):
        with contextlib.suppress(OSError, AttributeError):  # replaced on the disk meanwhile, or no runtime after all
            ctypes.CDLL(path).cudaGetLastError()


def _mapped_files(prefix: str, maps: Path = Path("/proc/self/maps")) -> list[str]:
    """The mapped files of this process with names that begin with `prefix`."""
    paths = (line.split(maxsplit=5)[5].strip() for line in maps.read_text().splitlines() if "/" in line)
    return sorted({path for path in paths if os.path.basename(path).startswith(prefix)})
