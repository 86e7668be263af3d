"""The CUDA engine: a GPU to pinned host memory, and past that to a file."""

from __future__ import annotations

import os
import warnings
import weakref
import zlib
from collections import deque

import torch

from lms.core.link import Link
from lms.errors import CorruptionError, LMSError, SpillError, UsageError
from lms.memory.file import FileSlab
from lms.memory.host import Block, HostSlab
from lms.memory.meter import Meter, measured_link
from lms.memory.slab import ALIGNMENT, round_up
from lms.memory.slots import Ledger, Slot
from lms.memory.transfer import Copy, FileEngine, FileSlot
from lms.torch.cuda.streams import CudaStreams, Event, Staged, Stream, StreamCopy, host_tensor, start
from lms.torch.engine import Engine
from lms.units import format_size

STAGE = 16 << 20  # bytes of page-locked memory a direction, through which a GPU reaches the file


class HostSlot(Slot):
    """A slot in the pinned slab."""

    __slots__ = ("block", "checksum", "written")

    def __init__(self, nbytes: int, block: Block, written: StreamCopy) -> None:
        super().__init__(nbytes)
        self.block = block
        self.written = written
        self.checksum: int | None = None


class CudaEngine(Engine):
    """A GPU to pinned memory over two streams; past what may and can be pinned to a file, piece by piece.

    With `verify` each copy is waited for and its bytes are checked in host memory: right, and slow.

    Raises UsageError when the slab's limit leaves no room for the stages that the file needs, and SpillError when the
    host does not lock them; `host` and `file` are closed then.
    """

    name = "host"

    def __init__(self, streams: CudaStreams, host: HostSlab, file: FileSlab | None, *, verify: bool = False) -> None:
        self.device = streams.device
        self.streams = streams
        self._host = host
        self._verify = verify
        self._meters = {"out": Meter(), "back": Meter()}
        self._flying: dict[str, deque[tuple[StreamCopy, HostSlot]]] = {"out": deque(), "back": deque()}
        self._stalls: deque[tuple[Meter, Event, Event]] = deque()
        self._slots: Ledger[HostSlot] = Ledger(lambda slot: host.free(slot.block))
        self._closed = False
        self._warned = False
        self._pid = os.getpid()
        self._stages: list[Block] = []
        self._files: FileEngine | None = None
        if file is not None:
            try:
                self._stages = _make_stages(host)
            except LMSError:
                host.close()
                file.close()
                raise
            self._files = FileEngine(file)
        self._end = weakref.finalize(self, _release, self._pid, streams, host)
        self._end.atexit = False  # the process's end unlocks the pages; CUDA may be gone by then

    def offload(self, source: torch.Tensor) -> tuple[Slot, Copy]:
        """Queue the copy to pinned memory, or hand it to the thread that writes the file."""
        self._check()
        with self._slots.lock:
            self._poll()
            block = self._host.allocate(source.nbytes)
            if block is None and self._files is None:
                block = self._reclaim(source.nbytes)
            if block is not None:
                copy = start(self.streams, self.streams.out, host_tensor(block), source, keep=source)
                slot = HostSlot(source.nbytes, block, copy)
                slot.users = 2
                self._flying["out"].append((copy, slot))
                if self._verify:
                    copy.synchronize()
                    slot.checksum = _checksum(block)
                return slot, copy
        assert self._files is not None
        if self._host.refused is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._host.refused}: {format_size(self._host.reserved)} could be locked, and what does not fit "
                f"there goes to the file in spill_dir={str(self._files.file.directory)!r}, which is slower; give this "
                "process more host memory, raise the limit so that less is swapped, or set host_limit to what can be "
                "locked here",
                RuntimeWarning,
                stacklevel=2,
            )
        memory = Staged(self.streams, self.streams.out, source, self._stages[0])
        return self._files.write(memory, source.nbytes, chunk=self._stages[0].nbytes, keep=source)

    def reload(self, slot: Slot) -> tuple[torch.Tensor, Copy]:
        """A tensor of the current stream's pool, and the copy that fills it."""
        self._check()
        tensor = self.streams.empty(slot.nbytes)
        if isinstance(slot, FileSlot):
            assert self._files is not None
            memory = Staged(self.streams, self.streams.back, tensor, self._stages[1])
            return tensor, self._files.read(slot, memory, keep=tensor)
        assert isinstance(slot, HostSlot)
        with self._slots.lock:
            self._poll()
            self._slots.use(slot)
            written = slot.written
            copy = start(
                self.streams,
                self.streams.back,
                tensor,
                host_tensor(slot.block),
                keep=tensor,
                after=() if written.done() else (written.marks[1],),
            )
            self._flying["back"].append((copy, slot))
            if slot.checksum is not None and _checksum(slot.block) != slot.checksum:
                copy.failed = CorruptionError(
                    f"host memory: {format_size(slot.nbytes)} came back other than they were written; check the memory"
                )
        return tensor, copy

    def discard(self, slot: Slot) -> None:
        """Free the slot once its copies are over."""
        if isinstance(slot, FileSlot):
            assert self._files is not None
            self._files.discard(slot)
        elif os.getpid() == self._pid and not self._closed:
            assert isinstance(slot, HostSlot)
            self._slots.drop(slot)
            self._slots.settle(self._poll)

    def usage(self) -> dict[str, int]:
        """Bytes of pinned memory, whether in use or not, and bytes in the file."""
        usage = {"host": self._host.reserved, "host_peak": self._host.peak}
        return usage | (self._files.usage() if self._files is not None else {})

    def link(self) -> Link | None:
        """Bandwidth and latency of the finished copies between the GPU and pinned memory."""
        self._slots.settle(self._poll)
        return measured_link(self.name, self._meters["out"], self._meters["back"])

    def stalled(self) -> tuple[float, float]:
        """Seconds that streams have waited for copies, as far as their events were reached."""
        self._slots.settle(self._poll)
        out, back = self._meters["out"].stalled, self._meters["back"].stalled
        if self._files is not None:
            to_file, from_file = self._files.stalled()
            return out + to_file, back + from_file
        return out, back

    def stream(self) -> Stream:
        """The current stream of this thread."""
        return self.streams.current()

    def capturing(self) -> bool:
        """Whether this thread captures a CUDA graph; a forked child has no CUDA to be asked."""
        return os.getpid() == self._pid and self.streams.capturing()

    def trim(self) -> None:
        """Unlock what was not needed since the last call, in whole segments."""
        if os.getpid() == self._pid and not self._closed:
            with self._slots.lock:
                self._poll()
                self._host.trim()

    def close(self) -> None:
        """Wait for the copies, unlock the pinned memory, close the file."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self._files is not None:
            self._files.close()
        self._end()
        with self._slots.lock:
            self._poll()

    def _reclaim(self, nbytes: int) -> Block:
        """A block once the copies that hold discarded slots are over. Raises SpillError when that does not help."""
        for direction in ("out", "back"):
            for copy, slot in list(self._flying[direction]):
                if slot.dropped:
                    copy.synchronize()
        self._poll()
        host = self._host
        block = host.allocate(nbytes)
        if block is not None:
            return block
        if host.refused is not None:
            raise SpillError(
                f"host memory: {format_size(nbytes)} more were asked for, {format_size(host.reserved)} are locked for "
                f"the GPU ({format_size(host.used)} of them taken), and {host.refused}; give this process more host "
                "memory, give a spill_dir for the rest, or raise the limit so that less is swapped"
            )
        raise SpillError(
            f"host_limit: {format_size(nbytes)} more do not fit into the {format_size(host.limit or 0)} of pinned "
            f"memory that this process may use ({format_size(host.used)} are taken); raise host_limit, give a "
            "spill_dir for the rest, or raise the limit so that less is swapped"
        )

    def _poll(self) -> None:
        """Note the copies that are over, and the stalls with a known length. Called with the lock."""
        for direction, flying in self._flying.items():
            meter = self._meters[direction]
            while flying and flying[0][0].done():
                copy, slot = flying.popleft()
                meter.add(copy.nbytes, copy.seconds())
                self._stalls.extend((meter, before, after) for before, after in copy.stalls)
                self._slots.leave(slot)
        while self._stalls and self.streams.done(self._stalls[0][2]):  # the later ones most likely are not
            meter, before, after = self._stalls.popleft()
            meter.stalled += self.streams.seconds(before, after)
        self._slots.count()

    def _check(self) -> None:
        if self._closed:
            raise SpillError("the engine is closed: its session has ended")
        if os.getpid() != self._pid:
            raise SpillError("this process was forked from one that uses LMS on a GPU, which only the parent can")


def _make_stages(host: HostSlab) -> list[Block]:
    size = STAGE if host.limit is None else min(STAGE, host.limit // 2 // ALIGNMENT * ALIGNMENT)
    stages = [host.allocate(size) for _ in range(2)] if size else []
    blocks = [block for block in stages if block is not None]
    if len(blocks) == 2:
        return blocks
    if host.refused is not None:
        raise SpillError(
            f"host memory: the file tier needs {format_size(2 * size)} locked for the GPU, and {host.refused}; "
            "give this process more host memory"
        )
    raise UsageError(
        f"host_limit={host.limit}: the file tier needs two stages of pinned memory; "
        f"give at least {2 * round_up(ALIGNMENT)} bytes, and better {format_size(2 * STAGE)} or more"
    )


def _release(pid: int, streams: CudaStreams, host: HostSlab) -> None:
    if os.getpid() == pid:
        for stream in (streams.out, streams.back):
            streams.synchronize(streams.record(stream))
        host.close()


def _checksum(block: Block) -> int:
    return zlib.crc32(memoryview(block.memory)[block.offset : block.offset + block.nbytes])
