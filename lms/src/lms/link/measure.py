"""`lms link measure`: finds this machine's links, divides the time among them, copies, and collects the figures.

Bounds, which `docs/links.md` states: SECONDS in all, a quarter of the memory that is available, a tenth of what is free
on the disk, a quarter of a GPU's free memory.
"""

from __future__ import annotations

import ctypes
import os
import time
import warnings
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from lms.errors import LMSError, SpillError, UsageError
from lms.link import nvml
from lms.link.draft import Draft, Task, run
from lms.link.file import FileProbe
from lms.link.gpu import Gpu
from lms.link.memory import host_copies
from lms.link.profile import KINDS, Absence, Kind, MeasuredLink, Profile, readable
from lms.link.series import Direction
from lms.link.sweep import QUICK_SIZES, SIZES, WORTH, Copy, cut
from lms.memory import machine
from lms.memory.capacity import memory_capacity
from lms.memory.disk import disk_at
from lms.units import format_size

SECONDS, QUICK_SECONDS = 50.0, 7.0  # from the beginning to the last link; what stands around it takes a second or two
_AT_LEAST = 0.5  # of these are for the links, however long PyTorch and the GPUs' contexts took
MEMORY_SHARE, DISK_SHARE = 0.25, 0.10
# A copy that counts for memory is of so many times what the last caches hold: source and target are twice that.
_PAST = 2
_UNKNOWN_CACHE = 128 << 20  # bytes; if the kernel names none


def measure(folder: Path, *, quick: bool = False, kinds: Collection[Kind] = (), name: str = "") -> Profile:
    """Measure the links of this machine; if `kinds` are given, only those. The file link is that of `folder`.

    What cannot be measured is named in `absent` with the reason. Raises UsageError if `folder` is no folder, or if
    nothing at all could be measured.
    """
    begun = time.monotonic()
    sizes = QUICK_SIZES if quick else SIZES
    seen = nvml.look()
    gpus, absent = list(seen.gpus), list(seen.absent)
    drafts: list[Draft] = []
    wanted = set(kinds or KINDS)
    if "file" in wanted:
        drafts += file_drafts(folder, sizes, absent)
    if wanted & {"gpu", "peer"}:
        drafts += [draft for draft in cuda_drafts(gpus, sizes, absent) if draft.link.kind in wanted]
    if "memory" in wanted:  # last: the kernel may take seconds to give the memory, which no other link should miss
        drafts += memory_drafts(sizes, absent)
    seconds = QUICK_SECONDS if quick else SECONDS
    left = max(seconds - (time.monotonic() - begun), _AT_LEAST * seconds)
    links = run(drafts, left, absent)
    absent = [one for one in absent if _concerns(one, kinds)]
    if not links:
        raise UsageError(f"nothing could be measured: {'; '.join(f'{one.what}: {one.why}' for one in absent)}")
    facts = machine.machine()
    return Profile(
        name=readable(name or facts["host"]),
        origin="measured",
        links=tuple(links),
        absent=tuple(absent),
        machine=facts | _gpu_facts(seen),
        capacity=_capacity(folder, gpus),
        when=datetime.now(UTC).isoformat(timespec="seconds"),
    )


# What there is to measure


def memory_drafts(sizes: tuple[int, ...], absent: list[Absence]) -> list[Draft]:
    """Copies in memory: by one thread and by all of each NUMA node, and from each node's memory to each other's."""
    room = machine.memory_room(MEMORY_SHARE) // 2
    allowed = os.sched_getaffinity(0)
    least = _PAST * (machine.last_cache(allowed) or _UNKNOWN_CACHE)
    sizes = (*sizes, least) if least > sizes[-1] else sizes
    fitting = _fitting(sizes, room)
    if not fitting or fitting[-1] < least:
        why = (
            f"copies must be of {format_size(least)} or more, well past the caches, and would take more than "
            f"{format_size(2 * room)}, a quarter of what is available"
        )
        absent.append(Absence("memory", why))
        return []
    notes = cut(fitting, sizes, "a quarter of the memory that is available")
    numa = [
        (node.index, tuple(sorted(allowed & set(node.cpus)))) for node in machine.nodes() if allowed & set(node.cpus)
    ]
    drafts = []
    for here, cpus in numa:
        alone = len(numa) == 1
        draft = Draft(MeasuredLink("memory" if alone else f"node{here}", "memory", _within(here, alone), notes=notes))
        for threads in sorted({1, len(cpus)}):
            draft.tasks.append(_memory_task(fitting, least, threads, () if alone else cpus, ()))
        drafts.append(draft)
        for there, far in numa:
            if there != here and len(numa) <= 4:  # sixteen pairs are what the time allows
                what = f"copies by node {here} of what lies with node {there}"
                far_draft = Draft(MeasuredLink(f"node{there}-node{here}", "numa", what, notes=notes))
                far_draft.tasks.append(_memory_task(fitting, least, 1, cpus, far, weight=0.5))
                drafts.append(far_draft)
    return drafts


def _within(node: int, alone: bool) -> str:
    return "copies in host memory" if alone else f"copies within the memory of node {node}"


def _memory_task(
    sizes: tuple[int, ...], least: int, threads: int, near: tuple[int, ...], far: tuple[int, ...], weight: float = 1.0
) -> Task:
    via = f"{threads} thread{'s' if threads > 1 else ''}"

    def opened() -> AbstractContextManager[Copy]:
        return host_copies(sizes[-1], threads=threads, near=near, far=far)

    return Task("copy", lambda: via, opened, sizes, weight, least=least)


def file_drafts(folder: Path, sizes: tuple[int, ...], absent: list[Absence]) -> list[Draft]:
    """A file in `folder`, written, read, and both at once. Raises UsageError if `folder` is no folder."""
    disk = disk_at(folder)
    name = readable(f"file {folder}")
    state = os.statvfs(folder)
    free = state.f_bavail * state.f_frsize
    # A disk is slower than memory. Reading and writing at once takes memory for both.
    room = min(int(free * DISK_SHARE), machine.memory_room(MEMORY_SHARE) // 2)
    fitting = _fitting(sizes, room)
    if not fitting or fitting[-1] < WORTH:
        why = f"{format_size(free)} are free there, and a tenth of it is less than the {format_size(WORTH)} of a sweep"
        absent.append(Absence(name, f"{why}: free some, or name another folder with --dir"))
        return []
    notes = (*disk.notes(), *cut(fitting, sizes, "a tenth of what is free there, or a quarter of the memory"))
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            probe = FileProbe(folder, fitting[-1])
    except LMSError as error:
        absent.append(Absence(name, _of_dir(folder, error)))
        return []
    if heard and not disk.memory:
        notes = (*notes, "through the page cache, since this file system refuses O_DIRECT: memory has its part in it")
    draft = Draft(MeasuredLink(name, "file", disk.what(), notes=notes), close=probe.close)

    @contextmanager
    def copies(direction: Direction) -> Iterator[Copy]:
        try:
            with probe.copies(direction) as copy:
                yield copy
        except SpillError as error:
            raise SpillError(_of_dir(folder, error)) from error

    def task(direction: Direction, weight: float) -> Task:
        ways = 2 if direction == "both" else 1
        return Task(
            direction,
            lambda: probe.via,
            lambda: copies(direction),
            tuple(one for one in fitting if one * ways <= fitting[-1]),
            weight,
            most=lambda: probe.largest // ways,
            # What could not be written in the time cannot be read in it.
            done=(lambda series: probe.shrink(series.points[-1].nbytes)) if direction == "out" else lambda series: None,
        )

    draft.tasks += [task("out", 2.0), task("back", 2.0), task("both", 1.0)]  # both ways: copies of half the size
    return [draft]


def _of_dir(folder: Path, error: LMSError) -> str:
    """The error in this command's words: the file tier's message names options of `lms run`."""
    found = str(error).removeprefix(f"spill_dir={str(folder)!r}: ").split(";")[0]
    return f"--dir={str(folder)!r}: {found}; name a folder on a local disk with room that this user may write to"


def cuda_drafts(gpus: list[Gpu], sizes: tuple[int, ...], absent: list[Absence]) -> list[Draft]:
    """The GPUs' links to their host and to each other, as far as PyTorch reaches them."""
    if find_spec("torch") is None:
        absent.append(
            Absence("GPU copies", "PyTorch is not installed: pip install './lms[torch]' in a copy of the repository")
        )
        return []
    if not _driver_is_here():
        return []  # NVML has said so already
    from lms.link import gpu_drafts

    return gpu_drafts.of(gpus, sizes, absent)


def _driver_is_here() -> bool:
    """Whether a CUDA driver can be loaded. If not, PyTorch, which takes seconds to load, is not asked."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _fitting(sizes: tuple[int, ...], room: int) -> tuple[int, ...]:
    return tuple(one for one in sizes if one <= room)


def _capacity(folder: Path, gpus: list[Gpu]) -> dict[str, int]:
    memory = memory_capacity()
    found = {"device": min((gpu.memory for gpu in gpus if gpu.memory), default=memory), "host": memory}
    try:
        state = os.statvfs(folder)
    except OSError:  # of no interest if the file was not asked for
        return found
    if state.f_bavail:
        found["file"] = state.f_bavail * state.f_frsize
    return found


def _gpu_facts(seen: nvml.Seen) -> dict[str, str]:
    facts = {f"GPU {gpu.index}": gpu.name for gpu in seen.gpus}
    return facts | ({"NVIDIA driver": seen.driver} if seen.driver else {})


def _concerns(absence: Absence, kinds: Collection[Kind]) -> bool:
    """Whether the absence matters to a user who asked for `kinds` only."""
    return not kinds or "gpu" in kinds or "peer" in kinds or not absence.what.startswith("GPU")
