"""FORECASTS for systems whose scaling of ResNet-50 was published, beside the published figures. Nothing is measured.

A system's efficiency is its speedup over one host, divided by the number of hosts. The speed of a rank without
communication is an input, assumed or from the source that is named. The gradients' buckets and the step are those of
`scaling`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ddl.planning import interface, resnet, scaling
from ddl.planning.network import Network, changed, load
from ddl.planning.units import format_time, parse_rate

TITLE = "ResNet-50, data parallel, on published systems: FORECAST, not measured, beside the published efficiency"
_EPOCHS = 90 * 1_281_167  # images of a training

_BIG_BASIN = _EPOCHS / (29 * 3600 * 8)  # images a second of a GPU
_STAMPEDE = _EPOCHS / (28 * 60 * 1536 * 0.9)


@dataclass(frozen=True)
class System:
    """A published system: hosts as the catalogue's `machine` (with another `link`), images a rank and step.

    `rate` is images a second of a rank alone; `efficiency` is the published figure as text, or None.
    """

    name: str
    machine: str
    hosts: int
    images: int
    rate: float
    efficiency: str | None
    source: str
    dtype: str = "float32"
    link: str | None = None

    @property
    def network(self) -> Network:
        """All hosts, on one switch that carries all traffic."""
        rates = (None, parse_rate(self.link)) if self.link else ()
        return changed(load(self.machine), hosts=self.hosts, rates=rates)


SYSTEMS = (
    System(
        "IBM, PowerAI DDL", "minsky", 64, scaling.IMAGES, scaling.IMAGES / scaling.STEP_SECONDS, "94.7%",
        "IBM's talk: 60.6 times 4 GPUs' speed; rate: 90 epochs in 50 minutes at 95% (arXiv:1708.02188)",
    ),
    System(
        "Facebook, Big Basin", "dgx-1-p100", 32, 32, _BIG_BASIN, "about 90%",
        "arXiv:1706.02677: 8 P100 a host as in a DGX-1, 50 Gb/s Ethernet; rate: 29 hours on 8 GPUs "
        "(NVIDIA developer news, June 2017)",
        link="50gbit",
    ),
    System(
        "NVIDIA, DGX SaturnV", "dgx-1-p100", 124, 32, _BIG_BASIN, None,
        "124 DGX-1 with P100, a fat tree of InfiniBand EDR (Mellanox); rate: as on Big Basin",
    ),
    System(
        "Dell EMC, Zenith, 128", "omni-path", 128, 64, 75.0, "90%",
        "Intel Caffe and MLSL over Omni-Path, 2 Xeon Gold 6148 a host (Dell EMC HPC Innovation Lab, March 2018); "
        "batch, rate: assumed",
    ),
    System(
        "Dell EMC, Zenith, 256", "omni-path", 256, 32, 75.0, "83%",
        "the same; there the batch of a host was halved, which makes a host slower: not in the forecast",
    ),
    System(
        "TACC, Stampede2", "omni-path", 1536, 32, _STAMPEDE, "above 90%",
        "arXiv:1711.04291: Intel Caffe over Omni-Path, 104K cores of Xeon Phi; rate: 28 minutes, taken as 90 epochs "
        "on 1536 hosts of 68 cores at 90%; batch: assumed",
    ),
    System(
        "ORNL, Summit, 144", "ac922-6", 144, 256, 1000.0, None,
        "the job of PowerAI's documentation: 18 hosts x 4 racks x 2 aisles, float16, 256 images a GPU; rate: assumed",
        "float16",
    ),
    System(
        "ORNL, Summit, 1024", "ac922-6", 1024, 256, 1000.0, "87%",
        "ORNL: Strategies to deploy and scale deep learning on the Summit supercomputer (2019): 6144 GPUs; batch, "
        "type, rate: assumed",
        "float16",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A system's forecast: seconds a step, with overlap and without, and efficiencies over one host."""

    system: System
    ranks: int
    overlapped_seconds: float
    after_seconds: float
    overlapped: float
    after: float
    plan: str


def study(systems: Sequence[System] = SYSTEMS) -> list[Row]:
    """Forecast each system. Raises ArgumentError, DescriptionError."""
    cut, whole = resnet.gradients()
    rows = []
    for system in systems:
        network = system.network

        def step(hosts: Network, buckets: Sequence[resnet.Bucket], system: System = system) -> float:
            return scaling.step(hosts.tree, buckets, None, system.images / system.rate, system.dtype)

        one = changed(network, hosts=1)
        overlapped, after = step(network, cut), step(network, whole)
        elements = whole[0].nbytes // 4
        rows.append(
            Row(
                system,
                network.ranks,
                overlapped,
                after,
                step(one, cut) / overlapped,
                step(one, whole) / after,
                interface.forecast(network.tree, elements, system.dtype).plan,
            )
        )
    return rows


def to_dict(rows: Sequence[Row]) -> dict[str, object]:
    """The rows as plain data."""
    return {"simulation": True, "rows": [asdict(row) for row in rows]}


def to_text(rows: Sequence[Row]) -> str:
    """The rows as text, with their sources."""
    lines = [
        TITLE,
        "efficiency over one host; `after`: nothing is hidden behind the backward pass",
        "",
        f"{'system':24}{'hosts':>6}{'ranks':>6}  {'published':>10}  {'overlapped':>10}  {'after':>6}  "
        f"{'step':>7}  plan",
    ]
    for row in rows:
        lines.append(
            f"{row.system.name:24}{row.system.hosts:6}{row.ranks:6}  {row.system.efficiency or '-':>10}  "
            f"{row.overlapped:>10.1%}  {row.after:>6.1%}  {format_time(row.overlapped_seconds):>7}  {row.plan}"
        )
    lines += ["", *(f"{row.system.name}: {row.system.rate:.4g} images/s a rank. {row.system.source}" for row in rows)]
    return "\n".join(lines) + "\n"
