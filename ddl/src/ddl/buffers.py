"""Arrays and tensors as the library takes them: an address, a number of elements and a type."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar, cast

import numpy as np

from ddl import dlpack, elements
from ddl.dlpack import SupportsDLPack
from ddl.errors import ArgumentError

ArrayT = TypeVar("ArrayT", bound=SupportsDLPack)

# ddl_type of ddl.h. NumPy has no bfloat16 of its own: ml_dtypes and PyTorch have.
TYPES = {name: one.number for name, one in elements.TYPES.items()}


@dataclass(frozen=True)
class Buffer:
    """An array's memory, valid while `owner` lives."""

    address: int
    shape: tuple[int, ...]
    type: int  # ddl_type
    owner: object

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def buffer_of(array: SupportsDLPack, *, writable: bool) -> Buffer:
    """The memory of a NumPy array or of a DLPack tensor on a CPU; no copy. Raises ArgumentError: it cannot be used."""
    if isinstance(array, np.ma.MaskedArray):
        raise ArgumentError(
            "array is a numpy.ma.MaskedArray, whose mask would be ignored: pass array.filled(VALUE), or array.data for "
            "the elements under the mask, too"
        )
    if isinstance(array, np.ndarray):
        contiguous, aligned = array.flags.c_contiguous, array.flags.aligned
        dtype = _name_of(array.dtype)
        address, shape, read_only = array.ctypes.data, array.shape, not array.flags.writeable
        owner: object = array
    elif hasattr(array, "__dlpack__"):
        if _is_negated(array):
            raise ArgumentError(
                "array is a PyTorch tensor with the negative bit (is_neg()): its memory holds the elements without "
                "their sign; pass array.resolve_neg()"
            )
        memory = dlpack.read(array)
        contiguous, dtype, address, shape = memory.contiguous, memory.dtype, memory.address, memory.shape
        read_only, owner = memory.read_only, (array, memory.capsule)
        aligned = True  # libddl itself refuses one that is not
    else:
        raise ArgumentError(
            f"array is a {type(array).__name__}: expected a NumPy array, or a tensor that speaks DLPack (PyTorch's)"
        )
    if dtype not in TYPES:
        raise ArgumentError(f"array has elements of type {dtype}: allowed are {', '.join(TYPES)}")
    if not contiguous:
        raise ArgumentError(
            f"array (shape {shape}) is not contiguous in memory: pass a contiguous copy (numpy.ascontiguousarray, "
            "Tensor.contiguous)"
        )
    if not aligned:
        raise ArgumentError(
            f"array (shape {shape}, {dtype}) is not aligned in memory: the address of its elements is no multiple of "
            "their size; pass an aligned copy (array.copy())"
        )
    if writable and read_only:
        raise ArgumentError(f"array (shape {shape}) is read-only, but the result is written to it: pass a copy")
    return Buffer(address, shape, TYPES[dtype], owner)


def _is_negated(array: object) -> bool:
    """Whether a PyTorch tensor's memory has its elements with the other sign, which DLPack does not say."""
    is_neg: Callable[[], bool] | None = getattr(array, "is_neg", None)
    return is_neg is not None and is_neg()


@lru_cache
def _name_of(dtype: np.dtype[Any]) -> str:
    return dtype.name if dtype.isnative else f"{dtype.name} in foreign byte order"


def empty_like(array: ArrayT, shape: tuple[int, ...]) -> ArrayT:
    """A new array of the same kind and type as `array`. Raises ArgumentError if its kind is not known."""
    if isinstance(array, np.ndarray):
        return cast("ArrayT", np.empty(shape, array.dtype))
    new_empty: Callable[[tuple[int, ...]], object] | None = getattr(array, "new_empty", None)  # PyTorch's
    if new_empty is None:
        raise ArgumentError(
            f"array is a {type(array).__name__}, of which no new one can be made here: pass a NumPy array or a PyTorch "
            "tensor"
        )
    return cast("ArrayT", new_empty(shape))
