"""What the driver tells of GPUs, replayed from files that say where they are from."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

from lms.link import nvml
from lms.link.gpu import matrix, pair_ceiling

FOLDER = Path(__file__).parent / "nvml"
FILES = sorted(FOLDER.glob("*.json"))


def look(replay: ModuleType, name: str, root: Path = Path("/nowhere")) -> nvml.Seen:
    library = replay.Replay(name)
    seen = nvml.look(library, root)
    assert library.open == 0, "NVML was left open"
    return seen


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_file_says_where_it_is_from(path: Path) -> None:
    source = json.loads(path.read_text())["source"]
    assert source.startswith(("written from public documentation: ", "recorded on ", "made up: "))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_machine_is_read_or_refused_in_a_line(replay: ModuleType, path: Path) -> None:
    seen = look(replay, path.stem)
    assert seen.gpus or seen.absent
    for one in seen.absent:
        assert one.why
        assert "\n" not in one.why
    for gpu in seen.gpus:
        gpu.host()
        gpu.warnings()


def test_a_v100_in_an_ac922_is_linked_to_its_processor_by_three_bricks(replay: ModuleType) -> None:
    seen = look(replay, "v100_power9")
    assert len(seen.gpus) == 4
    words, ceiling = seen.gpus[0].host()
    assert words == "NVLink 2.0 to the processor, 3 links up"
    assert ceiling is not None
    assert ceiling.out == pytest.approx(3 * 25.781e9)
    assert seen.gpus[0].warnings() == []
    assert matrix(seen.gpus, seen.ancestors) == [
        ["X", "NV3", "SYS", "SYS"],
        ["NV3", "X", "SYS", "SYS"],
        ["SYS", "SYS", "X", "NV3"],
        ["SYS", "SYS", "NV3", "X"],
    ]


def test_links_that_are_down_do_not_count_and_are_named(replay: ModuleType) -> None:
    (gpu,) = look(replay, "v100_links_down").gpus
    assert gpu.host()[0] == "NVLink 2.0 to the processor, 3 links up"
    assert len(gpu.to("gpu")) == 1
    assert any("2 of 6 NVLinks are down (3, 5)" in one for one in gpu.warnings())


@pytest.mark.parametrize(
    ("name", "count", "version", "rate", "pcie", "ceiling"),
    [
        ("a100", 12, "3.0", 25.0e9, "PCIe 4 x16", 31.5e9),
        ("h100", 18, "4.0", 26.562e9, "PCIe 5 x16", 63.0e9),
        ("h200", 18, "4.0", 26.562e9, "PCIe 5 x16", 63.0e9),
    ],
)
def test_gpus_behind_switches(
    replay: ModuleType, name: str, count: int, version: str, rate: float, pcie: str, ceiling: float
) -> None:
    seen = look(replay, name)
    one, _ = seen.gpus
    assert len(one.to("switch")) == count
    assert {link.version for link in one.nvlinks} == {version}
    assert one.nvlinks[0].speed() == rate
    words, found = one.host()
    assert words == pcie
    assert found is not None
    assert found.out == pytest.approx(ceiling, rel=1e-3)
    assert matrix(seen.gpus, seen.ancestors) == [["X", f"NV{count}"], [f"NV{count}", "X"]]


def test_a_gpu_that_its_power_limit_slows_down_is_said_to_be(replay: ModuleType) -> None:
    idle, slowed = look(replay, "h200").gpus
    assert idle.slowed == ()
    assert slowed.warnings() == ["slowed down: by its power limit (SW power cap)"]


def test_a_gh200_is_linked_by_c2c_and_its_sleeping_pcie_is_no_matter(replay: ModuleType) -> None:
    (gpu,) = look(replay, "gh200").gpus
    words, ceiling = gpu.host()
    assert words == "NVLink-C2C, 10 of 10 links up"
    assert ceiling is not None
    assert ceiling.out == 450e9
    assert gpu.warnings() == []


def test_a_t4_in_a_x8_slot_is_warned_of_and_that_it_sleeps(replay: ModuleType) -> None:
    (gpu,) = look(replay, "t4_x8").gpus
    words, ceiling = gpu.host()
    assert words == "PCIe 3 x8"
    assert ceiling is not None
    assert ceiling.out == pytest.approx(7.88e9, rel=1e-3)
    slot, asleep = gpu.warnings()
    assert "x8 lanes at most" in slot
    assert "asleep: PCIe 1 now, 3 at most" in asleep
    assert gpu.nvlinks == ()


def test_a_gpu_that_is_cut_into_instances_names_them(replay: ModuleType) -> None:
    (gpu,) = look(replay, "mig").gpus
    assert gpu.mig is not None
    assert [name.rsplit(" ", 1)[1] for name in gpu.mig] == ["3g.20gb", "1g.5gb"]
    assert any("MIG instances" in one for one in gpu.warnings())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_driver", "installed and not loaded"),
        ("no_library", "no NVIDIA driver is installed"),
        ("no_permission", "refuses this user"),
        ("version_mismatch", "differ in version"),
    ],
)
def test_a_driver_that_does_not_answer_is_named_with_what_to_do(replay: ModuleType, name: str, words: str) -> None:
    seen = look(replay, name)
    assert seen.gpus == ()
    (absence,) = seen.absent
    assert words in absence.why


def test_a_gpu_that_falls_off_the_bus_is_named_and_the_others_are_read(replay: ModuleType) -> None:
    seen = look(replay, "falls_off")
    assert [gpu.index for gpu in seen.gpus] == [0]
    (absence,) = seen.absent
    assert absence.what == "GPU 1"
    assert "fell off the bus" in absence.why


def test_a_gpu_of_the_future_is_read_as_far_as_it_is_known(replay: ModuleType) -> None:
    (gpu,) = look(replay, "unknown_gpu").gpus
    assert gpu.name == "NVIDIA X900"
    assert gpu.host() == ("PCIe 9 x16", None)
    assert gpu.nvlinks[0].end == "unknown"
    assert gpu.nvlinks[0].speed() is None


def test_the_node_of_a_gpu_is_what_the_kernel_says(replay: ModuleType, tmp_path: Path) -> None:
    device = tmp_path / "sys/bus/pci/devices/0035:03:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("8\n")
    assert [gpu.node for gpu in look(replay, "v100_power9", tmp_path).gpus] == [None, None, 8, None]


def test_a_missing_library_is_an_absence_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (absence,) = nvml.look().absent
    assert "pip install './lms[nvml]'" in absence.why


def test_a_function_that_an_old_library_lacks_has_no_answer(replay: ModuleType) -> None:
    library = replay.Replay("h100")
    opened = nvml.Nvml(library)
    assert opened.ask("nvmlDeviceGetSomethingNew", opened.handle(0)) is None


@pytest.mark.parametrize("name", ["a100", "h100", "gh200"])
def test_the_deprecated_counters_are_not_asked(replay: ModuleType, name: str) -> None:
    library = replay.Replay(name)
    nvml.look(library)
    assert not [call for call in library.calls if "UtilizationCounter" in call or "PcieThroughput" in call]


def test_a_gpu_survives_json(replay: ModuleType) -> None:
    (gpu,) = look(replay, "gh200").gpus
    assert json.loads(json.dumps(asdict(gpu)))["c2c"] == {"up": 10, "count": 10, "rate": 450e9}


def test_nvlinks_whose_far_end_a_virtual_machine_hides_go_to_switches(replay: ModuleType) -> None:
    library = replay.Replay("h100")
    for gpu in library.machine["gpus"]:
        for link in gpu["nvlinks"]:
            link["end"], link["bus"] = None, "FFFFFFFF:FFFF:FF.0"
    seen = nvml.look(library, Path("/nowhere"))
    assert matrix(seen.gpus, seen.ancestors)[0][1] == "NV18"
    assert pair_ceiling(*seen.gpus) is not None


def test_a_pair_could_carry_what_the_gpu_with_fewer_links_could(replay: ModuleType) -> None:
    library = replay.Replay("h100")
    for link in library.machine["gpus"][1]["nvlinks"][12:]:
        link["state"] = 0
    one, other = nvml.look(library, Path("/nowhere")).gpus
    ceilings = pair_ceiling(one, other), pair_ceiling(other, one)
    assert ceilings[0] == ceilings[1]
    assert ceilings[0] is not None
    assert ceilings[0].source.startswith("12 NVLinks")


@pytest.mark.parametrize(
    ("kind", "member", "value"),
    [
        ("DOUBLE", "dVal", 7.0),
        ("UNSIGNED_INT", "uiVal", 2**32 - 1),
        ("UNSIGNED_LONG", "ulVal", 2**63),
        ("UNSIGNED_LONG_LONG", "ullVal", 2**64 - 1),
        ("SIGNED_LONG_LONG", "sllVal", -(2**40)),
        ("SIGNED_INT", "siVal", -5),
        ("UNSIGNED_SHORT", "usVal", 65535),
    ],
)
def test_a_field_is_read_as_the_type_that_the_driver_says(
    replay: ModuleType, kind: str, member: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pynvml

    def answer(handle: object, wanted: list[tuple[int, int]]) -> object:
        values = (pynvml.c_nvmlFieldValue_t * len(wanted))()
        values[0].value.ullVal = 0xAAAA_AAAA_AAAA_AAAA  # what is left of something else
        values[0].valueType = getattr(pynvml, f"NVML_VALUE_TYPE_{kind}")
        setattr(values[0].value, member, value)
        return values

    library = replay.Replay("h100")
    monkeypatch.setattr(library, "nvmlDeviceGetFieldValues", answer, raising=False)
    with closing(nvml.Nvml(library)) as opened:
        assert opened.fields(opened.handle(0), [(1, 0)]) == [int(value)]


def test_a_field_of_a_type_that_is_not_known_is_not_there(replay: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def answer(handle: object, wanted: list[tuple[int, int]]) -> object:
        values = (pynvml.c_nvmlFieldValue_t * len(wanted))()
        values[0].valueType = 99
        return values

    library = replay.Replay("h100")
    monkeypatch.setattr(library, "nvmlDeviceGetFieldValues", answer, raising=False)
    with closing(nvml.Nvml(library)) as opened:
        assert opened.fields(opened.handle(0), [(1, 0)]) == [None]
