"""The CPU as a device: what the limit bounds, and how it is read."""

import ctypes
import os
import subprocess
import sys
import threading
import time
import warnings
from types import SimpleNamespace

import pytest

import lms.memory.device as module
from lms.errors import UsageError
from lms.memory.device import CpuDevice, Peak
from lms.memory.page_pool import PoolUsage
from lms.torch.cuda.device import CudaDevice

MB = 1 << 20


def test_a_kernel_that_refuses_the_reset_is_mentioned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    device = CpuDevice()
    monkeypatch.setattr(os, "open", refuse)
    with pytest.warns(RuntimeWarning, match=r"refuses to reset.*Permission denied"):
        device.reset_peak()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device.reset_peak()
    assert device.peak().held >= device.current() - MB


def test_reading_the_memory_costs_microseconds() -> None:
    device = CpuDevice()

    def best(read: object) -> float:  # the best of many: other processes only ever make it longer
        times = []
        for _ in range(300):
            start = time.perf_counter()
            read()  # type: ignore[operator]
            times.append(time.perf_counter() - start)
        return min(times)

    assert best(device.current) < 100e-6
    assert best(device.peak) < 200e-6


def test_a_limit_above_what_this_process_may_use_is_refused_with_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory_capacity", lambda: 300_000_000)
    device = CpuDevice(sharing=2)  # the limit is each rank's own: one of them may use what the other leaves
    with pytest.raises(UsageError, match=r"limit 420 MB: this process may use 300 MB.*at most 270 MB.*frac"):
        device.prepare(420_000_000)
    device.prepare(300_000_000)
    device.release()


def test_a_limit_above_the_gpus_memory_is_refused_with_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "paper GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80_000_000_000))
    device = CudaDevice(torch.device("cuda", 0))
    with pytest.raises(UsageError, match=r"limit 81 GB: paper GPU has 80 GB.*at most 72 GB"):
        device.prepare(81_000_000_000)
    assert device.prepare(80_000_000_000) is None


def test_marks_are_seconds_apart() -> None:
    device = CpuDevice()
    marks = [device.mark() for _ in range(3)]
    elapsed = device.elapsed(marks)
    assert len(elapsed) == 2
    assert sum(elapsed) == pytest.approx(float(marks[2]) - float(marks[0]))  # type: ignore[arg-type]
    assert device.elapsed([1.0, 3.5, 4.0]) == [2.5, 0.5]
    assert device.elapsed(marks[:1]) == device.elapsed([]) == []


@pytest.mark.alone
def test_a_thread_that_waits_computes_nothing() -> None:
    device = CpuDevice()
    waited, computed = time.perf_counter(), device.computed()
    threading.Event().wait(0.2)
    assert device.computed() - computed < 0.5 * (time.perf_counter() - waited)
    computed, before = device.computed(), time.thread_time()
    while time.thread_time() - before < 0.05:
        pass
    assert device.computed() - computed >= 0.05


def test_preparing_makes_freed_blocks_leave_the_process() -> None:
    # Blocks below the C library's own threshold, with one in use at the end of each run: the heap cannot shrink.
    script = """
import ctypes
from lms.memory.device import CpuDevice
device, libc = CpuDevice(), ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = (ctypes.c_void_p,)
if PREPARE: assert "page pool is not there" in device.prepare(None)
before = device.current()
blocks = [libc.malloc(100_000) for _ in range(500)]
for block in blocks: ctypes.memset(block, 1, 100_000)
for block in blocks[:-1]: libc.free(block)
print(device.current() - before)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    left = {}
    for prepare in (True, False):
        done = subprocess.run(
            [sys.executable, "-c", f"PREPARE = {prepare}\n{script}"],
            env={name: value for name, value in environment.items() if not name.startswith("MALLOC_")},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        left[prepare] = int(done.stdout)
    assert left[True] < 4 * MB
    assert left[False] > 40 * MB, "the script shows nothing"


def test_a_c_library_that_cannot_be_told_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    class Musl:
        pass

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Musl())
    assert "malloc cannot be told" in (CpuDevice().prepare(None) or "")


def test_another_allocator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Preloaded:
        mallctl = mallopt = staticmethod(lambda *_: 1)

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Preloaded())
    assert "jemalloc" in (CpuDevice().prepare(None) or "")


class FakePool:
    """A pool that keeps a log and has figures of the test's choice."""

    def __init__(self, *, gives_way: bool = True) -> None:
        self.gives_way = gives_way
        self.log: list[object] = []
        self.used = self.used_peak = self.idle = self.most = 0

    def install(self) -> bool:
        self.log.append("install")
        return self.gives_way

    def retire(self) -> None:
        self.log.append("retire")

    def keep(self, nbytes: int) -> None:
        self.log.append(nbytes)

    def reset_peak(self) -> None:
        self.used_peak, self.most = self.used, self.used + self.idle

    def usage(self) -> PoolUsage:
        return PoolUsage(self.used, self.used_peak, self.idle, self.most, 0, 0, 0, 0)


def with_pool(pool: FakePool, resident: list[int], limit: int | None) -> CpuDevice:
    device = CpuDevice(pool)
    device._resident.current = device._resident.peak = lambda: resident[-1]  # type: ignore[method-assign]
    device.reset_peak = pool.reset_peak  # type: ignore[method-assign]
    assert device.prepare(limit) is None
    return device


def test_what_is_idle_in_the_pool_is_resident_and_not_in_use() -> None:
    pool, resident = FakePool(), [100]
    device = with_pool(pool, resident, None)
    pool.used, pool.used_peak, pool.idle, pool.most = 30, 45, 20, 50
    resident.append(150)
    assert device.peak() == Peak(held=150, in_use=145)
    assert device.current() == 130
    assert pool.log == ["install"], "without a limit the pool keeps what it has"


def test_the_pool_keeps_what_the_limit_leaves_it() -> None:
    pool, resident = FakePool(), [100]
    device = with_pool(pool, resident, 12800)
    assert pool.log == ["install", 12600], "1/128 is for what grows until it is looked at again"
    pool.used = pool.most = 50
    resident.append(170)
    device.peak()
    assert pool.log[2:] == [12580], "20 bytes more are somebody else's"
    resident.append(160)
    device.peak()
    assert pool.log[3:] == [], "the most that others had is what they may need again"
    device.release()
    assert pool.log[3:] == ["retire"]
    assert device.current() == 160


def test_a_pool_that_another_allocator_keeps_out_is_done_without() -> None:
    pool = FakePool(gives_way=False)
    device = CpuDevice(pool)
    assert "page pool is not there" in (device.prepare(10**9) or "")
    assert device.current() > 0
    device.release()
    assert pool.log == ["install"]
