"""The GPU links that can be measured through PyTorch: each GPU's to its host, and to the other GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from lms.link.cuda import Pinned, gpu_copies, peer_copies
from lms.link.draft import Draft, Open, Task
from lms.link.gpu import Gpu, pair_ceiling, pair_words
from lms.link.profile import Absence, MeasuredLink
from lms.link.series import Direction
from lms.link.sweep import WORTH, Copy, cut
from lms.memory import machine
from lms.torch.cuda.streams import CudaStreams
from lms.units import format_size

MEMORY_SHARE, GPU_SHARE = 0.25, 0.25
_DIRECTIONS: tuple[Direction, ...] = ("out", "back", "both")


def of(gpus: Sequence[Gpu], sizes: tuple[int, ...], absent: list[Absence]) -> list[Draft]:
    """The drafts. GPUs that PyTorch does not reach or that refuse are named in `absent`."""
    if not torch.cuda.is_available():
        if gpus:
            why = f"PyTorch {torch.__version__} sees no GPU: a CPU build, or CUDA_VISIBLE_DEVICES hides them"
            absent.append(Absence("GPU copies", why))
        return []
    allowed = os.sched_getaffinity(0)
    nodes = [node for node in machine.nodes() if allowed & set(node.cpus)]
    # Two runs of pinned memory are kept on each node, and pageable memory stands beside them.
    room = machine.memory_room(MEMORY_SHARE) // (2 * len(nodes) + 1)
    known = []
    for index in range(torch.cuda.device_count()):
        try:
            found = described(index, torch.cuda.get_device_properties(index), gpus)
            free = torch.cuda.mem_get_info(index)[0]
        except RuntimeError as error:  # full, exclusive to another process, or fallen off the bus
            absent.append(Absence(f"GPU copies of PyTorch's GPU {index}", " ".join(str(error).split())))
            continue
        fitting = tuple(size for size in sizes if size <= min(room, int(free * GPU_SHARE) // 2))
        if not fitting or fitting[-1] < WORTH:
            what = f"the {format_size(free)} that are free on it, or of the memory that is available, is too little"
            absent.append(Absence(f"GPU copies of {found.name}", f"a quarter of {what}"))
            continue
        known.append(replace(found, sizes=fitting, notes=cut(fitting, sizes, "a quarter of memory")))
    pinned = _Pinned(max((gpu.sizes[-1] for gpu in known), default=0))
    drafts = [_host_draft(gpu, nodes, pinned) for gpu in known]
    if drafts:
        drafts[-1].close = pinned.close
    return drafts + [_peer_draft(one, other) for at, one in enumerate(known) for other in known[at + 1 :]]


@dataclass(frozen=True)
class Known:
    """A GPU by PyTorch's number, its name among links, what NVML tells of it, and the sizes that it has room for."""

    index: int
    name: str
    gpu: Gpu
    sizes: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


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


def _host_draft(known: Known, nodes: Sequence[machine.Node], pinned: _Pinned) -> Draft:
    gpu, sizes = known.gpu, known.sizes
    way, ceiling = gpu.host()
    what = f"{gpu.name}, {way}"
    # No warning that the link is asleep: the copies wake it.
    notes = (*known.notes, *gpu.warnings(awake=True))
    draft = Draft(MeasuredLink(known.name, "gpu", what, ceiling=ceiling, notes=notes))
    device = torch.device("cuda", known.index)
    allowed = os.sched_getaffinity(0)
    near = next((node for node in nodes if node.index == gpu.node), None)
    for node in [near] if near else nodes:
        cpus = tuple(sorted(allowed & set(node.cpus))) if len(nodes) > 1 else ()
        via = "pinned" if near or len(nodes) == 1 else f"pinned, node {node.index}"
        draft.tasks += [_task(one, via, pinned.task(device, cpus, one, sizes[-1]), sizes) for one in _DIRECTIONS]
    for node in nodes:
        if near and node is not near:
            cpus, via = tuple(sorted(allowed & set(node.cpus))), f"pinned, node {node.index}"
            draft.tasks += [
                _task(one, via, pinned.task(device, cpus, one, sizes[-1]), sizes, 0.5) for one in _DIRECTIONS[:2]
            ]
    draft.tasks += [_task(one, "pageable", _pageable(device, sizes[-1], one), sizes, 0.5) for one in _DIRECTIONS[:2]]
    return draft


def _peer_draft(one: Known, other: Known) -> Draft:
    ours, theirs = one.gpu, other.gpu
    less = min(one, other, key=lambda gpu: len(gpu.sizes))
    sizes = less.sizes
    direct = torch.cuda.can_device_access_peer(one.index, other.index)
    words = pair_words(ours, theirs, "PCIe") if direct else "through host memory: neither may reach the other's"
    link = MeasuredLink(
        f"{one.name}-{other.name}",
        "peer",
        f"{ours.name} to {theirs.name}, {words}",
        (),
        pair_ceiling(ours, theirs),
        less.notes,
    )

    def opened(direction: Direction) -> Open:
        def streams(known: Known) -> CudaStreams:
            return CudaStreams(torch.device("cuda", known.index))

        return lambda: peer_copies(streams(one), streams(other), sizes[-1], direction)

    via = "peer" if direct else "host"
    return Draft(link, [_task(way, via, opened(way), sizes, 0.5) for way in _DIRECTIONS])


def _task(direction: Direction, via: str, opened: Open, sizes: tuple[int, ...], weight: float = 1.0) -> Task:
    return Task(direction, lambda: via, opened, sizes, weight)


class _Pinned:
    """Pinned memory near some processors, kept for all tasks near the same ones: locking it takes a while."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._kept: dict[tuple[int, ...], Pinned] = {}

    def near(self, cpus: tuple[int, ...]) -> Pinned:
        """Two runs of it. Raises SpillError."""
        if cpus not in self._kept:
            self._kept[cpus] = Pinned(self._largest, near=cpus)
        return self._kept[cpus]

    def close(self) -> None:
        """Unlock it. Idempotent."""
        while self._kept:
            self._kept.popitem()[1].close()

    def task(self, device: torch.device, cpus: tuple[int, ...], direction: Direction, largest: int) -> Open:
        """Copies of at most `largest` bytes between it and a GPU."""
        return _opened(device, direction, lambda: [tensor[:largest] for tensor in self.near(cpus).tensors])


def _pageable(device: torch.device, largest: int, direction: Direction) -> Open:
    return _opened(device, direction, lambda: [torch.ones(largest, dtype=torch.uint8)])


def _opened(device: torch.device, direction: Direction, memory: Callable[[], list[torch.Tensor]]) -> Open:
    """Copies between a GPU and the host's `memory`."""

    @contextmanager
    def opened() -> Iterator[Copy]:
        with gpu_copies(CudaStreams(device), memory(), direction) as copy:
            yield copy
        torch.cuda.empty_cache()

    return opened
