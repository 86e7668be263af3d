"""Machines that the tests of the launcher pretend to run on: /sys and NVML's answers of real kinds of hosts.

`origin` says where each comes from. *Recorded*: the figures were printed on such a machine. *Documentation*: put
together from what its maker and the kernel's documentation say about such a machine. Bus numbers, names of interfaces
and sizes of memory are plausible in both, and nothing depends on them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ddl.launch import machine
from ddl.launch.counts import format_runs, parse_runs
from ddl.launch.machine import Gpu, Machine


@dataclass(frozen=True)
class Package:
    """A socket: the kernel's number of it, its CPUs, and how many hardware threads a core has."""

    number: int
    cpus: str
    threads: int
    adjacent: bool  # threads of a core have consecutive numbers (POWER), or the second ones come after all first (x86)


@dataclass(frozen=True)
class Kind:
    """A kind of host: its sockets, memory nodes, GPUs with the CPUs that NVML says are near, adapters, interfaces."""

    name: str
    origin: str
    packages: tuple[Package, ...]
    nodes: tuple[int, ...]
    gpus: tuple[tuple[Gpu, str], ...]
    fabrics: tuple[str, ...]
    nics: tuple[tuple[str, str], ...]
    # The results that ddlrun must find:
    cores: int  # of a socket
    gpu_sockets: tuple[int, ...]
    ranks: int  # of a host, where nobody says


def _gpus(name: str, memory: int, places: tuple[tuple[str, str], ...]) -> tuple[tuple[Gpu, str], ...]:
    return tuple((Gpu(name, memory, bus), near) for bus, near in places)


_POWER9_20 = (Package(0, "0-79", 4, True), Package(8, "80-159", 4, True))
_POWER9_22 = (Package(0, "0-87", 4, True), Package(8, "88-175", 4, True))
_REDP = "IBM Power System AC922, Introduction and Technical Overview"

KINDS = (
    Kind(
        "AC922 with 4 V100",
        f"documentation: {_REDP}, REDP-5472 (8335-GTG: two POWER9 of 20 cores, SMT4, two GPUs a socket). That the "
        "kernel numbers such sockets 0 and 8, and gives each GPU's memory a node from 255 down, is from memory",
        _POWER9_20,
        (0, 8, 252, 253, 254, 255),
        _gpus(
            "Tesla V100-SXM2-16GB",
            16128,
            (
                ("00000004:04:00.0", "0-79"),
                ("00000004:05:00.0", "0-79"),
                ("00000035:03:00.0", "80-159"),
                ("00000035:04:00.0", "80-159"),
            ),
        ),
        ("mlx5_0", "mlx5_1"),
        (("enP5p1s0f0", "10.1.0.1/24"), ("ib0", "10.2.0.1/24")),
        20,
        (0, 0, 1, 1),
        4,
    ),
    Kind(
        "AC922 with 6 V100",
        f"documentation: {_REDP}, REDP-5494 (8335-GTX: two POWER9 of 22 cores, SMT4, three GPUs a socket), and the "
        "Summit user guide of Oak Ridge National Laboratory. Numbers of sockets and nodes: as above",
        _POWER9_22,
        (0, 8, 250, 251, 252, 253, 254, 255),
        _gpus(
            "Tesla V100-SXM2-16GB",
            16128,
            (
                ("00000004:04:00.0", "0-87"),
                ("00000004:05:00.0", "0-87"),
                ("00000004:06:00.0", "0-87"),
                ("00000035:03:00.0", "88-175"),
                ("00000035:04:00.0", "88-175"),
                ("00000035:05:00.0", "88-175"),
            ),
        ),
        ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"),
        (("enP5p1s0f0", "10.1.0.1/24"), ("ib0", "10.2.0.1/24")),
        22,
        (0, 0, 0, 1, 1, 1),
        6,
    ),
    Kind(
        "DGX-1",
        "documentation: NVIDIA DGX-1 with Tesla V100 System Architecture, WP-08437 (two Xeon E5-2698 v4 of 20 cores "
        "with two threads, four GPUs and two adapters a socket)",
        (Package(0, "0-19,40-59", 2, False), Package(1, "20-39,60-79", 2, False)),
        (0, 1),
        _gpus(
            "Tesla V100-SXM2-16GB",
            16160,
            (
                ("00000000:06:00.0", "0-19,40-59"),
                ("00000000:07:00.0", "0-19,40-59"),
                ("00000000:0A:00.0", "0-19,40-59"),
                ("00000000:0B:00.0", "0-19,40-59"),
                ("00000000:85:00.0", "20-39,60-79"),
                ("00000000:86:00.0", "20-39,60-79"),
                ("00000000:89:00.0", "20-39,60-79"),
                ("00000000:8A:00.0", "20-39,60-79"),
            ),
        ),
        ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"),
        (("enp1s0f0", "10.1.0.1/24"), ("docker0", "172.17.0.1/16")),
        20,
        (0, 0, 0, 0, 1, 1, 1, 1),
        8,
    ),
    Kind(
        "HGX H100",
        "recorded by others: `nvidia-smi topo -m` in issue 1264 of NVIDIA/nccl (CPU affinities of 8 H100: 0-55,112-167 "
        "for the first four, 56-111,168-223 for the others; ten adapters)",
        (Package(0, "0-55,112-167", 2, False), Package(1, "56-111,168-223", 2, False)),
        (0, 1),
        _gpus(
            "NVIDIA H100 80GB HBM3",
            81559,
            tuple(
                (f"00000000:{bus}:00.0", "0-55,112-167" if at < 4 else "56-111,168-223")
                for at, bus in enumerate(("1B", "43", "52", "61", "9D", "C3", "D1", "DF"))
            ),
        ),
        tuple(f"mlx5_{at}" for at in range(10)),
        (("bond0", "10.1.0.1/24"), ("docker0", "172.17.0.1/16")),
        56,
        (0, 0, 0, 0, 1, 1, 1, 1),
        8,
    ),
    Kind(
        "PCIe server",
        "recorded by others: `nvidia-smi topo -m` in issue 17 of NVIDIA/go-gpuallocator (8 GeForce RTX 4090, all pairs "
        "by way of the processors; two adapters)",
        (Package(0, "0-55,112-167", 2, False), Package(1, "56-111,168-223", 2, False)),
        (0, 1),
        _gpus(
            "NVIDIA GeForce RTX 4090",
            24564,
            tuple((f"00000000:{at + 1:02X}:00.0", "0-55,112-167" if at < 4 else "56-111,168-223") for at in range(8)),
        ),
        ("mlx5_0", "mlx5_1"),
        (("eno1", "10.1.0.1/24"), ("docker0", "172.17.0.1/16")),
        56,
        (0, 0, 0, 0, 1, 1, 1, 1),
        8,
    ),
    Kind(
        "CPU server",
        "documentation: two Xeon Gold 6248 of 20 cores with two threads (Intel ARK); with sub-NUMA clusters the kernel "
        "shows two memory nodes a socket; no NVIDIA driver, so NVML finds none",
        (Package(0, "0-19,40-59", 2, False), Package(1, "20-39,60-79", 2, False)),
        (0, 1, 2, 3),
        (),
        (),
        (("eno1", "10.1.0.1/24"),),
        20,
        (),
        2,
    ),
)


def build(kind: Kind, root: Path) -> Path:
    """Write a /sys as such a host has it below `root`."""
    for package in kind.packages:
        cpus = parse_runs(package.cpus)
        cores = len(cpus) // package.threads
        for at, cpu in enumerate(cpus):
            first = at // package.threads * package.threads if package.adjacent else at % cores
            step = 1 if package.adjacent else cores
            siblings = [cpus[first + thread * step] for thread in range(package.threads)]
            topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
            topology.mkdir(parents=True)
            (topology / "physical_package_id").write_text(f"{package.number}\n")
            (topology / "thread_siblings_list").write_text(format_runs(siblings) + "\n")
    for node in kind.nodes:
        (root / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    for name in kind.fabrics:
        (root / "sys/class/infiniband" / name).mkdir(parents=True)
    for name, _ in kind.nics:
        folder = root / "sys/class/net" / name
        folder.mkdir(parents=True)
        (folder / "operstate").write_text("up\n")
        (folder / "flags").write_text("0x1003\n")
        if name == "docker0":
            (folder / "bridge").mkdir()
            (folder / "brif").mkdir()
    return root


def read(kind: Kind, root: Path, name: str = "h0", allowed: Collection[int] | None = None) -> Machine:
    """The host as the probe reads it, from the /sys that `build` wrote."""
    every = [cpu for package in kind.packages for cpu in parse_runs(package.cpus)]
    return machine.read(
        root,
        name=name,
        allowed=every if allowed is None else allowed,
        addresses=dict(kind.nics),
        gpus=[(gpu, parse_runs(near)) for gpu, near in kind.gpus],
        visible=",".join(map(str, range(len(kind.gpus)))),
    )
