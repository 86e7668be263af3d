"""Arrays in the memory of a GPU, or of the stub's (`DDL_CUDA_LIB`), which speak DLPack as a framework's tensors do."""

from __future__ import annotations

import ctypes
import os

import numpy as np

from ddl.dlpack import _Tensor

CUDA, TO_DEVICE, TO_HOST = 2, 1, 2
_CODES = {"i": 0, "u": 1, "f": 2, "V": 4}  # V: bfloat16 of ml_dtypes

runtime = ctypes.CDLL(os.environ["DDL_CUDA_LIB"], mode=ctypes.RTLD_GLOBAL)
for name, arguments in {
    "cudaMalloc": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t],
    "cudaFree": [ctypes.c_void_p],
    "cudaHostAlloc": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_uint],
    "cudaMemcpy": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int],
    "cudaMemcpyAsync": [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p],
    "cudaMallocManaged": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_uint],
    "cudaStreamCreateWithFlags": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint],
    "cudaSetDevice": [ctypes.c_int],
}.items():
    getattr(runtime, name).argtypes = arguments

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_new_capsule.restype = ctypes.py_object


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


def check(code: int, call: str) -> None:
    """Raise if a call of the runtime failed."""
    assert code == 0, f"{call}: {code}"


# As a program does before ddl.init: each rank of a host takes a GPU of its own.
GPU = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0"))
check(runtime.cudaSetDevice(GPU), "cudaSetDevice")


def allocate(nbytes: int) -> int:
    """Device memory; 0 bytes have an address too."""
    pointer = ctypes.c_void_p()
    check(runtime.cudaMalloc(ctypes.byref(pointer), nbytes), "cudaMalloc")
    return pointer.value or 0


class Array:
    """A copy of a NumPy array in device memory; `numpy()` brings it back."""

    def __init__(self, array: np.ndarray, *, late: bool = False) -> None:
        """`late`: by a copy that the default stream has still to make when this returns."""
        self.array = np.ascontiguousarray(array).reshape(array.shape)
        self.address = allocate(array.nbytes)
        if late and array.nbytes:
            pinned = ctypes.c_void_p()
            check(runtime.cudaHostAlloc(ctypes.byref(pinned), array.nbytes, 0), "cudaHostAlloc")
            ctypes.memmove(pinned, self.array.ctypes.data, array.nbytes)
            check(runtime.cudaMemcpyAsync(self.address, pinned, array.nbytes, TO_DEVICE, None), "cudaMemcpyAsync")
        else:
            check(runtime.cudaMemcpy(self.address, self.array.ctypes.data, array.nbytes, TO_DEVICE), "cudaMemcpy")

    def __del__(self) -> None:
        runtime.cudaFree(self.address)

    def numpy(self) -> np.ndarray:
        """The content of device memory."""
        result = np.empty_like(self.array)
        check(runtime.cudaMemcpy(result.ctypes.data, self.address, result.nbytes, TO_HOST), "cudaMemcpy")
        return result

    def new_empty(self, shape: tuple[int, ...]) -> Array:
        """As PyTorch's."""
        return Array(np.zeros(shape, self.array.dtype))

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, GPU

    def __dlpack__(self, *, stream: int | None = None) -> object:
        assert stream == 1, "the legacy default stream, as ddl.h says"
        dtype = self.array.dtype
        self._shape = (ctypes.c_int64 * self.array.ndim)(*self.array.shape)
        tensor = _Tensor(
            self.address, CUDA, GPU, self.array.ndim, _CODES[dtype.kind], dtype.itemsize * 8, 1, self._shape, None, 0
        )
        self._managed = _Managed(tensor, None, None)
        return _new_capsule(ctypes.addressof(self._managed), b"dltensor", None)
