"""Data-parallel training of ResNet-50 on 4 to 256 GPUs, simulated, beside the figures of IBM's talk.

A step has a forward and a backward pass over a GPU's own images, which take the same time on any number of GPUs, and an
average of the gradients. Two ways are simulated. *Overlapped*: the gradients travel in the buckets of
DistributedDataParallel, one after the other, each as soon as the backward pass has made it. *After*: all gradients
travel in one call after the backward pass. Speedup is images a second over those of 4 GPUs (one host), as in the talk.

The plan of each bucket is the library's choice for the network, or one ring over all GPUs in their best order.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date

import ddl
from ddl.planning import interface, resnet
from ddl.planning.interface import Plan, Tree
from ddl.planning.network import Network, changed
from ddl.planning.units import format_size, format_time

TITLE = "ResNet-50, data parallel: SIMULATION beside the published figures"
GPUS = (4, 8, 16, 32, 64, 128, 256)
TALK = (1, 2, 3.9, 7.9, 15.5, 30.5, 60.6)  # speedups over 4 GPUs, as measured: IBM's talk on PowerAI DDL

IMAGES = 32  # a GPU and step: Goyal et al., arXiv:1706.02677; arXiv:1708.02188 compares itself with them
# 90 epochs of 1,281,167 images in 50 minutes on 256 GPUs (arXiv:1708.02188, abstract), at the published 95% efficiency:
# 158 images a second and GPU without communication.
STEP_SECONDS = IMAGES * 256 * 50 * 60 * 0.95 / (90 * 1_281_167)
FORWARD = 1 / 3  # of a step: the backward pass computes two products for each one of the forward pass

SOURCES = (
    f"compute: {STEP_SECONDS * 1e3:.0f} ms a step of {IMAGES} images on a P100, from 90 epochs of ImageNet in 50 "
    "minutes on 256 GPUs (arXiv:1708.02188, abstract) at the published 95%: an input, not simulated",
    "backward: 2/3 of it, spent on layers in proportion to their multiplications",
    "the talk: measured by IBM with Caffe, 4 GPUs a host with NVLink, 100 Gb/s InfiniBand; its overlap is not known",
)


@dataclass(frozen=True)
class Row:
    """One number of GPUs: the talk's measured speedup, and the simulated seconds a step for each way and plan."""

    gpus: int
    talk: float
    overlapped: float
    overlapped_ring: float
    after: float
    after_ring: float
    plan: str


@dataclass(frozen=True)
class Study:
    """The table, the network of one host, and the gradients' buckets."""

    network: Network
    rows: tuple[Row, ...]
    buckets: tuple[resnet.Bucket, ...]


def study(network: Network) -> Study:
    """Simulate each number of GPUs on hosts as `network` describes them. Raises ArgumentError, DescriptionError."""
    cut, whole = resnet.gradients()
    rows = []
    for gpus, talk in zip(GPUS, TALK, strict=True):
        tree = changed(network, ranks=GPUS[0], hosts=gpus // GPUS[0]).tree
        ring = Plan(f"r:{gpus}")
        rows.append(
            Row(
                gpus,
                talk,
                step(tree, cut, None),
                step(tree, cut, ring),
                step(tree, whole, None),
                step(tree, whole, ring),
                interface.forecast(tree, whole[0].nbytes // 4).plan,
            )
        )
    return Study(network, tuple(rows), cut)


def step(
    tree: Tree,
    cut: Sequence[resnet.Bucket],
    plan: Plan | None,
    compute: float = STEP_SECONDS,
    dtype: str = "float32",
) -> float:
    """Seconds of a training step whose gradients are averaged bucket by bucket as they become ready.

    The buckets' bytes are counted in float32, whatever type is sent.
    """
    backward = compute * (1 - FORWARD)
    free = 0.0  # when the network is done with the bucket before
    for bucket in cut:
        ready = compute - backward + bucket.ready * backward
        free = max(free, ready) + interface.forecast(tree, bucket.nbytes // 4, dtype, plan).seconds
    return max(compute, free)


def speedups(table: Study) -> Mapping[str, list[float]]:
    """Speedup over the first row, by column, including the talk's."""
    first = table.rows[0]

    def column(name: str) -> list[float]:
        base: float = getattr(first, name)
        return [base / getattr(row, name) * row.gpus / first.gpus for row in table.rows]

    return {
        "talk (measured by IBM)": [row.talk for row in table.rows],
        "ours, overlapped (SIMULATION)": column("overlapped"),
        "ours, after the backward pass (SIMULATION)": column("after"),
        "flat ring, overlapped (SIMULATION)": column("overlapped_ring"),
        "flat ring, after (SIMULATION)": column("after_ring"),
    }


def curves(table: Study) -> Mapping[str, list[tuple[int, float]]]:
    """The curves of the picture: (GPUs, speedup) by label."""
    return {label: list(zip(GPUS, values, strict=True)) for label, values in speedups(table).items()}


def to_dict(table: Study) -> dict[str, object]:
    """The table as plain data, with its sources."""
    return {
        "simulation": True,
        "date": date.today().isoformat(),
        "versions": {"ddl": ddl.__version__, "python": platform.python_version()},
        "machine": platform.processor() or platform.machine(),
        "sources": SOURCES,
        "compute_seconds": STEP_SECONDS,
        "network": table.network.to_dict(),
        "buckets": [asdict(bucket) for bucket in table.buckets],
        "rows": [asdict(row) for row in table.rows],
        "speedups": dict(speedups(table)),
    }


def to_text(table: Study) -> str:
    """The table as text."""
    found = list(speedups(table).values())
    sizes = ", ".join(format_size(bucket.nbytes) for bucket in table.buckets)
    lines = [
        TITLE,
        f"hosts: {table.network.name or 'as described'}",
        *(f"{level.name}: {level.source}" for level in table.network.levels),
        *SOURCES,
        f"gradients: float32, {format_size(sum(bucket.nbytes for bucket in table.buckets))} in {len(table.buckets)} "
        f"buckets: {sizes}",
        "",
        "           speedup over 4 GPUs (efficiency); all but the talk's column are SIMULATION",
        "                     ours, SIMULATION                flat ring, SIMULATION         step, ours",
        " GPUs  the talk       overlapped       after          overlapped       after        overlapped  plan, after",
    ]
    for at, row in enumerate(table.rows):
        cells = [f"{column[at]:.3g} ({100 * column[at] * GPUS[0] / row.gpus:.1f}%)" for column in found]
        lines.append(
            f"{row.gpus:5}  "
            + "".join(f"{cell:<16}" for cell in cells)
            + f"{format_time(row.overlapped):>9}  {row.plan}"
        )
    return "\n".join(lines) + "\n"
