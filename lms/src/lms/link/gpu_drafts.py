"""What there is to measure of GPUs, as far as PyTorch reaches them: each one's link to its host, and to the others."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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
    room = int(host.available_memory() * MEMORY_SHARE) // 2
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
    known = [_described(index, gpus) for index in range(count)]
    drafts = [_host_draft(index, gpu, fitting, notes) for index, gpu in enumerate(known)]
    drafts += [
        _peer_draft((one, known[one]), (other, known[other]), fitting, notes)
        for one in range(count)
        for other in range(one + 1, count)
    ]
    return drafts


def _described(index: int, gpus: Sequence[Gpu]) -> Gpu:
    """What NVML tells of PyTorch's GPU `index`, which CUDA_VISIBLE_DEVICES may number otherwise; or its name alone."""
    properties = torch.cuda.get_device_properties(index)
    uuid = str(getattr(properties, "uuid", "")).removeprefix("GPU-").lower()
    for gpu in gpus:
        if uuid and gpu.uuid.removeprefix("GPU-").lower() == uuid:
            return gpu
    return Gpu(index, str(properties.name), memory=int(properties.total_memory))


def _host_draft(index: int, gpu: Gpu, sizes: tuple[int, ...], notes: tuple[str, ...]) -> Draft:
    way, ceiling = gpu.host()
    what = f"{gpu.name}, {way}"
    draft = Draft(MeasuredLink(f"gpu{index}", "gpu", what, ceiling=ceiling, notes=(*notes, *gpu.warnings())))
    device = torch.device("cuda", index)
    allowed = os.sched_getaffinity(0)
    nodes = [node for node in host.nodes() if allowed & set(node.cpus)]
    near = next((node for node in nodes if node.index == gpu.node), None)
    for node in [near] if near else nodes:
        cpus = tuple(sorted(allowed & set(node.cpus))) if len(nodes) > 1 else ()
        via = "pinned" if near or len(nodes) == 1 else f"pinned, node {node.index}"
        draft.tasks += [_task(one, via, _pinned(device, cpus, sizes[-1], one), sizes) for one in _DIRECTIONS]
    for node in nodes:
        if near and node is not near:
            cpus, via = tuple(sorted(allowed & set(node.cpus))), f"pinned, node {node.index}"
            draft.tasks += [
                _task(one, via, _pinned(device, cpus, sizes[-1], one), sizes, 0.5) for one in _DIRECTIONS[:2]
            ]
    draft.tasks += [_task(one, "pageable", _pageable(device, sizes[-1], one), sizes, 0.5) for one in _DIRECTIONS[:2]]
    return draft


def _peer_draft(one: tuple[int, Gpu], other: tuple[int, Gpu], sizes: tuple[int, ...], notes: tuple[str, ...]) -> Draft:
    (here, ours), (there, theirs) = one, other
    direct = torch.cuda.can_device_access_peer(here, there)
    words = pair_words(ours, theirs, "PCIe") if direct else "through host memory: neither may reach the other's"
    link = MeasuredLink(
        f"gpu{here}-gpu{there}", "peer", f"{ours.name} to {theirs.name}, {words}", (), pair_ceiling(ours, theirs), notes
    )

    def opened(direction: Direction) -> Open:
        streams = CudaStreams(torch.device("cuda", here)), CudaStreams(torch.device("cuda", there))
        return lambda: peer_copies(*streams, sizes[-1], direction)

    via = "peer" if direct else "host"
    return Draft(link, [_task(way, via, opened(way), sizes, 0.5) for way in _DIRECTIONS])


def _task(direction: Direction, via: str, opened: Open, sizes: tuple[int, ...], weight: float = 1.0) -> Task:
    return Task(direction, lambda: via, opened, lambda: sizes, weight)


def _pinned(device: torch.device, cpus: tuple[int, ...], largest: int, direction: Direction) -> Open:
    @contextmanager
    def opened() -> Iterator[Copy]:
        pinned = Pinned(largest, near=cpus)
        try:
            with gpu_copies(CudaStreams(device), pinned.tensors, direction) as copy:
                yield copy
        finally:
            pinned.close()
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
