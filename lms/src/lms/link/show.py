"""`lms link show`: this machine's links by name, their ceilings, and what slows them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from lms.errors import UsageError
from lms.link import nvml, table
from lms.link.gpu import LEGEND, Gpu, matrix, pair_ceiling
from lms.link.profile import MeasuredLink, Profile, readable
from lms.memory import machine
from lms.memory.disk import Disk, disk_at
from lms.memory.machine import Node

FORMAT = "lms-link-show-1"


@dataclass(frozen=True)
class Shown:
    """The machine: its links as a profile (with what was measured), GPUs, and NUMA nodes."""

    profile: Profile
    gpus: tuple[Gpu, ...]
    matrix: tuple[tuple[str, ...], ...]  # GPUs by GPUs, as `gpu.matrix`
    nodes: tuple[Node, ...]
    columns: tuple[int, ...] = ()  # the driver's numbers of the GPUs that are the matrix's columns


def this_machine(folder: Path, *, only: int | None = None, measured: Profile | None = None) -> Shown:
    """This machine now. `only` is the index of the one GPU to tell of; `measured` are figures of its links.

    Raises UsageError if there is no GPU `only`, or if `folder` is no folder.
    """
    disk = disk_at(folder)
    seen = nvml.look()
    if only is not None and only not in (gpu.index for gpu in seen.gpus):
        there = ", ".join(str(gpu.index) for gpu in seen.gpus) or "none"
        why = "; ".join(f"{one.what}: {one.why}" for one in seen.absent)
        raise UsageError(f"--gpu={only}: no such GPU; there are: {there}{f' ({why})' if why else ''}")
    facts = machine.machine()
    profile = Profile(
        name=facts["host"],
        origin="measured",
        links=tuple(_links(seen, disk)),
        absent=seen.absent,
        machine=facts | ({"NVIDIA driver": seen.driver} if seen.driver else {}),
        when=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    if measured is not None:
        profile = _with_figures(profile, measured)
    found = matrix(seen.gpus, seen.ancestors)
    keep = [at for at, gpu in enumerate(seen.gpus) if only is None or gpu.index == only]
    if only is not None:
        profile = replace(profile, links=tuple(link for link in profile.links if link.name == f"gpu{only}"))
    return Shown(
        profile,
        tuple(seen.gpus[at] for at in keep),
        tuple(tuple(found[at]) for at in keep),
        machine.nodes(),
        tuple(gpu.index for gpu in seen.gpus),
    )


def text(shown: Shown) -> str:
    """The machine for people."""
    profile = shown.profile
    lines = [f"{profile.name}: {', '.join(f'{name} {value}' for name, value in profile.machine.items() if value)}"]
    if shown.gpus:
        lines += ["", *_gpu_lines(shown.gpus)]
        if len(shown.columns) > 1:
            lines += ["", *_matrix_lines(shown)]
    if len(shown.nodes) > 1:
        lines += ["", *_node_lines(shown.nodes)]
    lines += ["", *table.body(profile)]
    if not any(link.series for link in profile.links):
        lines += [
            "",
            "Nothing of it is measured yet: lms link measure -o here.json, then lms link show --measured here.json",
        ]
    return "\n".join(lines)


def document(shown: Shown) -> str:
    """The machine as JSON: rates in bytes a second, sizes in bytes; null is what the driver does not tell."""
    content = {
        "format": FORMAT,
        "machine": dict(shown.profile.machine),
        "links": [asdict(link) for link in shown.profile.links],
        "gpus": [asdict(gpu) | {"warnings": gpu.warnings()} for gpu in shown.gpus],
        "matrix": shown.matrix,
        "nodes": [asdict(node) for node in shown.nodes],
        "absent": [asdict(one) for one in shown.profile.absent],
    }
    return json.dumps(content, indent=1)


def _links(seen: nvml.Seen, disk: Disk) -> list[MeasuredLink]:
    links = []
    for gpu in seen.gpus:
        words, ceiling = gpu.host()
        links.append(MeasuredLink(f"gpu{gpu.index}", "gpu", f"{gpu.name}, {words}", (), ceiling, tuple(gpu.warnings())))
    for at, one in enumerate(seen.gpus):
        for other in seen.gpus[at + 1 :]:
            if (ceiling := pair_ceiling(one, other)) is not None:
                name = f"gpu{one.index}-gpu{other.index}"
                links.append(MeasuredLink(name, "peer", f"{one.name} to {other.name}", (), ceiling))
    links.append(MeasuredLink(readable(f"file {disk.folder}"), "file", disk.what(), notes=disk.notes()))
    return links


def _with_figures(profile: Profile, measured: Profile) -> Profile:
    """The profile with the series that were measured of links of the same names, and links that only `measured` has.

    Figures of another machine are said to be so. They are no error: a container may have another name at each start.
    """
    host = measured.machine.get("host", measured.name)
    notes = () if host == profile.machine["host"] else (f"figures of {host}, which is not this machine's name",)
    theirs = {link.name: replace(link, notes=(*link.notes, *notes)) for link in measured.links}
    links = []
    for link in profile.links:
        found = theirs.pop(link.name, None)
        links.append(link if found is None else replace(link, series=found.series, notes=(*link.notes, *notes)))
    return replace(profile, links=(*links, *theirs.values()))


def _gpu_lines(gpus: Sequence[Gpu]) -> list[str]:
    head = ("GPU", "name", "to its host", "at most each way", "PCIe now", "at most", "NVLinks up", "NUMA node")
    rows: list[tuple[str, ...]] = [head]
    for gpu in gpus:
        words, ceiling = gpu.host()
        pcie = gpu.pcie
        now = "?" if pcie is None else f"{pcie.generation} x{pcie.width}"
        most = "?" if pcie is None else f"{pcie.most_generation} x{pcie.most_width}"
        up = [link for link in gpu.nvlinks if link.up]
        version = f" ({up[0].version})" if up and up[0].version else ""
        nvlinks = f"{len(up)} of {len(gpu.nvlinks)}{version}" if gpu.nvlinks else "-"
        node = "-" if gpu.node is None else str(gpu.node)
        rate = table.rate(ceiling.out) if ceiling else "?"
        rows.append((str(gpu.index), gpu.name, words, rate, now, most, nvlinks, node))
    return table.columns(rows, 3)


def _matrix_lines(shown: Shown) -> list[str]:
    rows = [("", *(f"GPU{index}" for index in shown.columns))]
    rows += [(f"GPU{gpu.index}", *row) for gpu, row in zip(shown.gpus, shown.matrix, strict=True)]
    words = {word.rstrip("0123456789") for row in shown.matrix for word in row}
    legend = [f"{name}{'#' if name == 'NV' else ''}: {words_of}" for name, words_of in LEGEND.items() if name in words]
    return [*table.columns(rows, 1), *(["  ".join(legend)] if legend else [])]


def _node_lines(nodes: Sequence[Node]) -> list[str]:
    rows = [("NUMA distance", *(f"node{node.index}" for node in nodes))]
    rows += [(f"node{node.index}", *map(str, node.distances)) for node in nodes]
    width = max(map(len, rows))
    return table.columns([(*row, *[""] * (width - len(row))) for row in rows], 1)
