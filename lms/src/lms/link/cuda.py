"""Copies between a GPU and its host, and between GPUs, timed by events on their streams as nvbandwidth does.

The GPU is used through `lms.torch.cuda.streams.CudaStreams`, so that a test can imitate it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import torch

from lms.errors import SpillError
from lms.link.series import Direction
from lms.link.sweep import MB, Copy
from lms.memory.host import HostSlab
from lms.torch.cuda.pinning import cuda_register, cuda_unregister
from lms.torch.cuda.streams import CudaStreams, Stream, host_tensor

Way = tuple[torch.Tensor, torch.Tensor]  # destination and source
Queue = Callable[[Stream, torch.Tensor, torch.Tensor], None]  # queues a copy on a stream: destination, source

_SETTLED = 4 * MB  # bytes between two events at least: a single small copy is lost in the time of its launch
_TURNS = 4  # copies between two events at least: launching the first one takes up to 0.2 ms if the GPU was idle


class Pinned:
    """Two runs of page-locked host memory, `largest` bytes each, near some processors: what `both` needs at once.

    Raises SpillError when the host does not lock so much.
    """

    def __init__(
        self,
        largest: int,
        *,
        near: Sequence[int] = (),
        register: Callable[[int, int], None] = cuda_register,
        unregister: Callable[[int], None] = cuda_unregister,
    ) -> None:
        self._slab = HostSlab(register, unregister, segment=largest)
        # Pages lie with the processor that touches them first, and locking touches them.
        with ThreadPoolExecutor(1, initializer=_stay, initargs=(near,)) as there:
            blocks = there.submit(lambda: [self._slab.allocate(largest) for _ in range(2)]).result()
        if None in blocks:
            refused = self._slab.refused or "the host has no room for it"
            self._slab.close()
            raise SpillError(f"host memory: {2 * largest} bytes to be locked for the GPU: {refused}")
        self.tensors = tuple(host_tensor(block).fill_(1) for block in blocks if block is not None)

    def close(self) -> None:
        """Unlock it. No copy may be in flight."""
        self.tensors = ()
        self._slab.close()


def gpu_copies(
    streams: CudaStreams, host: Sequence[torch.Tensor], direction: Direction
) -> AbstractContextManager[Copy]:
    """A function that copies so many bytes between the GPU of `streams` and the two host tensors.

    `out` is from the GPU to the host, `back` the other way, `both` so many each way at once.
    """
    device = [streams.empty(len(tensor)) for tensor in host[: 2 if direction == "both" else 1]]
    return _copies(streams, direction, (host[0], device[0]), (device[-1], host[len(device) - 1]), streams.copy)


def peer_copies(
    here: CudaStreams, there: CudaStreams, nbytes: int, direction: Direction
) -> AbstractContextManager[Copy]:
    """A function that copies up to `nbytes` between two GPUs; `out` is from `here` to `there`.

    PyTorch queues such a copy on the current stream of the source's GPU, between two waits that bind it to the current
    stream of the other (copy_device_to_device in aten/src/ATen/native/cuda/Copy.cu). So each way has a stream of its
    own on both GPUs: the default stream of `there` would let `both` go one after the other. The clock is that of
    `here`, whose stream begins before the copy and ends behind it, whichever way it goes.
    """
    ours = [here.empty(nbytes) for _ in range(2)]
    theirs = [there.empty(nbytes) for _ in range(2)]

    def copy(stream: Stream, destination: torch.Tensor, source: torch.Tensor) -> None:
        with there.using(there.out if stream is here.out else there.back):
            here.copy(stream, destination, source)

    return _copies(here, direction, (theirs[0], ours[0]), (ours[1], theirs[1]), copy)


@contextmanager
def _copies(streams: CudaStreams, direction: Direction, out: Way, back: Way, copy: Queue) -> Iterator[Copy]:
    """A function that copies so many bytes from the sources of `out`, `back` or both to their destinations."""
    ways = {"out": [(streams.out, *out)], "back": [(streams.back, *back)]}
    ways["both"] = ways["out"] + ways["back"]

    def timed_copies(nbytes: int) -> float:
        cut = [(stream, destination[:nbytes], source[:nbytes]) for stream, destination, source in ways[direction]]
        return timed(streams, cut, copy)

    try:
        yield timed_copies
    finally:  # whatever interrupts: the caller may let the memory go then
        streams.synchronize(streams.record(streams.out))
        streams.synchronize(streams.record(streams.back))


def timed(
    streams: CudaStreams,
    copies: Sequence[tuple[Stream, torch.Tensor, torch.Tensor]],
    queue: Queue | None = None,
) -> float:
    """Seconds that the copies take, which begin at once, each on a stream of its own. Waits for them.

    `queue` queues one (by default `streams.copy`). Small copies are repeated, the ways in turns, and the mean is taken.
    The clock is the GPU's; PyTorch's time to launch a copy is included if the stream is idle meanwhile, as it is
    with small copies.
    """
    turns = max(_TURNS, _SETTLED // copies[0][1].nbytes)
    first, *others = [stream for stream, _, _ in copies]
    begin = streams.record(first)
    for stream in others:
        streams.wait(stream, begin)
    for _ in range(turns):
        for stream, destination, source in copies:
            (queue or streams.copy)(stream, destination, source)
    ends = [streams.record(stream) for stream, _, _ in copies]
    for end in ends:
        streams.synchronize(end)
    return max(streams.seconds(begin, end) for end in ends) / turns


def _stay(cpus: Sequence[int]) -> None:
    if cpus:
        os.sched_setaffinity(0, cpus)
