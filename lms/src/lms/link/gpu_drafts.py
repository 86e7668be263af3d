"""What there is to measure of GPUs, as far as PyTorch reaches them: each one's link to its host, and to the others."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lms.link import host
from lms.link.cuda import Pinned, gpu_copies, peer_copies
from lms.link.draft import Draft, Open, Task
from lms.link.gpu import Gpu, pair_ceiling, pair_words
from lms.link.profile import Absence, MeasuredLink
from lms.link.series import Direction
from lms.link.sweep import Copy
from lms.torch.streams import CudaStreams
from lms.units import format_size

MEMORY_SHARE, GPU_SHARE = 0.25, 0.25
_DIRECTIONS: tuple[Direction, ...] = ("out", "back", "both")


def of(gpus: Sequence[Gpu], sizes: tuple[int, ...], absent: list[Absence]) -> list[Draft]:
    """The drafts; what PyTorch does not reach is named in `absent`."""
    if not torch.cuda.is_available():
        if gpus:
            why = f"PyTorch {torch.__version__} sees no GPU: a CPU build, or CUDA_VISIBLE_DEVICES hides them"
            absent.append(Absence("GPU copies", why))
        return []
    count = torch.cuda.device_count()
    room = host.memory_room(MEMORY_SHARE) // 2
    free = min(torch.cuda.mem_get_info(index)[0] for index in range(count))
    fitting = tuple(size for size in sizes if size <= min(room, int(free * GPU_SHARE) // 2))
    if not fitting:
        absent.append(
            Absence("GPU copies", f"a quarter of the {format_size(free)} that are free on a GPU is too little")
        )
        return []
    notes: tuple[str, ...] = ()
    if len(fitting) < len(sizes):
        notes = (
            f"a smaller sweep, up to {format_size(fitting[-1])}: more would have been more than a quarter of memory",
        )
    known = [described(index, torch.cuda.get_device_properties(index), gpus) for index in range(count)]
    pinned = _Pinned(fitting[-1])
    drafts = [_host_draft(gpu, fitting, notes, pinned) for gpu in known]
    drafts[-1].close = pinned.close
    drafts += [_peer_draft(one, other, fitting, notes) for at, one in enumerate(known) for other in known[at + 1 :]]
    return drafts


@dataclass(frozen=True)
class Known:
    """A GPU by PyTorch's number, its name among links, and what NVML tells of it."""

    index: int
    name: str
    gpu: Gpu


def described(index: int, properties: object, gpus: Sequence[Gpu]) -> Known:
    """PyTorch's GPU `index`, found among NVML's `gpus` by its UUID, since the two number GPUs differently.

    Links bear NVML's number, as in `lms link show`. What NVML does not know (an instance of MIG) has PyTorch's.
    """
    uuid = str(getattr(properties, "uuid", "")).removeprefix("GPU-").lower()
    for gpu in gpus:
        if uuid and gpu.uuid.removeprefix("GPU-").lower() == uuid:
            return Known(index, f"gpu{gpu.index}", gpu)
    name, memory = str(getattr(properties, "name", "GPU")), int(getattr(properties, "total_memory", 0))
    return Known(index, f"cuda{index}" if gpus else f"gpu{index}", Gpu(index, name, memory=memory))


def _host_draft(known: Known, sizes: tuple[int, ...], notes: tuple[str, ...], pinned: _Pinned) -> Draft:
    gpu = known.gpu
    way, ceiling = gpu.host()
    what = f"{gpu.name}, {way}"
    draft = Draft(MeasuredLink(known.name, "gpu", what, ceiling=ceiling, notes=(*notes, *gpu.warnings())))
    device = torch.device("cuda", known.index)
    allowed = os.sched_getaffinity(0)
    nodes = [node for node in host.nodes() if allowed & set(node.cpus)]
    near = next((node for node in nodes if node.index == gpu.node), None)
    for node in [near] if near else nodes:
        cpus = tuple(sorted(allowed & set(node.cpus))) if len(nodes) > 1 else ()
        via = "pinned" if near or len(nodes) == 1 else f"pinned, node {node.index}"
        draft.tasks += [_task(one, via, pinned.task(device, cpus, one), sizes) for one in _DIRECTIONS]
    for node in nodes:
        if near and node is not near:
            cpus, via = tuple(sorted(allowed & set(node.cpus))), f"pinned, node {node.index}"
            draft.tasks += [_task(one, via, pinned.task(device, cpus, one), sizes, 0.5) for one in _DIRECTIONS[:2]]
    draft.tasks += [_task(one, "pageable", _pageable(device, sizes[-1], one), sizes, 0.5) for one in _DIRECTIONS[:2]]
    return draft


def _peer_draft(one: Known, other: Known, sizes: tuple[int, ...], notes: tuple[str, ...]) -> Draft:
    ours, theirs = one.gpu, other.gpu
    direct = torch.cuda.can_device_access_peer(one.index, other.index)
    words = pair_words(ours, theirs, "PCIe") if direct else "through host memory: neither may reach the other's"
    link = MeasuredLink(
        f"{one.name}-{other.name}",
        "peer",
        f"{ours.name} to {theirs.name}, {words}",
        (),
        pair_ceiling(ours, theirs),
        notes,
    )

    def opened(direction: Direction) -> Open:
        def streams(known: Known) -> CudaStreams:
            return CudaStreams(torch.device("cuda", known.index))

        return lambda: peer_copies(streams(one), streams(other), sizes[-1], direction)

    via = "peer" if direct else "host"
    return Draft(link, [_task(way, via, opened(way), sizes, 0.5) for way in _DIRECTIONS])


def _task(direction: Direction, via: str, opened: Open, sizes: tuple[int, ...], weight: float = 1.0) -> Task:
    return Task(direction, lambda: via, opened, lambda: sizes, weight)


class _Pinned:
    """The pinned memory of the task at hand, kept for the next near the same processors: locking it takes a while."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._kept: tuple[tuple[int, ...], Pinned] | None = None

    def near(self, cpus: tuple[int, ...]) -> Pinned:
        """Two runs of it. Raises SpillError."""
        if self._kept is None or self._kept[0] != cpus:
            self.close()
            self._kept = cpus, Pinned(self._largest, near=cpus)
        return self._kept[1]

    def close(self) -> None:
        """Unlock it. Idempotent."""
        if self._kept is not None:
            self._kept[1].close()
            self._kept = None

    def task(self, device: torch.device, cpus: tuple[int, ...], direction: Direction) -> Open:
        """Copies between it and a GPU."""

        @contextmanager
        def opened() -> Iterator[Copy]:
            with gpu_copies(CudaStreams(device), self.near(cpus).tensors, direction) as copy:
                yield copy
            torch.cuda.empty_cache()

        return opened


def _pageable(device: torch.device, largest: int, direction: Direction) -> Open:
    @contextmanager
    def opened() -> Iterator[Copy]:
        memory = [torch.ones(largest, dtype=torch.uint8)]
        with gpu_copies(CudaStreams(device), memory, direction) as copy:
            yield copy
        torch.cuda.empty_cache()

    return opened
