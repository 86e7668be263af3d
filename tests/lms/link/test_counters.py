"""What the machine counts: the kernel's of a disk, NVML's of a GPU's link."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import pytest

from lms.errors import LMSError
from lms.link import nvml
from lms.link.counters import DiskCounters, NvmlCounters
from lms.link.file import FileProbe
from lms.memory.disk import disk_of

MB = 1 << 20


def uuid(index: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{index:012d}"


def disk(root: Path, folder: Path, stat: str) -> None:
    number = f"{os.major(folder.stat().st_dev)}:{os.minor(folder.stat().st_dev)}"
    real = root / "sys/devices/pci0/block/sdx"
    real.mkdir(parents=True)
    (real / "stat").write_text(stat)
    (real / "dev").write_text(number)
    (root / "sys/dev/block").mkdir(parents=True)
    (root / "sys/dev/block" / number).symlink_to(real)


def test_the_kernels_sectors_are_bytes_and_reads_are_the_way_back(tmp_path: Path) -> None:
    disk(tmp_path, tmp_path, "  10 0 2000 5  20 0 4000 6  0 7 8\n")
    counters = DiskCounters(tmp_path, tmp_path)
    reading = counters.read()
    assert (reading.out, reading.back) == (4000 * 512, 2000 * 512)
    assert reading.memory is not None
    assert reading.memory > MB
    counters.close()
    counters.close()


def test_this_machines_disk_counts_what_is_written_to_it(tmp_path: Path) -> None:
    if not disk_of(tmp_path).number:  # a container's overlay, say: then that is what must be told
        with pytest.raises(LMSError, match="has no counters"):
            DiskCounters(tmp_path)
        return
    counters = DiskCounters(tmp_path)
    probe = FileProbe(tmp_path, 8 * MB)
    before = counters.read()
    with probe.copies("out") as copy:
        copy(8 * MB)
    after = counters.read()
    probe.close()
    counters.close()
    assert before.out is not None
    assert after.out is not None
    if probe.via == "O_DIRECT":  # else the kernel writes by and by
        assert after.out - before.out >= 8 * MB
    assert after.busy is not None
    assert 0 <= after.busy <= 1


def test_memory_has_no_disk_to_count(tmp_path: Path) -> None:
    number = f"{os.major(tmp_path.stat().st_dev)}:{os.minor(tmp_path.stat().st_dev)}"
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(f"1 0 {number} / / rw - tmpfs none rw\n")
    with pytest.raises(LMSError, match=r"tmpfs, which is memory has no counters"):
        DiskCounters(tmp_path, tmp_path)


def test_pcie_is_counted_in_bytes_from_the_gpus_side(replay: ModuleType) -> None:
    counters = NvmlCounters(uuid(1), replay.Replay("h100"))
    reading = counters.read()
    assert (reading.out, reading.back) == (3 * 10**9, 4 * 10**9)
    assert "PCIe 5 x16 of NVIDIA H100" in counters.what
    assert counters.most == pytest.approx(63.0e9, rel=1e-3)


def test_nvlink_to_the_processor_is_counted_in_kib_and_only_the_bricks_that_go_there(replay: ModuleType) -> None:
    library = replay.Replay("v100_power9")
    for link in range(6):
        library.counters[0, nvml.FI_NVLINK_TX, link] = 100
        library.counters[0, nvml.FI_NVLINK_RX, link] = 200
    reading = NvmlCounters(uuid(0), library).read()
    assert (reading.out, reading.back) == (3 * 100 * 1024, 3 * 200 * 1024)


def test_bytes_over_c2c_are_not_counted_and_none_are_made_up(replay: ModuleType) -> None:
    reading = NvmlCounters(uuid(0), replay.Replay("gh200")).read()
    assert (reading.out, reading.back) == (None, None)
    assert reading.memory is not None


def test_a_driver_without_such_fields_counts_nothing(replay: ModuleType) -> None:
    reading = NvmlCounters(uuid(0), replay.Replay("t4_x8")).read()
    assert (reading.out, reading.back) == (None, None)
    assert reading.busy == 0.0


def test_the_deprecated_counters_are_not_read(replay: ModuleType) -> None:
    library = replay.Replay("a100")
    NvmlCounters(uuid(0), library).read()
    assert not [call for call in library.calls if "UtilizationCounter" in call or "PcieThroughput" in call]


def test_a_gpu_that_falls_off_the_bus_is_an_error_that_says_so(replay: ModuleType) -> None:
    library = replay.Replay("h100")
    counters = NvmlCounters(uuid(0), library)
    library.machine["gpus"][0]["lost_after"] = 0
    with pytest.raises(nvml.GpuLost, match="fell off the bus"):
        counters.read()


def test_a_gpu_that_nvml_does_not_know_is_refused_and_nvml_is_closed(replay: ModuleType) -> None:
    library = replay.Replay("h100")
    with pytest.raises(LMSError, match="knows of no GPU"):
        NvmlCounters("GPU-nowhere", library)
    assert library.open == 0


def test_another_gpu_that_is_lost_does_not_concern_the_one_that_trains(replay: ModuleType) -> None:
    library = replay.Replay("h100")
    library.machine["gpus"][0]["lost_after"] = 0
    assert NvmlCounters(uuid(1), library).read().out == 3 * 10**9
    with pytest.raises(nvml.GpuLost, match="fell off the bus"):
        NvmlCounters(uuid(0), library)


def test_other_gpus_are_asked_for_nothing_but_who_they_are(replay: ModuleType) -> None:
    library = replay.Replay("h100")
    NvmlCounters(uuid(1), library)
    assert library._asked[0] == 1


def test_of_several_gpus_none_is_taken_by_chance(replay: ModuleType) -> None:
    with pytest.raises(LMSError, match="PyTorch does not tell which of the 2 GPUs it uses"):
        NvmlCounters("", replay.Replay("h100"))
    assert NvmlCounters("", replay.Replay("t4_x8")).read().busy == 0.0
