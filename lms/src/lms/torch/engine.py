"""Engines: where a device's bytes go and how they come back, as tensors. `make_engine` chooses one."""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
import weakref
import zlib
from collections import deque
from pathlib import Path
from typing import Protocol

import torch

from lms.errors import CorruptionError, SpillError, UsageError
from lms.link import Link
from lms.meter import Meter, measured_link
from lms.tiers.device import CpuDevice, CudaDevice, Device, memory_capacity
from lms.tiers.file import FileSlab, page_memory
from lms.tiers.host import Block, HostSlab, cuda_register, cuda_unregister
from lms.tiers.slab import ALIGNMENT, round_up
from lms.torch.streams import CudaStreams, Event, Staged, StreamCopy, Streams, host_tensor, over, start
from lms.transfer import At, Copy, FileEngine, FileSlot, Slot
from lms.units import format_size

STAGE = 16 << 20  # bytes of page-locked memory a direction, through which a GPU reaches the file
_PIECE = 32 << 20  # bytes of one calibration copy
_HOST_SHARE = 0.75  # of the host's memory: the pinned slab's limit when none is given


class Engine(Protocol):
    """Moves flat byte tensors off the device and back. Called under one lock; copies may be waited for outside it."""

    name: str  # where bytes go: "file", "host"

    def offload(self, source: torch.Tensor) -> tuple[Slot, Copy]:
        """Start the copy out of `source` (uint8, one dimension, contiguous, on the device).

        The engine keeps `source` alive until the copy is over. On CUDA `source` must come from the current stream's
        pool, or its owner must have ordered that pool behind the current stream. Raises SpillError when the tier takes
        no more.
        """

    def reload(self, slot: Slot) -> tuple[torch.Tensor, Copy]:
        """A uint8 tensor of `slot.nbytes` on the device, and the copy that fills it.

        It starts at the same distance from a page's (on CUDA: the allocator's) boundary as the tensor that left.
        """

    def discard(self, slot: Slot) -> None:
        """Free the slot when its copies are over. Never blocks; idempotent; may come from any thread."""

    def usage(self) -> dict[str, int]:
        """Bytes below the device: `host`, `host_peak`, `file`, `file_peak`."""

    def link(self) -> Link | None:
        """Bandwidth and latency of the copies so far; None before any."""

    def stalled(self) -> tuple[float, float]:
        """Seconds that the computation has stood still for copies out, and for copies back, as far as known by now."""

    def calibrate(self, nbytes: int) -> Link:
        """Copy `nbytes` out and back, one piece at a time, and measure."""

    def close(self) -> None:
        """Wait for the copies and give everything back. Idempotent; does nothing in a forked child."""


def make_engine(device: torch.device, *, spill_dir: Path | None, host_limit: int | None, verify: bool) -> Engine:
    """The engine for `device`: RAM to a file on a CPU, GPU to pinned memory (and past `host_limit` a file) on CUDA.

    `host_limit` is the host's, in bytes: the ranks of one host (LOCAL_WORLD_SIZE) share it evenly; None takes three
    quarters of the host's memory. Raises UsageError for another kind of device, SpillError for a bad `spill_dir`.
    """
    if device.type == "cpu":
        if host_limit is not None:
            warnings.warn(
                "host_limit has no effect on a CPU device: its tier is the file in spill_dir, without pinned memory",
                RuntimeWarning,
                stacklevel=2,
            )
        return CpuEngine(FileSlab(spill_dir or Path(tempfile.gettempdir()), verify=verify))
    if device.type == "cuda":
        whole = int(memory_capacity() * _HOST_SHARE) if host_limit is None else host_limit
        ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        host = HostSlab(cuda_register, cuda_unregister, limit=whole // ranks)
        file = FileSlab(spill_dir, verify=verify) if spill_dir is not None else None
        return CudaEngine(CudaStreams(device), host, file, verify=verify)
    raise UsageError(f"device={str(device)!r}: LMS swaps tensors of a 'cpu' or a 'cuda' device")


def device_for(device: torch.device) -> Device:
    """What the limit bounds on `device`. Raises UsageError when it is neither a CPU nor a CUDA device."""
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda":
        return CudaDevice(device)
    raise UsageError(f"device={str(device)!r}: LMS swaps tensors of a 'cpu' or a 'cuda' device")


class CpuEngine:
    """RAM to a slab file. What comes back lies in memory of its own, that the system has again when the tensor dies."""

    name = "file"

    def __init__(self, file: FileSlab) -> None:
        self._files = FileEngine(file)

    @property
    def file(self) -> FileSlab:
        """The slab file, for its state and its descriptor."""
        return self._files.file

    def offload(self, source: torch.Tensor) -> tuple[Slot, Copy]:
        """Start the copy to the file, straight from the tensor's pages."""
        address = source.data_ptr()
        return self._files.write(At(address), source.nbytes, skew=address % ALIGNMENT, keep=source)

    def reload(self, slot: Slot) -> tuple[torch.Tensor, Copy]:
        """A tensor over fresh pages, and the copy from the file straight into them."""
        assert isinstance(slot, FileSlot)
        place = slot.places[0]
        tensor = over(page_memory(place.span), place.skew, slot.nbytes)
        return tensor, self._files.read(slot, At(tensor.data_ptr()), keep=tensor)

    def discard(self, slot: Slot) -> None:
        """Free the slot once its copies are over."""
        assert isinstance(slot, FileSlot)
        self._files.discard(slot)

    def usage(self) -> dict[str, int]:
        """Bytes in the file; there are none in a host tier."""
        return {"host": 0, "host_peak": 0} | self._files.usage()

    def link(self) -> Link | None:
        """What the copies so far measured."""
        return self._files.link(self.name)

    def stalled(self) -> tuple[float, float]:
        """Seconds that threads have waited for copies."""
        return self._files.out.meter.stalled, self._files.back.meter.stalled

    def calibrate(self, nbytes: int) -> Link:
        """Write and read `nbytes` of noise."""
        return _calibrate(self, torch.device("cpu"), nbytes)

    def close(self) -> None:
        """Wait, end the threads, close the file."""
        self._files.close()


class HostSlot(Slot):
    """A slot in the pinned slab."""

    __slots__ = ("block", "checksum", "written")

    def __init__(self, nbytes: int, block: Block, written: StreamCopy) -> None:
        super().__init__(nbytes)
        self.block = block
        self.written = written
        self.checksum: int | None = None


class CudaEngine:
    """A GPU to pinned memory over two streams; past the slab's limit to a file, piece by piece through a stage.

    With `verify` each copy is waited for and its bytes are checked in host memory: right, and slow.

    Raises UsageError when the slab's limit leaves no room for the stages that the file needs.
    """

    name = "host"

    def __init__(self, streams: Streams, host: HostSlab, file: FileSlab | None, *, verify: bool = False) -> None:
        self._streams = streams
        self._host = host
        self._verify = verify
        self._meters = {"out": Meter(), "back": Meter()}
        self._flying: dict[str, deque[tuple[StreamCopy, HostSlot]]] = {"out": deque(), "back": deque()}
        self._stalls: list[tuple[Meter, Event, Event]] = []
        self._left: deque[HostSlot] = deque()  # as in FileEngine
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._stages: list[Block] = []
        self._files: FileEngine | None = None
        if file is not None:
            self._stages = self._make_stages(host)
            self._files = FileEngine(file)
        self._end = weakref.finalize(self, _release, self._pid, streams, host)
        self._end.atexit = False  # the process's end unlocks the pages; CUDA may be gone by then

    def offload(self, source: torch.Tensor) -> tuple[Slot, Copy]:
        """Queue the copy to pinned memory, or hand it to the thread that writes the file."""
        self._check()
        with self._lock:
            self._poll()
            block = self._host.allocate(source.nbytes)
            if block is None and self._files is None:
                block = self._reclaim(source.nbytes)
            if block is not None:
                return self._offload(source, block)
        assert self._files is not None
        memory = Staged(self._streams, self._streams.out, source, self._stages[0])
        return self._files.write(memory, source.nbytes, chunk=self._stages[0].nbytes, keep=source)

    def reload(self, slot: Slot) -> tuple[torch.Tensor, Copy]:
        """A tensor of the current stream's pool, and the copy that fills it."""
        self._check()
        tensor = self._streams.empty(slot.nbytes)
        if isinstance(slot, FileSlot):
            assert self._files is not None
            memory = Staged(self._streams, self._streams.back, tensor, self._stages[1])
            return tensor, self._files.read(slot, memory, keep=tensor)
        assert isinstance(slot, HostSlot)
        if slot.dropped:
            raise ValueError("the slot was discarded: its bytes may be another's by now")
        with self._lock:
            self._poll()
            written = slot.written
            copy = start(
                self._streams,
                self._streams.back,
                tensor,
                host_tensor(slot.block),
                keep=tensor,
                after=() if written.done() else (written.marks[1],),
            )
            slot.users += 1
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
        elif not slot.dropped and os.getpid() == self._pid and not self._closed:
            assert isinstance(slot, HostSlot)
            slot.dropped = True
            self._leave(slot)

    def usage(self) -> dict[str, int]:
        """Bytes of pinned memory, whether in use or not (it grows until `close`), and bytes in the file."""
        usage = {"host": self._host.reserved, "host_peak": self._host.peak, "file": 0, "file_peak": 0}
        return usage | (self._files.usage() if self._files is not None else {})

    def link(self) -> Link | None:
        """What the copies between the GPU and pinned memory measured, as far as they are over."""
        self._settle()
        return measured_link(self.name, self._meters["out"], self._meters["back"])

    def stalled(self) -> tuple[float, float]:
        """Seconds that streams have waited for copies, as far as their events were reached."""
        self._settle()
        out, back = self._meters["out"].stalled, self._meters["back"].stalled
        if self._files is not None:
            out, back = out + self._files.out.meter.stalled, back + self._files.back.meter.stalled
        return out, back

    def calibrate(self, nbytes: int) -> Link:
        """Copy `nbytes` to pinned memory and back."""
        return _calibrate(self, self._streams.device, nbytes)

    def close(self) -> None:
        """Wait for the copies, unlock the pinned memory, close the file."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self._files is not None:
            self._files.close()
        self._end()
        with self._lock:
            self._poll()

    def _offload(self, source: torch.Tensor, block: Block) -> tuple[HostSlot, StreamCopy]:
        copy = start(self._streams, self._streams.out, host_tensor(block), source, keep=source)
        slot = HostSlot(source.nbytes, block, copy)
        slot.users = 2
        self._flying["out"].append((copy, slot))
        if self._verify:
            copy.synchronize()
            slot.checksum = _checksum(block)
        return slot, copy

    def _reclaim(self, nbytes: int) -> Block:
        """A block once the copies that hold discarded slots are over. Raises SpillError when that does not help."""
        for direction in ("out", "back"):
            for copy, slot in list(self._flying[direction]):
                if slot.dropped:
                    copy.synchronize()
        self._poll()
        block = self._host.allocate(nbytes)
        if block is None:
            limit = format_size(self._host.limit or 0)
            raise SpillError(
                f"host_limit: {format_size(nbytes)} more do not fit into the {limit} of pinned memory that this "
                f"process may use ({format_size(self._host.used)} are taken); raise host_limit, give a spill_dir for "
                "the rest, or raise the limit so that less is swapped"
            )
        return block

    def _poll(self) -> None:
        """Take note of what was reached: copies that are over, stalls whose length is known. Called with the lock."""
        for direction, flying in self._flying.items():
            meter = self._meters[direction]
            while flying and flying[0][0].done():
                copy, slot = flying.popleft()
                meter.add(copy.nbytes, copy.seconds())
                self._stalls += [(meter, before, after) for before, after in copy.stalls]
                self._left.append(slot)
        waiting = []
        for meter, before, after in self._stalls:
            if self._streams.done(after):
                meter.stalled += self._streams.seconds(before, after)
            else:
                waiting.append((meter, before, after))
        self._stalls = waiting
        while self._left:
            slot = self._left.popleft()
            slot.users -= 1
            if not slot.users and not self._closed:
                self._host.free(slot.block)

    def _leave(self, slot: HostSlot) -> None:
        self._left.append(slot)
        self._settle()

    def _settle(self) -> None:
        if self._lock.acquire(blocking=False):  # the garbage collector may have come here from inside a method
            try:
                self._poll()
            finally:
                self._lock.release()

    def _make_stages(self, host: HostSlab) -> list[Block]:
        size = STAGE if host.limit is None else min(STAGE, host.limit // 2 // ALIGNMENT * ALIGNMENT)
        stages = [host.allocate(size) for _ in range(2)] if size else []
        blocks = [block for block in stages if block is not None]
        if len(blocks) < 2:
            raise UsageError(
                f"host_limit={host.limit}: the file tier needs two stages of pinned memory; "
                f"give at least {2 * round_up(ALIGNMENT)} bytes, and better {format_size(2 * STAGE)} or more"
            )
        return blocks

    def _check(self) -> None:
        if self._closed:
            raise SpillError("the engine is closed: its session has ended")
        if os.getpid() != self._pid:
            raise SpillError("this process was forked from one that uses LMS on a GPU, which only the parent can")


def _release(pid: int, streams: Streams, host: HostSlab) -> None:
    if os.getpid() == pid:
        for stream in (streams.out, streams.back):
            streams.synchronize(streams.record(stream))
        host.close()


def _checksum(block: Block) -> int:
    return zlib.crc32(memoryview(block.memory)[block.offset : block.offset + block.nbytes])


def _calibrate(engine: Engine, device: torch.device, nbytes: int) -> Link:
    """Noise, since a disk may spare itself zeros; from the system, since the framework's generators are the user's."""
    piece = min(max(nbytes, 1), _PIECE)
    grain = torch.frombuffer(bytearray(os.urandom(min(piece, 1 << 20))), dtype=torch.uint8)
    source = grain.repeat(-(-piece // len(grain)))[:piece].to(device)
    slots = []
    try:
        for begin in range(0, max(nbytes, 1), piece):
            slot, copy = engine.offload(source[: min(piece, max(nbytes, 1) - begin)])
            slots.append(slot)
            copy.synchronize()
        for slot in slots:
            tensor, copy = engine.reload(slot)
            copy.synchronize()
            del tensor, copy
    finally:
        for slot in slots:
            engine.discard(slot)
    link = engine.link()
    assert link is not None
    return link
