"""A call in TensorFlow's terms: it is started, and its results are waited for.

The operations of operations.cc do it if they are built (`python -m ddl.build tensorflow`), else tf.numpy_function does,
with more copies and Python's lock. Either way Python announces the call, and libddl's thread does the work.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ddl.build import library_path
from ddl.errors import (
    ArgumentError,
    DDLError,
    MismatchError,
    OutOfMemoryError,
    PeerLostError,
    RankTimeoutError,
    ShutdownError,
    StateError,
    UnsupportedError,
)
from ddl.frontends.core import calls
from ddl.frontends.core.arrays import Array
from ddl.frontends.core.calls import ArraySlot, Called
from ddl.tensorflow.process_sets import sets

Shapes = Sequence[tf.TensorShape]


def start(tensors: Sequence[tf.Tensor], what: Called, results: int) -> tf.Tensor:
    """Start a call with that many results; returns what `finish` takes."""
    native = library()
    request = json.dumps(what)
    if native is not None:
        return native.operations.ddl_start(tensors, request=request, results=results)
    if tf.executing_eagerly():  # numpy_function fails on scalars of bfloat16 there
        return tf.constant(_start(request, *(np.asarray(one.numpy()) for one in tensors)))
    return tf.numpy_function(functools.partial(_start, request), tensors, tf.int64)


def finish(call: tf.Tensor, types: Sequence[tf.DType], shapes: Shapes) -> list[tf.Tensor]:
    """The results of a call, of these types and shapes."""
    native = library()
    if native is not None:
        return list(native.operations.ddl_finish(call, T=types, shapes=shapes))
    outputs: list[tf.Tensor] = tf.nest.flatten(tf.numpy_function(_finish, [call], types))
    for output, shape in zip(outputs, shapes, strict=True):
        output.set_shape(shape)
    return outputs


def described() -> str:
    """Which of the two does the work."""
    if library() is not None:
        return "DDL's own TensorFlow operations"
    return (
        f"tf.numpy_function, because DDL's own operations are not built for TensorFlow {tf.__version__}: run "
        "`python -m ddl.build tensorflow` (it needs a C++ compiler), or go on slower"
    )


# ---- The operations ------------------------------------------------------------------------------------------------


class _Tensor(ctypes.Structure):
    """ddl_tf_tensor of operations.cc."""

    _fields_ = (
        ("type", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("data", ctypes.c_void_p),
        ("nbytes", ctypes.c_int64),
    )


_Begin = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(_Tensor))


class Native:
    """The library of operations.cc."""

    def __init__(self, path: str) -> None:
        self.operations = tf.load_op_library(path)
        functions = ctypes.CDLL(path)
        self.output, self.reuse = functions.ddl_tf_output, functions.ddl_tf_reuse
        self.finish, self.release = functions.ddl_tf_finish, functions.ddl_tf_release
        self.output.restype = ctypes.c_void_p
        self.output.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
        self.reuse.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
        self.finish.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p]
        self.release.argtypes = [ctypes.c_void_p]
        self._begin = _Begin(self._on_begin)  # alive as long as the library may call it
        functions.ddl_tf_on_begin(self._begin)
        atexit.register(functions.ddl_tf_on_begin, None)

    def _on_begin(self, call: int, request: bytes, count: int, tensors: Any) -> None:
        slot = NativeSlot(self, call)
        try:
            slot.inputs = [_array_of(tensors[index]) for index in range(count)]
        except Exception as error:  # a type that NumPy has not
            slot.finish(error)
        else:
            calls.begin(slot, _called(request), sets)


@functools.cache
def library() -> Native | None:
    """The operations; None if they are not built for this TensorFlow."""
    path = library_path(tf.__version__)
    return Native(str(path)) if path.is_file() else None


class NativeSlot:
    """The tensors of a DdlStart."""

    def __init__(self, native: Native, call: int) -> None:
        self.inputs: list[Array] = []
        self._native, self._call = native, call

    def output(self, index: int, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """As Slot says."""
        sizes = (ctypes.c_int64 * len(shape))(*shape)
        address = self._native.output(self._call, index, _number_of(dtype), len(shape), sizes)
        if address is None and 0 not in shape:
            raise OutOfMemoryError(f"there is no memory for a result of shape {tuple(shape)}, {dtype}")
        return _at(address, shape, dtype)

    def in_place(self, index: int) -> Array:
        """As Slot says."""
        array = self.inputs[index]
        return array if self._native.reuse(self._call, index, 0) else self.output(index, array.shape, array.dtype)

    def pass_on(self, index: int) -> Array:
        """As Slot says."""
        self._native.reuse(self._call, index, 1)
        return self.inputs[index]

    def finish(self, error: Exception | None) -> None:
        """As Slot says."""
        code = 0 if error is None else _code_of(error)
        self._native.finish(self._call, code, b"" if error is None else f"{error}".encode())

    def __del__(self) -> None:
        """Let the tensors go."""
        self._native.release(self._call)


def _array_of(tensor: _Tensor) -> Array:
    return _at(tensor.data, tensor.shape[: tensor.rank], _dtype_of(tensor.type))


def _at(address: int | None, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """An array over memory that it does not own."""
    count = int(np.prod(shape, dtype=np.int64))
    if count == 0:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(address or 0)
    array: Array = np.frombuffer(memory, dtype).reshape(shape)
    return array


@functools.cache
def _dtype_of(number: int) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(tf.as_dtype(number).as_numpy_dtype)
    return dtype


@functools.cache
def _number_of(dtype: np.dtype[Any]) -> int:
    return int(tf.as_dtype(dtype).as_datatype_enum)


@functools.lru_cache(4096)
def _called(request: str | bytes) -> Called:
    return Called(*json.loads(request))


# absl::StatusCode, of which TensorFlow makes its exceptions.
_CODES: dict[type[Exception], int] = {
    MismatchError: 9,  # FailedPreconditionError
    StateError: 9,
    ArgumentError: 3,  # InvalidArgumentError
    ValueError: 3,
    RankTimeoutError: 4,  # DeadlineExceededError
    PeerLostError: 14,  # UnavailableError
    ShutdownError: 14,
    OutOfMemoryError: 8,  # ResourceExhaustedError
    UnsupportedError: 12,  # UnimplementedError
    DDLError: 13,  # InternalError
}


def _code_of(error: Exception) -> int:
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), 13)


# ---- tf.numpy_function ---------------------------------------------------------------------------------------------

_slots: dict[int, ArraySlot] = {}
_numbers = itertools.count()


def _start(request: str, *inputs: Array) -> np.int64:
    slot = ArraySlot(inputs)
    calls.begin(slot, _called(request), sets)
    number = next(_numbers)
    _slots[number] = slot
    return np.int64(number)


def _finish(number: Array) -> list[Array]:
    return _slots.pop(int(number)).wait()
