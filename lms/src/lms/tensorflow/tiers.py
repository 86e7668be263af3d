"""Where the bytes go: a file for a model that trains on the processor, the host's memory for one on another device."""

from __future__ import annotations

import atexit
import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import tensorflow as tf

from lms.build import operations_path
from lms.errors import LMSError
from lms.memory.file import FileSlab
from lms.memory.spill import spill_folder


class _Tier:
    """The operations that order others."""

    def __init__(self) -> None:
        self._operations = load_operations()

    def tap(self, tensor: Any, index: int) -> Any:
        """A token that is there once the tensor is."""
        return self._operations.lms_tap(tensor=tensor, index=index, name="lms_tap")

    def gate(self, tensor: Any, tokens: list[Any], index: int, name: str = "lms_swap_out") -> Any:
        """The tensor, once the tokens are there."""
        return self._operations.lms_gate(tensor=tensor, tokens=tokens, index=index, name=name)


class HostTier(_Tier):
    """Pairs of operations on the host's device that hand a tensor on: TensorFlow itself copies between devices."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def swap_out(self, tensor: Any, index: int) -> Any:
        """The tensor on the host."""
        with tf.device(self.device):
            return self.gate(tensor, [], index)

    def swap_in(self, handle: Any, like: Any, tokens: list[Any], index: int, name: str) -> Any:
        """The same, from when on the device may have it."""
        with tf.device(self.device):
            return self.gate(handle, tokens, index, name)

    def token(self, handle: Any, index: int) -> Any:
        """A token that is there once the tensor is on the host."""
        with tf.device(self.device):
            return self.tap(handle, index)

    def __str__(self) -> str:
        return f"the memory of {self.device}"


class FileTier(_Tier):
    """Pairs of LMS's own operations over one file without a name, which stays open until the process ends."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self.folder = spill_folder(folder)
        _open(self.folder)

    def swap_out(self, tensor: Any, index: int) -> Any:
        """A handle that owns the tensor's place in the file."""
        return self._operations.lms_swap_out(tensor=tensor, index=index, name="lms_swap_out")

    def swap_in(self, handle: Any, like: Any, tokens: list[Any], index: int, name: str) -> Any:
        """The tensor, read from the file."""
        return self._operations.lms_swap_in(
            handle=handle, shape=tf.shape(like), tokens=tokens, T=like.dtype, index=index, name=name
        )

    def token(self, handle: Any, index: int) -> Any:
        """The handle: it is there once the tensor is in the file."""
        return handle

    def __str__(self) -> str:
        return f"a file in {self.folder}"


@cache
def load_operations() -> Any:
    """LMS's operations, loaded into TensorFlow. Raises LMSError that says what to do if they are not built."""
    return tf.load_op_library(str(_library()))


@cache
def _open(folder: Path) -> FileSlab:
    slab = FileSlab(folder)
    ctypes.CDLL(str(_library())).lms_tensorflow_use(slab.fileno())
    _open_slabs.append(slab)
    return slab


_open_slabs: list[FileSlab] = []
atexit.register(_open_slabs.clear)


def _library() -> Path:
    path = operations_path(tf.__version__)
    if not path.exists():
        raise LMSError(
            f"LMS swaps by operations that are not built for TensorFlow {tf.__version__}: run "
            "`python -m lms.build tensorflow` once (it needs a C++ compiler)"
        )
    return path


def usage() -> dict[str, int]:
    """What the file tier of this process has done: copies, bytes, places in use, most bytes in the file at once."""
    figures = (ctypes.c_int64 * 6)()
    ctypes.CDLL(str(_library())).lms_tensorflow_usage(figures)
    return dict(zip(("outs", "ins", "live", "swapped_out", "swapped_in", "file_peak"), figures, strict=True))
