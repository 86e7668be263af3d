"""The hardware of one host: sockets, cores, GPUs, network interfaces; from /sys, /proc and NVML."""

from __future__ import annotations

import fcntl
import importlib
import ipaddress
import os
import platform
import re
import socket
import struct
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import ddl
from ddl import library
from ddl.launch.counts import format_runs, parse_runs

_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B


@dataclass(frozen=True)
class Socket:
    """A processor package: its cores, and the kernel's numbers of the CPUs that this process may use."""

    cores: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Gpu:
    """A GPU; `socket` indexes Machine.sockets, None if NVML does not say.

    `fault` is NVML's reason why the GPU cannot be used; "" if it can.
    """

    name: str
    socket: int | None = None
    fault: str = ""


@dataclass(frozen=True)
class Nic:
    """A network interface with its IPv4 address and prefix length; `routes` says whether it leads to other hosts."""

    name: str
    address: str
    prefix: int
    routes: bool
    why: str  # why it leads to other hosts or does not

    @property
    def network(self) -> str:
        """Its network, as in 10.0.0.0/24."""
        return str(ipaddress.IPv4Interface(f"{self.address}/{self.prefix}").network)


@dataclass(frozen=True)
class Machine:
    """One host, as its probe sees it."""

    name: str
    sockets: tuple[Socket, ...]
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    fabrics: tuple[str, ...] = ()  # adapters of InfiniBand, EFA, Slingshot, ..., which MPI can use in place of TCP
    python: str = field(default_factory=platform.python_version)
    ddl: str = ddl.__version__
    plugin: bool = field(default_factory=lambda: library.beside(library.PLUGIN) is not None)  # libddl's, for MPI
    free_ports: tuple[int, ...] = ()  # TCP ports that were free; (): not looked for

    @property
    def cores(self) -> int:
        """The cores of all sockets."""
        return sum(socket.cores for socket in self.sockets)

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON; CPUs in the kernel's short form (0-15,32-47), so that a host is one short line."""
        made = asdict(self)
        for row, one in zip(made["sockets"], self.sockets, strict=True):
            row["cpus"] = format_runs(one.cpus)
        return made

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Machine:
        """The inverse of `to_dict`. Raises KeyError, TypeError or ValueError for other data."""
        rows = {
            "sockets": tuple(Socket(int(row["cores"]), parse_runs(row["cpus"])) for row in data["sockets"]),
            "gpus": tuple(Gpu(**row) for row in data["gpus"]),
            "nics": tuple(Nic(**row) for row in data["nics"]),
            "fabrics": tuple(data["fabrics"]),
            "free_ports": tuple(data["free_ports"]),
        }
        return cls(**{**data, **rows})


def read(
    root: Path = Path("/"),
    *,
    name: str | None = None,
    allowed: Collection[int] | None = None,
    addresses: Mapping[str, str] | None = None,
    gpus: Iterable[tuple[Gpu, Collection[int]]] | None = None,
    visible: str | None = None,
) -> Machine:
    """This host, or the one whose /sys and /proc lie under `root`.

    The other arguments give what a file system does not show; None asks this host: its name, the CPUs that this process
    may use, "address/prefix" by interface, the GPUs with the CPUs near them, and CUDA_VISIBLE_DEVICES.
    """
    sockets = _sockets(root, os.sched_getaffinity(0) if allowed is None else allowed)
    found = list(_nvml_gpus() if gpus is None else gpus)
    shown = _visible(len(found), os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible)
    return Machine(
        name=socket.gethostname() if name is None else name,
        sockets=sockets,
        gpus=tuple(replace(gpu, socket=_nearest(sockets, near)) for gpu, near in (found[index] for index in shown)),
        nics=_nics(root, _addresses(root) if addresses is None else addresses),
        fabrics=tuple(
            entry for kind in ("infiniband", "cxi") for entry in sorted(_names(root / "sys/class" / kind))
        ),
    )  # fmt: skip


def kernel() -> str:
    """The first two numbers of the kernel's version: figures may depend on these, but not on the build."""
    found = re.match(r"\d+\.\d+", platform.release())
    return found[0] if found else "not known"


def free_ports() -> tuple[int, ...]:
    """TCP ports of this host that are free now: for MASTER_PORT, and for the ranks of each of three jobs."""
    with ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(4)]
        for one in sockets:
            one.bind(("", 0))
        return tuple(int(one.getsockname()[1]) for one in sockets)


def _sockets(root: Path, allowed: Collection[int]) -> tuple[Socket, ...]:
    """The packages in the order in which hwloc, and so MPI, numbers them: by their first CPU."""
    folder = root / "sys/devices/system/cpu"
    cores: dict[int, set[int]] = {}
    cpus: dict[int, list[int]] = {}
    for cpu in sorted(int(name[3:]) for name in _names(folder) if re.fullmatch(r"cpu\d+", name)):
        if cpu not in allowed:
            continue
        topology = folder / f"cpu{cpu}" / "topology"
        # A virtual machine or an Arm board may give -1, or no value, if it does not know.
        package = _number(topology / "physical_package_id")
        siblings = _text(topology / "thread_siblings_list")
        cores.setdefault(max(package, 0), set()).add(min(parse_runs(siblings)) if siblings else cpu)
        cpus.setdefault(max(package, 0), []).append(cpu)
    if not cpus:  # no /sys, as in some containers
        numbers = tuple(sorted(allowed))
        return (Socket(len(numbers), numbers),)
    return tuple(
        Socket(len(cores[package]), tuple(cpus[package])) for package in sorted(cpus, key=lambda p: cpus[p][0])
    )


def _nics(root: Path, addresses: Mapping[str, str]) -> tuple[Nic, ...]:
    nics = []
    for name, text in sorted(addresses.items()):
        routes, why = _leads(root / "sys/class/net", name)
        address, _, prefix = text.partition("/")
        nics.append(Nic(name, address, int(prefix), routes, why))
    return tuple(nics)


def _leads(folder: Path, name: str) -> tuple[bool, str]:
    """Whether the interface leads to other hosts, as far as this host can tell, and why."""
    here = folder / name
    if _number(here / "flags", 16) & 0x8 or name == "lo":
        return False, "loopback"
    if _text(here / "operstate") in ("down", "lowerlayerdown", "notpresent"):
        return False, "it is down"
    if (here / "bridge").is_dir() and not any(_is_card(folder / port) for port in _names(here / "brif")):
        return False, "a bridge without a network card, for this host's own containers"
    return True, "it is up"


def _is_card(port: Path) -> bool:
    """Whether it is a network card, or built on one: a bond, a VLAN."""
    if (port / "device").exists() or (port / "bonding").is_dir():
        return True
    below = [name.removeprefix("lower_") for name in _names(port) if name.startswith("lower_")]
    return any(_is_card(port.with_name(name)) for name in below)


def _addresses(root: Path) -> dict[str, str]:
    """The first IPv4 address of each interface that has one, asked of the kernel."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        for name in _names(root / "sys/class/net"):
            request = struct.pack("256s", name.encode()[:15])
            try:
                address = socket.inet_ntoa(fcntl.ioctl(one.fileno(), _SIOCGIFADDR, request)[20:24])
                mask = socket.inet_ntoa(fcntl.ioctl(one.fileno(), _SIOCGIFNETMASK, request)[20:24])
            except OSError:
                continue  # it has none
            found[name] = f"{address}/{ipaddress.IPv4Network(f'0.0.0.0/{mask}').prefixlen}"
    return found


def _nvml_gpus() -> list[tuple[Gpu, Collection[int]]]:
    """Every GPU of this host with the CPUs near it; none if NVML's package or its library is missing."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # NVMLError_LibraryNotFound: no driver; others: a driver without a GPU
        return []
    try:
        return [_nvml_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        return [_faulty(f"GPUs cannot be counted: NVML says: {error}")]
    finally:
        nvml.nvmlShutdown()


def _faulty(fault: str) -> tuple[Gpu, Collection[int]]:
    return Gpu("of an unknown kind", fault=fault), ()


def _nvml_gpu(nvml: Any, index: int) -> tuple[Gpu, Collection[int]]:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:  # it has fallen off its bus, needs another driver, or may not be opened
        return _faulty(f"GPU {index} cannot be used: NVML says: {error}")

    def ask(what: str, *more: int) -> Any:
        try:
            return getattr(nvml, what)(handle, *more)
        except nvml.NVMLError:  # this kind of GPU does not tell, or a virtual machine hides it
            return None

    masks = ask("nvmlDeviceGetCpuAffinity", (os.cpu_count() or 1) // 64 + 1) or ()
    near = {64 * at + bit for at, mask in enumerate(masks) for bit in range(64) if mask >> bit & 1}
    name = ask("nvmlDeviceGetName") or "of an unknown kind"
    return Gpu(name.decode() if isinstance(name, bytes) else str(name)), near


def _visible(count: int, text: str | None) -> list[int]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, as CUDA reads it: the list ends at the first word that names no GPU.

    Names (GPU-..., MIG-...) are only counted, and taken for the first GPUs: their order in NVML is not known here.
    """
    if text is None:
        return list(range(count))
    shown: list[int] = []
    for word in text.split(","):
        named = word.strip().startswith(("GPU-", "MIG-"))
        index = len(shown) if named else int(word) if re.fullmatch(r"\s*[0-9]{1,9}\s*", word) else -1
        if not 0 <= index < count:
            break
        shown.append(index)
    return shown


def _nearest(sockets: tuple[Socket, ...], near: Collection[int]) -> int | None:
    """The socket with the most CPUs `near` a GPU; None if there is no single one."""
    shares = [len(set(one.cpus) & set(near)) / len(one.cpus) for one in sockets]
    best = max(shares, default=0.0)
    return shares.index(best) if best and shares.count(best) == 1 else None


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path, base: int = 10) -> int:
    try:
        return int(_text(path) or "0", base)
    except ValueError:
        return 0
