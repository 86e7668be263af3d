"""The resident set of this process: the bytes now, and the most since a reset, as Linux counts them."""

from __future__ import annotations

import os

_PAGE = os.sysconf("SC_PAGE_SIZE")


class ResidentSet:
    """The kernel's figures for this process's memory. A forked child's object reads the child's.

    The kernel's files are opened once, so that a script may use up its open files. Raises OSError if they cannot be
    opened. Once closed it reads zeros: the collector may close it before it is asked last.
    """

    def __init__(self) -> None:
        self._open()

    def current(self) -> int:
        """Resident bytes, exact to some pages a core (the kernel counts them by core)."""
        return int(os.pread(self._statm, 128, 0).split(b" ", 2)[1]) * _PAGE if self._is_open() else 0

    def peak(self) -> int:
        """Most resident bytes since `reset_peak`, or of the process's life if the kernel refuses a reset."""
        if not self._is_open():
            return 0
        text = os.pread(self._status, 4096, 0)
        at = text.find(b"VmHWM:")
        if at < 0:  # a kernel that does not count it: what is resident now is the best that is known
            return self.current()
        return int(text[at + 6 : text.index(b"kB", at)]) * 1024

    def reset_peak(self) -> None:
        """Let `peak` begin anew. Raises OSError if the kernel refuses, or has no file left for it."""
        if self._is_open():
            if "_clear" not in self.__dict__:
                self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
            os.pwrite(self._clear, b"5", 0)

    def close(self) -> None:
        """Close the files. Idempotent."""
        for name in ("_statm", "_status", "_clear"):
            if name in self.__dict__:
                os.close(self.__dict__.pop(name))

    __del__ = close

    def _open(self) -> None:
        self._pid = os.getpid()
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)

    def _is_open(self) -> bool:
        if "_status" not in self.__dict__:
            return False
        if os.getpid() != self._pid:  # the files still tell of the parent
            self.close()
            self._open()
        return True
