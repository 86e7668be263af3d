"""Machines that the tests of the launcher pretend to run on: /sys and NVML's answers of real kinds of hosts.

`origin` says where each comes from. *Recorded*: the figures were printed on such a machine. *Documentation*: put
together from what its maker and the kernel's documentation say about such a machine. Names of interfaces are plausible
in both, and nothing depends on them.
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
    """A kind of host: its sockets, GPUs with the CPUs that NVML says are near, adapters, interfaces."""

    name: str
    origin: str
    packages: tuple[Package, ...]
    gpus: tuple[tuple[Gpu, str], ...]
    fabrics: tuple[str, ...]
    nics: tuple[tuple[str, str], ...]
    # The results that ddlrun must find:
    cores: int  # of a socket
    gpu_sockets: tuple[int, ...]
    ranks: int  # of a host, where nobody says


def _gpus(name: str, each: int, *sockets: str) -> tuple[tuple[Gpu, str], ...]:
    """`each` GPUs near every one of the sockets, whose CPUs are given."""
    return tuple((Gpu(name), near) for near in sockets for _ in range(each))


_POWER9_20 = (Package(0, "0-79", 4, True), Package(8, "80-159", 4, True))
_POWER9_22 = (Package(0, "0-87", 4, True), Package(8, "88-175", 4, True))
_REDP = "IBM Power System AC922, Introduction and Technical Overview"

KINDS = (
    Kind(
        "AC922 with 4 V100",
        f"documentation: {_REDP}, REDP-5472 (8335-GTG: two POWER9 of 20 cores, SMT4, two GPUs a socket). That the "
        "kernel numbers such sockets 0 and 8 is from memory",
        _POWER9_20,
        _gpus("Tesla V100-SXM2-16GB", 2, "0-79", "80-159"),
        ("mlx5_0", "mlx5_1"),
        (("enP5p1s0f0", "10.1.0.1/24"), ("ib0", "10.2.0.1/24")),
        20,
        (0, 0, 1, 1),
        4,
    ),
    Kind(
        "AC922 with 6 V100",
        f"documentation: {_REDP}, REDP-5494 (8335-GTX: two POWER9 of 22 cores, SMT4, three GPUs a socket), and the "
        "Summit user guide of Oak Ridge National Laboratory. Numbers of sockets: as above",
        _POWER9_22,
        _gpus("Tesla V100-SXM2-16GB", 3, "0-87", "88-175"),
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
        _gpus("Tesla V100-SXM2-16GB", 4, "0-19,40-59", "20-39,60-79"),
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
        _gpus("NVIDIA H100 80GB HBM3", 4, "0-55,112-167", "56-111,168-223"),
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
        _gpus("NVIDIA GeForce RTX 4090", 4, "0-55,112-167", "56-111,168-223"),
        ("mlx5_0", "mlx5_1"),
        (("eno1", "10.1.0.1/24"), ("docker0", "172.17.0.1/16")),
        56,
        (0, 0, 0, 0, 1, 1, 1, 1),
        8,
    ),
    Kind(
        "CPU server",
        "documentation: two Xeon Gold 6248 of 20 cores with two threads (Intel ARK); no NVIDIA driver, so NVML "
        "finds none",
        (Package(0, "0-19,40-59", 2, False), Package(1, "20-39,60-79", 2, False)),
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
