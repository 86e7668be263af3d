"""Copies within host memory, on one or several threads, from one NUMA node's memory to another's."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

import numpy
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from lms.link.sweep import MB, Copy
from lms.memory.file import page_memory

_SETTLED = 64 * MB  # bytes of one measurement at least: smaller copies are repeated, behind one that fills the caches

Bytes = NDArray[numpy.uint8]
T = TypeVar("T")


@contextmanager
def host_copies(
    largest: int,
    *,
    threads: int = 1,
    near: Sequence[int] = (),
    far: Sequence[int] = (),
    memory: Callable[[int], mmap.mmap] = page_memory,
) -> Iterator[Copy]:
    """A function that copies so many bytes, `largest` at most, in memory.

    The copying threads keep to the processors `near`, and what they read lies with the processors `far` (by
    default the system chooses). Several threads copy a part each. `memory` is asked for so many bytes twice a
    thread: the source, then the target. Raises SpillError when there is no memory.
    """
    share = -(-largest // threads)
    with _Crew(threads, near) as crew:
        pairs = [(_array(memory(share)), _array(memory(share))) for _ in range(threads)]
        # Pages lie with the processor that touches them first.
        with _Crew(1, far or near) as there:
            there.all(lambda _: _fill([source for source, _ in pairs]))
        crew.all(lambda at: _fill(pairs[at][1:]))

        def copy(nbytes: int) -> float:
            size = max(1, nbytes // threads)
            turns = max(1, _SETTLED // nbytes)
            views = [(_turns(source, size, turns), _turns(target, size, turns)) for source, target in pairs]

            def timed(at: int) -> tuple[float, float]:
                source, target = views[at]
                if turns > 1:
                    numpy.copyto(target[:1], source[:1])
                crew.gate.wait()
                start = time.perf_counter()
                numpy.copyto(target, source)
                return start, time.perf_counter()

            took = crew.all(timed)
            return (max(end for _, end in took) - min(start for start, _ in took)) / turns

        yield copy
        pairs.clear()


def _fill(arrays: Iterable[Bytes]) -> None:
    for array in arrays:
        array.fill(1)


def _array(memory: mmap.mmap) -> Bytes:
    return numpy.frombuffer(memory, numpy.uint8)


def _turns(array: Bytes, nbytes: int, turns: int) -> NDArray[numpy.void] | Bytes:
    """The first bytes of `array`, `turns` times over: one copy of it copies them so often, without Python between.

    Each turn is one element, so that NumPy copies it as the C library does, whole.
    """
    if turns == 1:
        return array[:nbytes]
    whole = array[:nbytes].view(numpy.dtype((numpy.void, nbytes)))
    return as_strided(whole, (turns,), (0,))


class _Crew:
    """Threads that keep to some processors and do one thing at the same time."""

    def __init__(self, threads: int, cpus: Sequence[int]) -> None:
        self._threads = threads
        self._started = threading.Barrier(threads)
        self.gate = threading.Barrier(threads)  # for `work` of all()

        def settle() -> None:
            if cpus:
                os.sched_setaffinity(0, cpus)  # of this thread alone, on Linux
            # An executor reuses a thread that is idle, and each must be moved once. A failure here would throw away the
            # word that ends the executor's other threads.
            with suppress(threading.BrokenBarrierError):
                self._started.wait()

        self._pool = ThreadPoolExecutor(threads, initializer=settle)

    def __enter__(self) -> _Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._started.abort()  # for those that wait for a thread which could not be started
        self._pool.shutdown()

    def all(self, work: Callable[[int], T]) -> list[T]:
        """Let each thread do `work` with its number; what each gave."""

        def guarded(at: int) -> T:
            try:
                return work(at)
            except BaseException:
                self.gate.abort()  # the others do not wait for it
                raise

        done = [self._pool.submit(guarded, at) for at in range(self._threads)]
        return [one.result() for one in done]
