"""The process's memory as the kernel tells it, on memory that is really touched."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys

import pytest

from lms.memory.resident import ResidentSet

MB = 1 << 20
SIZE = 64 * MB


def touched(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1, nbytes)
    return memory


def test_current_follows_memory_that_is_used_and_given_back() -> None:
    subject = ResidentSet()
    before = subject.current()
    memory = touched(SIZE)
    assert subject.current() - before == pytest.approx(SIZE, abs=8 * MB)
    memory.close()
    assert subject.current() - before == pytest.approx(0, abs=8 * MB)


def test_the_peak_remembers_what_was_given_back_until_it_is_reset() -> None:
    subject = ResidentSet()
    subject.reset_peak()
    before = subject.current()
    touched(SIZE).close()
    assert subject.peak() - before == pytest.approx(SIZE, abs=8 * MB)
    subject.reset_peak()
    assert subject.peak() - before == pytest.approx(0, abs=8 * MB)


def test_a_kernel_that_counts_no_peak_tells_what_is_resident_now(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = ResidentSet()
    monkeypatch.setattr(os, "pread", lambda *_: b"90 20 10 1 0 50 0")
    assert subject.peak() == subject.current() == 20 * mmap.PAGESIZE


def test_files_that_a_script_has_used_up_hide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def used_up(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    subject = ResidentSet()
    subject.reset_peak()
    monkeypatch.setattr(os, "open", used_up)
    subject.reset_peak()
    assert min(subject.current(), subject.peak()) > MB


def test_once_closed_it_reads_zeros_and_holds_no_file() -> None:
    before = len(os.listdir("/proc/self/fd"))
    subject = ResidentSet()
    subject.reset_peak()
    assert len(os.listdir("/proc/self/fd")) == before + 3
    subject.close()
    subject.close()
    subject.reset_peak()
    assert (subject.current(), subject.peak()) == (0, 0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_forked_child_reads_its_own_memory() -> None:
    script = """
import mmap, os
from lms.memory.resident import ResidentSet
subject = ResidentSet()
before = subject.current()
child = os.fork()
if child == 0:
    memory = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(bytes(64 << 20))
    os._exit(subject.current() - before < 48 << 20 or subject.peak() - before < 48 << 20)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert subject.current() - before < 16 << 20
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=60)
