"""Reads what DLPack says about a tensor in memory, without a copy and without the framework that made it.

NumPy's own reader does not know bfloat16. The capsule is never consumed: the tensor's memory belongs to its owner
again when the capsule is dropped. Source: the DLPack specification, include/dlpack/dlpack.h, 0.8 and 1.0.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ddl.errors import ArgumentError

_CPU = (1, 3, 11)  # kDLCPU, kDLCUDAHost, kDLROCMHost: memory that a CPU may read
_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged: a GPU may still be at work on it
_DEFAULT_STREAM = 1  # CUDA's legacy one: the tensor's owner puts its own work before it, and libddl goes behind it
_READ_ONLY = 1
_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}


class SupportsDLPack(Protocol):
    """An array or tensor that speaks DLPack: NumPy's, PyTorch's, and others."""

    def __dlpack__(self) -> object:
        """A capsule that describes the memory."""
        ...


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


@dataclass(frozen=True)
class TensorMemory:
    """A tensor's memory, valid while `capsule` lives."""

    address: int
    shape: tuple[int, ...]
    dtype: str  # "float32", "bfloat16", ...
    contiguous: bool  # in row-major order
    read_only: bool
    capsule: object


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_get_pointer.restype = ctypes.c_void_p


def read(array: SupportsDLPack) -> TensorMemory:
    """Where and what `array` is. Raises ArgumentError: it cannot be exported, or is in no memory that libddl knows."""
    try:
        device: Callable[[], tuple[int, int]] | None = getattr(array, "__dlpack_device__", None)
        options = {"stream": _DEFAULT_STREAM} if device and device()[0] in _CUDA else {}
        lend: Callable[..., object] = array.__dlpack__
        try:
            capsule = lend(max_version=(1, 0), **options)  # since DLPack 1.0
        except TypeError:
            capsule = lend(**options)
    except (BufferError, RuntimeError, ValueError, TypeError) as error:
        raise ArgumentError(f"array: its owner does not lend its memory: {error}") from error
    flags = 0
    if _is_valid(capsule, b"dltensor_versioned"):
        managed = ctypes.cast(_get_pointer(capsule, b"dltensor_versioned"), ctypes.POINTER(_Versioned)).contents
        if managed.major != 1:
            raise ArgumentError(f"array: it speaks DLPack {managed.major}, expected 1: pass a NumPy array")
        flags, tensor = managed.flags, managed.tensor
    elif _is_valid(capsule, b"dltensor"):
        tensor = ctypes.cast(_get_pointer(capsule, b"dltensor"), ctypes.POINTER(_Tensor)).contents
    else:
        raise ArgumentError(f"array: its __dlpack__ gave a {type(capsule).__name__} that is no DLPack capsule")
    if tensor.device_type not in _CPU + _CUDA:
        raise ArgumentError(
            f"array: it is in the memory of a device (DLPack device {tensor.device_type}:{tensor.device_id}) that is "
            "neither a CPU nor a CUDA GPU: copy it to the CPU first"
        )
    kind = _CODES.get(tensor.code, f"code{tensor.code}_")
    lanes = "" if tensor.lanes == 1 else f"x{tensor.lanes}"
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else None
    return TensorMemory(
        address=(tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        dtype="bool" if kind == "bool" else f"{kind}{tensor.bits}{lanes}",
        contiguous=strides is None or _is_row_major(shape, strides),
        read_only=bool(flags & _READ_ONLY),
        capsule=capsule,
    )


def _is_row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if 0 in shape:
        return True
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True
