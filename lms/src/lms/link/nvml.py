"""GPUs as the NVIDIA driver describes them, through nvidia-ml-py: identity, links, and what slows them down.

The library is optional. Without it, or without a driver, no GPUs are found, and the reason is reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from lms.errors import LMSError
from lms.link.gpu import C2C, FarEnd, Gpu, NvLink, Pcie
from lms.link.profile import Absence
from lms.link.speeds import NVLINK_VERSIONS

Handle = object
Field = tuple[int, int]  # an identifier NVML_FI_DEV_*, and its scope: a link's number, or 0

# From nvml.h, so that a library that lacks one of the newer names can still be asked.
FI_NVLINK_SPEED = (*range(84, 90), *range(132, 138))  # NVLINK_SPEED_MBPS_L0 to L11
FI_NVLINK_SPEED_COMMON, FI_NVLINK_COUNT, FI_NVLINK_GET_SPEED = 90, 91, 164
FI_NVLINK_TX, FI_NVLINK_RX = 138, 139  # NVLINK_THROUGHPUT_DATA_*: KiB since the driver was loaded, of one link
FI_C2C_COUNT, FI_C2C_STATUS, FI_C2C_SPEED = 170, 171, 172
FI_PCIE_TX, FI_PCIE_RX = 197, 198  # PCIE_COUNT_*_BYTES: bytes, which wrap around

_OK, _NOT_SUPPORTED, _NO_PERMISSION, _NOT_LOADED, _NO_LIBRARY, _LOST, _RESET, _MISMATCH = 0, 3, 4, 9, 12, 15, 16, 18
_ENDS: dict[int, FarEnd] = {0: "gpu", 1: "cpu", 2: "switch"}  # NVML_NVLINK_DEVICE_TYPE_*
_ANCESTORS = {0: "SELF", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # NVML_TOPOLOGY_*
_VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # by NVML_VALUE_TYPE_*
# nvmlClocksEventReason*. Idle, clocks that an administrator set and sync boost are no fault of anything.
_SLOWED = {
    0x04: "by its power limit (SW power cap)",
    0x08: "by the hardware: too hot, or not enough power (HW slowdown)",
    0x20: "too warm (SW thermal slowdown)",
    0x40: "too hot (HW thermal slowdown)",
    0x80: "by the power supply (HW power brake)",
}
_WHY = {
    _NO_LIBRARY: "no NVIDIA driver is installed here (libnvidia-ml.so.1 is not found)",
    _NOT_LOADED: "the NVIDIA driver is installed and not loaded: modprobe nvidia, or start the machine anew",
    _NO_PERMISSION: (
        "the NVIDIA driver refuses this user: give it access to /dev/nvidiactl and /dev/nvidia* "
        "(a container: start it with its GPUs)"
    ),
    _MISMATCH: "the NVIDIA driver and its library differ in version, as after an update: start the machine anew",
}
_LOST_WORDS = "it fell off the bus (look for Xid 79 in dmesg): reset it with nvidia-smi -r, or start the machine anew"


class NvmlMissing(LMSError):
    """There is no NVML to ask: no library, no driver, or no permission. The message says which."""


class GpuLost(LMSError):
    """A GPU that does not answer any more. The message says what to do."""


@dataclass(frozen=True)
class Seen:
    """What NVML tells of the whole machine. `ancestors` is by the GPUs' indices: what two of them have in common."""

    gpus: tuple[Gpu, ...]
    ancestors: Mapping[tuple[int, int], str]
    absent: tuple[Absence, ...]
    driver: str = ""


class Nvml:
    """An open NVML. `library` is the module pynvml, or what a test gives in its place.

    Raises NvmlMissing if there is no library, no driver or no permission.
    """

    def __init__(self, library: ModuleType | None = None) -> None:
        if library is None:
            try:
                import pynvml
            except ImportError:
                raise NvmlMissing(
                    "nvidia-ml-py is not installed: pip install './lms[nvml]' in a copy of the repository"
                ) from None
            library = pynvml
        self.library = library
        try:
            library.nvmlInit()
        except library.NVMLError as error:
            raise NvmlMissing(_WHY.get(error.value, f"NVML did not start: {error}")) from None

    def close(self) -> None:
        """Close the library. Ignores a driver that is gone meanwhile."""
        try:
            self.library.nvmlShutdown()
        except self.library.NVMLError:
            return

    def ask(self, function: str, *arguments: object) -> object:
        """The answer of an NVML function; None if this driver or GPU has none, or this user may not ask.

        Raises GpuLost for a GPU that is gone.
        """
        library = self.library
        call = getattr(library, function, None)
        if call is None:
            return None
        try:
            return call(*arguments)
        except library.NVMLError as error:
            if error.value in (_LOST, _RESET):
                raise GpuLost(_LOST_WORDS) from None
            return None

    def count(self) -> int:
        """GPUs that the driver knows."""
        return _number(self.ask("nvmlDeviceGetCount"))

    def handle(self, index: int) -> Handle:
        """The handle of a GPU. Raises GpuLost if it is gone, NvmlMissing if this user may not ask."""
        library = self.library
        try:
            return library.nvmlDeviceGetHandleByIndex(index)
        except library.NVMLError as error:
            if error.value == _NO_PERMISSION:
                raise NvmlMissing(_WHY[_NO_PERMISSION]) from None
            raise GpuLost(_LOST_WORDS if error.value in (_LOST, _RESET) else f"NVML: {error}") from None

    def fields(self, handle: Handle, wanted: Sequence[Field]) -> list[int | None]:
        """Field values, None for each that is not there. Raises GpuLost."""
        values = self.ask("nvmlDeviceGetFieldValues", handle, list(wanted))
        if values is None:
            return [None] * len(wanted)
        found: list[int | None] = []
        for value in values:  # type: ignore[attr-defined]
            if value.nvmlReturn in (_LOST, _RESET):
                raise GpuLost(_LOST_WORDS)
            good = value.nvmlReturn == _OK and value.valueType < len(_VALUES)
            found.append(int(getattr(value.value, _VALUES[value.valueType])) if good else None)
        return found


def look(library: ModuleType | None = None, root: Path = Path("/")) -> Seen:
    """All GPUs, and what is missing with the reason. Never raises: a machine may have no GPUs."""
    try:
        with closing(Nvml(library)) as nvml:
            return _look(nvml, root)
    except NvmlMissing as error:
        return Seen((), {}, (Absence("GPU", str(error)),))


def _look(nvml: Nvml, root: Path) -> Seen:
    driver = str(nvml.ask("nvmlSystemGetDriverVersion") or "")
    count = nvml.count()
    absent = [] if count else [Absence("GPU", "the NVIDIA driver is there and knows of no GPU")]
    found: list[Gpu] = []
    handles: dict[int, Handle] = {}
    for index in range(count):
        try:
            handle = nvml.handle(index)
            found.append(gpu(nvml, index, handle, root))
            handles[index] = handle
        except (GpuLost, NvmlMissing) as error:
            absent.append(Absence(f"GPU {index}", str(error)))
    return Seen(tuple(found), _ancestors(nvml, handles), tuple(absent), driver)


def gpu(nvml: Nvml, index: int, handle: Handle, root: Path = Path("/")) -> Gpu:
    """One GPU. Raises GpuLost when it goes in the middle."""
    bus = _bus(nvml.ask("nvmlDeviceGetPciInfo", handle))
    memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle)
    reasons = nvml.ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if reasons is None:  # its name before driver 535
        reasons = nvml.ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    return Gpu(
        index=index,
        name=str(nvml.ask("nvmlDeviceGetName", handle) or "a GPU that does not tell its name"),
        uuid=str(nvml.ask("nvmlDeviceGetUUID", handle) or ""),
        bus=bus,
        memory=_number(getattr(memory, "total", 0)),
        node=_node(bus, root),
        pcie=_pcie(nvml, handle),
        nvlinks=_nvlinks(nvml, handle),
        c2c=_c2c(nvml, handle),
        mig=_mig(nvml, handle),
        slowed=tuple(words for bit, words in _SLOWED.items() if _number(reasons) & bit),
    )


def _pcie(nvml: Nvml, handle: Handle) -> Pcie | None:
    names = ("CurrPcieLinkGeneration", "CurrPcieLinkWidth", "MaxPcieLinkGeneration", "MaxPcieLinkWidth")
    now, width, most, most_width = (_number(nvml.ask(f"nvmlDeviceGet{name}", handle)) for name in names)
    own = _number(nvml.ask("nvmlDeviceGetGpuMaxPcieLinkGeneration", handle))
    return Pcie(now, width, most or now, most_width or width, own) if now and width else None


def _nvlinks(nvml: Nvml, handle: Handle) -> tuple[NvLink, ...]:
    (count,) = nvml.fields(handle, [(FI_NVLINK_COUNT, 0)])
    most = count if count is not None else int(getattr(nvml.library, "NVML_NVLINK_MAX_LINKS", 18))
    (common,) = nvml.fields(handle, [(FI_NVLINK_SPEED_COMMON, 0)]) if most else (None,)
    links = []
    for index in range(most):
        state = nvml.ask("nvmlDeviceGetNvLinkState", handle, index)
        if state is None:
            continue  # a link that this GPU does not have
        if not state:
            links.append(NvLink(index, up=False))
            continue
        version = _number(nvml.ask("nvmlDeviceGetNvLinkVersion", handle, index))
        wanted = [(FI_NVLINK_GET_SPEED, index)]
        if index < len(FI_NVLINK_SPEED):
            wanted.append((FI_NVLINK_SPEED[index], 0))
        speed = next((value for value in (*nvml.fields(handle, wanted), common) if value), None)
        kind = nvml.ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, index)
        bus = _bus(nvml.ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, index))
        end = _ENDS.get(_number(kind), "unknown") if kind is not None else "unknown"
        if end == "unknown" and bus and set(bus.lower().partition(".")[0]) <= set("f:"):
            end = "switch"  # a virtual machine is not shown its NVSwitches (as NCCL takes it, src/graph/xml.cc)
        links.append(
            NvLink(
                index,
                up=True,
                version=NVLINK_VERSIONS.get(version, ""),
                rate=speed * 1e6 if speed else None,
                end=end,
                bus=bus,
            )
        )
    return tuple(links)


def _c2c(nvml: Nvml, handle: Handle) -> C2C | None:
    (count,) = nvml.fields(handle, [(FI_C2C_COUNT, 0)])
    if not count:
        return None
    states = nvml.fields(handle, [(FI_C2C_STATUS, link) for link in range(count)])
    speeds = nvml.fields(handle, [(FI_C2C_SPEED, link) for link in range(count)])
    up = [speed for state, speed in zip(states, speeds, strict=True) if state == 1]
    rate = sum(speed for speed in up if speed) * 1e6 if up and all(up) else None
    return C2C(len(up), count, rate)


def _mig(nvml: Nvml, handle: Handle) -> tuple[str, ...] | None:
    mode = nvml.ask("nvmlDeviceGetMigMode", handle)
    if not isinstance(mode, (list, tuple)) or not mode or mode[0] != 1:
        return None
    names = []
    for at in range(_number(nvml.ask("nvmlDeviceGetMaxMigDeviceCount", handle))):
        instance = nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, at)
        if instance is not None:
            names.append(str(nvml.ask("nvmlDeviceGetName", instance) or f"instance {at}"))
    return tuple(names)


def _ancestors(nvml: Nvml, handles: Mapping[int, Handle]) -> dict[tuple[int, int], str]:
    found = {}
    for one, here in handles.items():
        for other, there in handles.items():
            if one == other:
                continue
            try:
                level = nvml.ask("nvmlDeviceGetTopologyCommonAncestor", here, there)
            except GpuLost:
                continue  # gone since it was looked at: a question mark in the table
            if level is not None:
                found[one, other] = _ANCESTORS.get(_number(level), "?")
    return found


def _node(bus: str, root: Path) -> int | None:
    """The NUMA node that the kernel has the GPU on; NVML's address has a longer domain than the kernel's."""
    if not bus:
        return None
    domain, _, rest = bus.lower().partition(":")
    try:
        node = int((root / f"sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _bus(info: object) -> str:
    bus = getattr(info, "busId", "")
    return bus.decode() if isinstance(bus, bytes) else str(bus)


def _number(value: object) -> int:
    return int(value) if isinstance(value, (int, float)) else 0
