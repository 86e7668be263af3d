import json
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddl.launch import machine
from ddl.launch.counts import format_runs, parse_runs
from ddl.launch.machine import Gpu, Machine, Socket, kernel, read


def system(root: Path, packages: list[int], siblings: dict[int, str] | None = None) -> None:
    """A /sys of one CPU an entry of `packages`, which says its package. Written from the kernel's documentation."""
    for cpu, package in enumerate(packages):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "thread_siblings_list").write_text((siblings or {}).get(cpu, str(cpu)) + "\n")
    (root / "sys/devices/system/cpu/cpufreq").mkdir()


def interface(root: Path, name: str, *, state: str = "up", flags: str = "0x1003") -> Path:
    folder = root / "sys/class/net" / name
    folder.mkdir(parents=True)
    (folder / "operstate").write_text(state + "\n")
    (folder / "flags").write_text(flags + "\n")
    return folder


def read_at(
    root: Path,
    cpus: int,
    addresses: dict[str, str] | None = None,
    gpus: list[tuple[Gpu, Collection[int]]] | None = None,
    visible: str | None = "",
) -> Machine:
    shown = visible if gpus else ""
    return read(root, name="h0", allowed=range(cpus), addresses=addresses or {}, gpus=gpus or [], visible=shown)


def test_sockets_and_cores_are_counted_without_hyperthreads(tmp_path: Path) -> None:
    system(tmp_path, [0, 0, 1, 1, 0, 0, 1, 1], {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)})
    found = read_at(tmp_path, 8)
    assert found.sockets == (Socket(2, (0, 1, 4, 5)), Socket(2, (2, 3, 6, 7)))
    assert found.cores == 4


def test_sockets_are_numbered_by_their_first_cpu_as_hwloc_does(tmp_path: Path) -> None:
    system(tmp_path, [36, 36, 0, 0])
    assert [one.cpus for one in read_at(tmp_path, 4).sockets] == [(0, 1), (2, 3)]


def test_only_the_cpus_that_the_job_may_use_count(tmp_path: Path) -> None:
    system(tmp_path, [0, 0, 1, 1])
    assert read_at(tmp_path, 2).sockets == (Socket(2, (0, 1)),)


def test_a_virtual_machine_that_names_no_package_has_one_socket(tmp_path: Path) -> None:
    system(tmp_path, [-1, -1])
    assert read_at(tmp_path, 2).sockets == (Socket(2, (0, 1)),)


def test_a_host_without_a_sys_still_has_its_cpus(tmp_path: Path) -> None:
    assert read_at(tmp_path, 3).sockets == (Socket(3, (0, 1, 2)),)


def test_interfaces_that_lead_nowhere_are_told_from_those_that_do(tmp_path: Path) -> None:
    system(tmp_path, [0])
    interface(tmp_path, "eth0")
    interface(tmp_path, "eth1", state="down")
    interface(tmp_path, "lo", state="unknown", flags="0x9")
    for name, port in (("docker0", "veth1"), ("br0", "eth2")):
        bridge = interface(tmp_path, name)
        (bridge / "bridge").mkdir()
        (bridge / "brif" / port).mkdir(parents=True)
        interface(tmp_path, port)
    (tmp_path / "sys/class/net/eth2/device").mkdir()
    for name, below in (("eth2.100", "eth2"), ("veth1.7", "veth1")):  # a VLAN of each
        bridge = interface(tmp_path, f"br-{below}")
        (bridge / "bridge").mkdir()
        (bridge / "brif" / name).mkdir(parents=True)
        (interface(tmp_path, name) / f"lower_{below}").symlink_to(f"../{below}")
    names = ["eth0", "eth1", "lo", "docker0", "br0", "br-eth2", "br-veth1"]
    found = read_at(tmp_path, 1, {name: f"10.{at}.0.1/16" for at, name in enumerate(names)})
    assert {nic.name: nic.routes for nic in found.nics} == {
        "eth0": True,
        "eth1": False,
        "lo": False,
        "docker0": False,
        "br0": True,
        "br-eth2": True,
        "br-veth1": False,
    }
    assert found.nics[4].network == "10.0.0.0/16"


def test_a_fabric_s_adapters_are_seen(tmp_path: Path) -> None:
    system(tmp_path, [0])
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert read_at(tmp_path, 1).fabrics == ("mlx5_0",)


GPUS: list[tuple[Gpu, Collection[int]]] = [
    (Gpu("V100"), {0, 1}),
    (Gpu("V100"), {2, 3}),
]


def test_a_gpu_belongs_to_the_socket_that_is_near_it(tmp_path: Path) -> None:
    system(tmp_path, [0, 0, 1, 1])
    assert [gpu.socket for gpu in read_at(tmp_path, 4, gpus=GPUS, visible=None).gpus] == [0, 1]


def test_a_gpu_whose_place_is_hidden_has_no_socket(tmp_path: Path) -> None:
    system(tmp_path, [0, 0, 1, 1])
    everywhere: list[tuple[Gpu, Collection[int]]] = [(GPUS[0][0], range(4)), (GPUS[1][0], ())]
    assert [gpu.socket for gpu in read_at(tmp_path, 4, gpus=everywhere, visible=None).gpus] == [None, None]


@pytest.mark.parametrize(
    ("visible", "count"), [("0", 1), ("1,0", 2), ("", 0), ("-1", 0), ("0,7,1", 1), ("GPU-ab,GPU-cd", 2)]
)
def test_cuda_visible_devices_hides_gpus(tmp_path: Path, visible: str, count: int) -> None:
    system(tmp_path, [0, 0, 1, 1])
    assert len(read_at(tmp_path, 4, gpus=GPUS, visible=visible).gpus) == count


class FakeNvml(SimpleNamespace):
    """As much of pynvml as is used; written from NVIDIA's documentation."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, driver: bool, lost: Collection[int] = (), knows: bool = True) -> None:
        super().__init__()
        self.driver, self.open, self.lost, self.knows = driver, 0, lost, knows

    def _needs(self, knows: bool) -> None:
        if not knows:
            raise self.NVMLError("Not Supported")

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError("NVML Shared Library Not Found")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.lost:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        self._needs(self.knows)
        return "NVIDIA H100" if handle else b"NVIDIA H100"

    def nvmlDeviceGetCpuAffinity(self, handle: int, words: int) -> list[int]:
        self._needs(handle == 0)
        return [0b11] + [0] * (words - 1)


def test_gpus_are_asked_of_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(driver=True)
    monkeypatch.setitem(machine.importlib.sys.modules, "pynvml", nvml)  # type: ignore[attr-defined]
    gpus = machine._nvml_gpus()
    assert gpus == [
        (Gpu("NVIDIA H100"), {0, 1}),
        (Gpu("NVIDIA H100"), set()),
    ]
    assert nvml.open == 0


def test_what_nvml_does_not_know_of_a_gpu_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(driver=True, knows=False)
    monkeypatch.setitem(machine.importlib.sys.modules, "pynvml", nvml)  # type: ignore[attr-defined]
    assert machine._nvml_gpus() == [
        (Gpu("of an unknown kind"), {0, 1}),
        (Gpu("of an unknown kind"), set()),
    ]
    assert nvml.open == 0


def test_a_gpu_that_nvml_cannot_open_is_there_with_its_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvml = FakeNvml(driver=True, lost=[1])
    monkeypatch.setitem(machine.importlib.sys.modules, "pynvml", nvml)  # type: ignore[attr-defined]
    gpus = machine._nvml_gpus()
    assert [gpu.fault for gpu, _ in gpus] == ["", "GPU 1 cannot be used: NVML says: GPU is lost"]
    assert nvml.open == 0
    system(tmp_path, [0])
    assert [gpu.fault for gpu in read_at(tmp_path, 1, gpus=gpus, visible="0").gpus] == [""]  # it is left out


def test_gpus_that_cannot_be_counted_are_one_with_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(driver=True)
    monkeypatch.setattr(nvml, "nvmlDeviceGetCount", lambda: nvml._needs(False))
    monkeypatch.setitem(machine.importlib.sys.modules, "pynvml", nvml)  # type: ignore[attr-defined]
    assert [gpu.fault for gpu, _ in machine._nvml_gpus()] == ["GPUs cannot be counted: NVML says: Not Supported"]


def test_no_driver_means_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.importlib.sys.modules, "pynvml", FakeNvml(driver=False))  # type: ignore[attr-defined]
    assert machine._nvml_gpus() == []


def test_no_package_for_nvml_means_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.importlib.sys.modules, "pynvml", None)  # type: ignore[attr-defined]
    assert machine._nvml_gpus() == []


def test_a_machine_survives_json(machine: Callable[..., Machine]) -> None:
    one = machine(gpus=4)
    assert Machine.from_dict(json.loads(json.dumps(one.to_dict()))) == one


@given(st.sets(st.integers(0, 300)))
def test_lists_of_cpus_survive_their_short_form(cpus: set[int]) -> None:
    assert set(parse_runs(format_runs(cpus))) == cpus


def test_this_machine_can_be_read() -> None:
    found = read()
    assert found.cores >= 1
    assert {nic.name: nic.routes for nic in found.nics}.get("lo") is not True
    assert all(1024 <= port < 65536 for port in machine.free_ports())


def test_a_kernel_is_named_by_the_first_two_numbers_of_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.release", lambda: "6.18.44-host-v7")
    assert kernel() == "6.18"
