"""What lies under a folder: on kernels that tests made up, and on this one's tmpfs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lms.memory import disk as module
from lms.memory.disk import disk_of


def kernel(root: Path, folder: Path, *, device: str, filesystem: str, name: str, model: str = "", at: str = "") -> None:
    """/proc and /sys of a machine on which `folder` lies on block device `name`."""
    number = f"{os.major(folder.stat().st_dev)}:{os.minor(folder.stat().st_dev)}"
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(
        f"1 0 {number} / / rw - other none rw\n2 1 {number} / {folder} rw shared:1 - {filesystem} {device} rw\n"
    )
    if name:
        real = root / "sys/devices" / (at or "pci0000:00") / "block" / name
        (real / "device").mkdir(parents=True)
        (real / "dev").write_text("8:0\n")
        (real / "device/model").write_text(f"{model}\n")
        (real / "device/vendor").write_text("0x1af4\n")
        (root / "sys/dev/block").mkdir(parents=True)
        (root / "sys/dev/block" / number).symlink_to(real)


@pytest.mark.parametrize(
    ("name", "model", "at", "words", "note"),
    [
        ("nvme0n1", "SAMSUNG MZ7", "", "ext4 on disk nvme0n1 (SAMSUNG MZ7)", ""),
        ("nvme1n1", "Amazon Elastic Block Store", "", "ext4 on virtual disk nvme1n1", "possibly cached"),
        ("vda", "", "pci0000:00/virtio1", "ext4 on virtual disk vda", "possibly cached"),
        ("sda", "QEMU HARDDISK", "", "ext4 on virtual disk sda", "possibly cached"),
        ("nvme0n2", "nvme_card-pd", "", "ext4 on virtual disk nvme0n2", "possibly cached"),
        ("loop3", "", "", "ext4 on device loop3", "possibly cached"),
    ],
)
def test_a_disk_is_named_and_what_others_may_cache_is_said(
    tmp_path: Path, name: str, model: str, at: str, words: str, note: str
) -> None:
    kernel(tmp_path, tmp_path, device=f"/dev/{name}", filesystem="ext4", name=name, model=model, at=at)
    disk = disk_of(tmp_path, tmp_path)
    assert disk.what().startswith(words)
    assert disk.number == "8:0"
    assert " ".join(disk.notes()).startswith(note)
    assert bool(disk.notes()) == bool(note)


def test_the_disk_of_a_partition_is_the_whole_disk(tmp_path: Path) -> None:
    kernel(tmp_path, tmp_path, device="/dev/sda1", filesystem="xfs", name="sda")
    part = tmp_path / "sys/devices/pci0000:00/block/sda/sda1"
    part.mkdir()
    (part / "partition").write_text("1\n")
    (link,) = (tmp_path / "sys/dev/block").iterdir()
    link.unlink()
    link.symlink_to(part)
    assert disk_of(tmp_path, tmp_path).device == "sda"


@pytest.mark.parametrize(("filesystem", "words"), [("tmpfs", "tmpfs, which is memory"), ("nfs4", "over a network")])
def test_memory_and_networks_are_no_disks(tmp_path: Path, filesystem: str, words: str) -> None:
    kernel(tmp_path, tmp_path, device="none", filesystem=filesystem, name="")
    disk = disk_of(tmp_path, tmp_path)
    assert words in disk.what()
    assert disk.notes()
    assert (disk.device, disk.number) == ("", "")


def test_every_disk_of_a_virtual_machine_may_be_cached(tmp_path: Path) -> None:
    kernel(tmp_path, tmp_path, device="/dev/nvme0n1", filesystem="ext4", name="nvme0n1", model="SAMSUNG MZ7")
    (tmp_path / "proc/cpuinfo").write_text("flags : fpu hypervisor sse\n")
    (note,) = disk_of(tmp_path, tmp_path).notes()
    assert note.startswith("possibly cached: this machine is virtual")


@pytest.mark.parametrize(("filesystem", "source"), [("overlay", "overlay"), ("zfs", "tank/home")])
def test_what_lies_on_an_unknown_device_may_be_cached(tmp_path: Path, filesystem: str, source: str) -> None:
    kernel(tmp_path, tmp_path, device=source, filesystem=filesystem, name="")
    disk = disk_of(tmp_path, tmp_path)
    assert disk.what() == f"{filesystem} on unknown device"
    assert disk.notes() == (f"possibly cached: what lies below {filesystem} is not known here",)


def test_a_subvolume_of_btrfs_is_found_by_its_path_and_its_disk_by_the_mounts_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel(tmp_path, tmp_path, device="/dev/sda2", filesystem="btrfs", name="sda")
    (link,) = (tmp_path / "sys/dev/block").iterdir()
    link.rename(link.with_name("8:2"))
    (tmp_path / "proc/self/mountinfo").write_text(
        f"1 0 8:9 / / rw - ext4 /dev/sdb1 rw\n2 1 0:99 / {tmp_path} rw shared:1 - btrfs /dev/sda2 rw\n"
    )
    monkeypatch.setattr(module, "_number", lambda path: {"sda2": "8:2"}[path.name])
    disk = disk_of(tmp_path, tmp_path)
    assert (disk.filesystem, disk.device) == ("btrfs", "sda")


def test_of_mounts_at_one_place_the_later_one_counts(tmp_path: Path) -> None:
    kernel(tmp_path, tmp_path, device="none", filesystem="ext4", name="")
    with (tmp_path / "proc/self/mountinfo").open("a") as file:
        number = f"{os.major(tmp_path.stat().st_dev)}:{os.minor(tmp_path.stat().st_dev)}"
        file.write(f"3 2 {number} / {tmp_path} rw - tmpfs none rw\n")
    assert disk_of(tmp_path, tmp_path).filesystem == "tmpfs"
