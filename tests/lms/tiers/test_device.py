"""The CPU as a device: what the limit bounds, and how it is read."""

import ctypes
import mmap
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

import lms.tiers.device as module
from lms.tiers.device import CpuDevice, memory_capacity

MB = 1 << 20
SIZE = 64 * MB


def touched(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1, nbytes)
    return memory


def test_current_follows_memory_that_is_used_and_given_back() -> None:
    device = CpuDevice()
    before = device.current()
    memory = touched(SIZE)
    assert device.current() - before == pytest.approx(SIZE, abs=8 * MB)
    memory.close()
    assert device.current() - before == pytest.approx(0, abs=8 * MB)


def test_the_peak_remembers_what_was_given_back_until_it_is_reset() -> None:
    device = CpuDevice()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device.reset_peak()
    before = device.current()
    touched(SIZE).close()
    assert device.peak() - before == pytest.approx(SIZE, abs=8 * MB)
    device.reset_peak()
    assert device.peak() - before == pytest.approx(0, abs=8 * MB)


def test_a_kernel_that_refuses_the_reset_is_mentioned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    device = CpuDevice()
    monkeypatch.setattr(module, "open", refuse, raising=False)
    with pytest.warns(RuntimeWarning, match=r"refuses to reset.*Permission denied"):
        device.reset_peak()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        device.reset_peak()
    assert device.peak() >= device.current() - MB


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


def test_marks_are_seconds_apart() -> None:
    device = CpuDevice()
    marks = [device.mark() for _ in range(3)]
    elapsed = device.elapsed(marks)
    assert len(elapsed) == 2
    assert sum(elapsed) == pytest.approx(float(marks[2]) - float(marks[0]))  # type: ignore[arg-type]
    assert device.elapsed([1.0, 3.5, 4.0]) == [2.5, 0.5]
    assert device.elapsed(marks[:1]) == device.elapsed([]) == []


def test_a_forked_child_reads_its_own_memory() -> None:
    script = """
import mmap, os
from lms.tiers.device import CpuDevice
device = CpuDevice()
before = device.current()
child = os.fork()
if child == 0:
    memory = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(bytes(64 << 20))
    os._exit(device.current() - before < 48 << 20 or device.peak() - before < 48 << 20)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert device.current() - before < 16 << 20
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=60)


def test_preparing_makes_freed_blocks_leave_the_process() -> None:
    # Blocks below the C library's own threshold, with one in use at the end of each run: the heap cannot shrink.
    script = """
import ctypes
from lms.tiers.device import CpuDevice
device, libc = CpuDevice(), ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = (ctypes.c_void_p,)
if PREPARE: assert device.prepare() is None
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
    assert "malloc cannot be told" in (CpuDevice().prepare() or "")


def test_another_allocator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Preloaded:
        mallctl = mallopt = staticmethod(lambda *_: 1)

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Preloaded())
    assert "jemalloc" in (CpuDevice().prepare() or "")


# Capacity: trees as the kernel shows them

TOTAL = 32 * 2**30
MOUNT_V1 = "30 25 0:26 {root} {point} rw,nosuid shared:9 - cgroup cgroup rw,memory\n"
MOUNT_V2 = "31 25 0:27 {root} {point} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
OTHER = (
    "32 25 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n22 1 253:1 / / rw,relatime - ext4 /dev/vda rw\n"
)


def tree(folder: Path, cgroup: str, mountinfo: str, limits: dict[str, str]) -> Path:
    files = {
        "proc/meminfo": f"MemTotal:       {TOTAL // 1024} kB\nMemFree:        1 kB\n",
        "proc/self/cgroup": cgroup,
        "proc/self/mountinfo": mountinfo + OTHER,
        **limits,
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def v2(root: str = "/", point: str = "/sys/fs/cgroup") -> str:
    return MOUNT_V2.format(root=root, point=point)


def v1(root: str = "/", point: str = "/sys/fs/cgroup/memory") -> str:
    return MOUNT_V1.format(root=root, point=point)


CASES: dict[str, tuple[str, str, dict[str, str], int]] = {
    "v2, the group itself": (
        "0::/user/job\n",
        v2(),
        {"sys/fs/cgroup/user/job/memory.max": "1000000\n", "sys/fs/cgroup/user/memory.max": "max\n"},
        1_000_000,
    ),
    "v2, a group above": (
        "0::/user/job\n",
        v2(),
        {"sys/fs/cgroup/user/job/memory.max": "max\n", "sys/fs/cgroup/user/memory.max": "2000000\n"},
        2_000_000,
    ),
    "v2, the least of all": (
        "0::/a/b/c\n",
        v2(),
        {
            "sys/fs/cgroup/a/b/c/memory.max": "5000000\n",
            "sys/fs/cgroup/a/b/memory.max": "3000000\n",
            "sys/fs/cgroup/a/memory.max": "4000000\n",
        },
        3_000_000,
    ),
    "v2, no limit": ("0::/user\n", v2(), {"sys/fs/cgroup/user/memory.max": "max\n"}, TOTAL),
    "v2, more than the machine has": ("0::/u\n", v2(), {"sys/fs/cgroup/u/memory.max": f"{2 * TOTAL}\n"}, TOTAL),
    "v2, inside a container's namespace": ("0::/\n", v2(), {"sys/fs/cgroup/memory.max": "7000000\n"}, 7_000_000),
    "v2, mounted from a part of the tree": (
        "0::/docker/abc/inner\n",
        v2(root="/docker/abc"),
        {"sys/fs/cgroup/inner/memory.max": "max\n", "sys/fs/cgroup/memory.max": "6000000\n"},
        6_000_000,
    ),
    "v2, outside the namespace's root": (
        "0::/../other\n",
        v2(),
        {"sys/fs/cgroup/memory.max": "8000000\n", "sys/fs/other/memory.max": "1\n"},
        8_000_000,
    ),
    "v1, the group itself": (
        "4:memory:/job\n0::/\n",
        v1(),
        {"sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9000000\n"},
        9_000_000,
    ),
    "v1, a group above": (
        "4:cpu,memory:/a/b\n",
        v1(),
        {
            "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "4000000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
        4_000_000,
    ),
    "v1, no limit": (
        "4:memory:/\n",
        v1(),
        {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
        TOTAL,
    ),
    "v1, a path told from outside the container": (
        "4:memory:/host/pod/abc\n",
        v1(root="/elsewhere"),
        {"sys/fs/cgroup/memory/memory.limit_in_bytes": "5000000\n"},
        5_000_000,
    ),
    "v1 and v2 side by side": (
        "4:memory:/job\n0::/job\n",
        v1() + v2(point="/sys/fs/cgroup/unified"),
        {
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "3000000\n",
            "sys/fs/cgroup/unified/job/cgroup.procs": "1\n",
        },
        3_000_000,
    ),
    "a mount point with a space": (
        "0::/job\n",
        v2(point="/mnt/my\\040groups"),
        {"mnt/my groups/job/memory.max": "2500000\n"},
        2_500_000,
    ),
    "no control groups": ("", "", {}, TOTAL),
}


@pytest.mark.parametrize("case", CASES)
def test_capacity_is_the_lesser_of_the_machine_and_the_control_groups(tmp_path: Path, case: str) -> None:
    cgroup, mountinfo, limits, expected = CASES[case]
    assert memory_capacity(tree(tmp_path, cgroup, mountinfo, limits)) == expected


def test_this_machine_has_a_capacity() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < CpuDevice().capacity() <= total
