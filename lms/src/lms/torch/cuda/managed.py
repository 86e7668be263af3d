"""Managed memory of a GPU: the driver moves its pages between the GPU and the host, and its addresses stay.

Code may touch a page that is on the other side: the driver then moves it. A prefetch only saves that wait.
"CUDA Driver API", chapter "Unified Addressing".
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

import torch

from lms.errors import SpillError, UsageError
from lms.torch.cuda.streams import Stream

# cuda.h
_ATTACH_GLOBAL = 1
_CONCURRENT_MANAGED_ACCESS = 89
_HOST = -1


class ManagedMemory:
    """Allocates managed memory for one GPU, and queues its moves on streams. Tests imitate it.

    Raises UsageError if there is no driver of NVIDIA's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise UsageError(f"swap: parameters and gradients of a GPU need NVIDIA's driver: {error}") from None
        self._context = ctypes.c_void_p()
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device.index)
        # Drivers from CUDA 13 on have it. Others copy what was freed and has to leave.
        self.discards = hasattr(self._driver, "cuMemDiscardBatchAsync")

    @property
    def is_supported(self) -> bool:
        """Whether this GPU and this system move single pages when they are touched. Not under Windows, for example."""
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), _CONCURRENT_MANAGED_ACCESS, self._device.index)
        return bool(value.value)

    def allocate(self, nbytes: int) -> int:
        """The address of `nbytes` that have no pages yet. Raises SpillError if the driver gives none."""
        address = ctypes.c_uint64()
        self._call("cuMemAllocManaged", ctypes.byref(address), ctypes.c_size_t(nbytes), _ATTACH_GLOBAL)
        return address.value

    def free(self, address: int) -> None:
        """Free what `allocate` gave, from any thread. The driver waits for what still uses it."""
        with suppress(SpillError):  # at the process's end the driver may be shut down already
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def prefetch(self, stream: Stream, address: int, nbytes: int, *, back: bool) -> None:
        """Queue the move to the GPU if `back`, else to the host."""
        where = self._device.index if back else _HOST
        self._call("cuMemPrefetchAsync", ctypes.c_uint64(address), ctypes.c_size_t(nbytes), where, _handle(stream))

    def discard(self, stream: Stream, address: int, nbytes: int) -> None:
        """Queue that the bytes are not needed again before they are written."""
        addresses, sizes = (ctypes.c_uint64 * 1)(address), (ctypes.c_size_t * 1)(nbytes)
        count, flags = ctypes.c_size_t(1), ctypes.c_uint64(0)
        try:
            self._call("cuMemDiscardBatchAsync", addresses, sizes, count, flags, _handle(stream))
        except SpillError:
            self.discards = False  # the driver has the function, and this GPU does not

    def tensor(self, owner: object, address: int, nbytes: int) -> torch.Tensor:
        """The bytes as a uint8 tensor, which keeps `owner` alive."""
        tensor = torch.as_tensor(_Array(owner, address, nbytes), device=self._device)
        assert tensor.data_ptr() == address, "PyTorch has copied it: it takes the memory for another GPU's"
        return tensor

    def _call(self, function: str, *arguments: object) -> None:
        """Call the driver with this GPU's context, whichever thread calls and whichever GPU is its current one."""
        self._check("cuCtxPushCurrent_v2", self._context)
        try:
            self._check(function, *arguments)
        finally:
            self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _check(self, function: str, *arguments: object) -> None:
        code = getattr(self._driver, function)(*arguments)
        if code:
            raise SpillError(
                f"the GPU's managed memory: {function} failed with CUDA error {code}; swap no parameters and gradients"
            )


def _handle(stream: Stream) -> ctypes.c_void_p:
    return ctypes.c_void_p(stream.cuda_stream)


class _Array:
    """Memory as PyTorch takes it from other libraries."""

    def __init__(self, owner: object, address: int, nbytes: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
