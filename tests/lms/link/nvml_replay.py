"""The surface of nvidia-ml-py, answering from a file of tests/lms/link/nvml: what a driver would say of some machine.

Errors and structures are the real ones of nvidia-ml-py, so that what is asked of them is what the library offers.
A function that the file has no answer for is not supported there, as on a GPU that lacks it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pynvml

FOLDER = Path(__file__).parent / "nvml"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))

NOT_SUPPORTED, INVALID, NOT_FOUND, LOST = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_NOT_FOUND,
    pynvml.NVML_ERROR_GPU_IS_LOST,
)


@dataclass(eq=False)
class Handle:
    index: int
    instance: str = ""


class Replay:
    """A module `pynvml` for one machine. `calls` are the functions that were called, in order."""

    NVMLError = pynvml.NVMLError
    NVML_NVLINK_MAX_LINKS = pynvml.NVML_NVLINK_MAX_LINKS

    def __init__(self, name: str) -> None:
        self.machine = json.loads((FOLDER / f"{name}.json").read_text())
        self.calls: list[str] = []
        self.open = 0
        self.counters: dict[tuple[int, int, int], int] = {}  # (GPU, field, scope) -> value, for tests that move them
        self._asked = [0] * len(self.machine["gpus"])

    def nvmlInit(self) -> None:
        if self.machine.get("init"):
            raise pynvml.NVMLError(self.machine["init"])
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.machine["driver"]

    def nvmlDeviceGetCount(self) -> int:
        return len(self.machine["gpus"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:
        if not 0 <= index < len(self.machine["gpus"]):
            raise pynvml.NVMLError(INVALID)
        if error := self.machine["gpus"][index].get("handle"):
            raise pynvml.NVMLError(error)
        return Handle(index)

    def nvmlDeviceGetFieldValues(self, handle: Handle, wanted: list[tuple[int, int]]) -> object:
        gpu = self._gpu(handle, "nvmlDeviceGetFieldValues")
        values = (pynvml.c_nvmlFieldValue_t * len(wanted))()
        for value, (field, scope) in zip(values, wanted, strict=True):
            value.fieldId, value.scopeId = field, scope
            key = f"{field}/{scope}" if f"{field}/{scope}" in gpu["fields"] else str(field)
            found = self.counters.get((handle.index, field, scope), gpu["fields"].get(key))
            value.nvmlReturn = pynvml.NVML_SUCCESS if found is not None else NOT_SUPPORTED
            if found is not None:
                value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
                value.value.ullVal = found
        return values

    def nvmlDeviceGetPciInfo(self, handle: Handle) -> object:
        return SimpleNamespace(busId=self._answer(handle, "nvmlDeviceGetPciInfo").encode())

    def nvmlDeviceGetMemoryInfo(self, handle: Handle) -> object:
        total = self._answer(handle, "nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(total=total, used=total // 4, free=total - total // 4)

    def nvmlDeviceGetUtilizationRates(self, handle: Handle) -> object:
        return SimpleNamespace(gpu=self._answer(handle, "nvmlDeviceGetUtilizationRates"), memory=7)

    def nvmlDeviceGetName(self, handle: Handle) -> str:
        return handle.instance or self._answer(handle, "nvmlDeviceGetName")

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Handle) -> int:
        return 7 if "mig" in self._gpu(handle, "nvmlDeviceGetMaxMigDeviceCount") else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Handle, at: int) -> Handle:
        instances = self._gpu(handle, "nvmlDeviceGetMigDeviceHandleByIndex").get("mig", [])
        if at >= len(instances):
            raise pynvml.NVMLError(NOT_FOUND)
        return Handle(handle.index, instances[at])

    def nvmlDeviceGetNvLinkState(self, handle: Handle, link: int) -> int:
        return self._link(handle, link, "nvmlDeviceGetNvLinkState")["state"]

    def nvmlDeviceGetNvLinkVersion(self, handle: Handle, link: int) -> int:
        return self._known(self._link(handle, link, "nvmlDeviceGetNvLinkVersion").get("version"))

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Handle, link: int) -> int:
        return self._known(self._link(handle, link, "nvmlDeviceGetNvLinkRemoteDeviceType").get("end"))

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: Handle, link: int) -> object:
        found = self._known(self._link(handle, link, "nvmlDeviceGetNvLinkRemotePciInfo").get("bus"))
        return SimpleNamespace(busId=found.encode())

    def nvmlDeviceGetTopologyCommonAncestor(self, one: Handle, other: Handle) -> int:
        self._gpu(one, "nvmlDeviceGetTopologyCommonAncestor")
        low, high = sorted((one.index, other.index))
        return self._known(self.machine.get("ancestors", {}).get(f"{low},{high}"))

    def __getattr__(self, name: str) -> object:
        if not name.startswith("nvmlDeviceGet") or not hasattr(pynvml, name):
            raise AttributeError(name)
        return lambda handle: self._answer(handle, name)

    def _gpu(self, handle: Handle, name: str) -> dict:
        self.calls.append(name)
        gpu = self.machine["gpus"][handle.index]
        self._asked[handle.index] += 1
        if "lost_after" in gpu and self._asked[handle.index] > gpu["lost_after"]:
            raise pynvml.NVMLError(LOST)
        return gpu

    def _answer(self, handle: Handle, name: str) -> object:
        answers = self._gpu(handle, name)["answers"]
        if name not in answers:
            raise pynvml.NVMLError(NOT_SUPPORTED)
        return answers[name]

    def _link(self, handle: Handle, link: int, name: str) -> dict:
        links = self._gpu(handle, name).get("nvlinks", [])
        if not links:
            raise pynvml.NVMLError(NOT_SUPPORTED)
        if link >= len(links):
            raise pynvml.NVMLError(INVALID)
        return links[link]

    def _known(self, value: object) -> object:
        if value is None:
            raise pynvml.NVMLError(NOT_SUPPORTED)
        return value
