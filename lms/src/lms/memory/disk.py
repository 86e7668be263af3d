"""The disk below a folder: its file system, its block device, and whether another layer may cache it.

`root` holds `proc` and `sys`; tests give a folder.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from lms.errors import UsageError
from lms.memory import machine
from lms.memory.proc import contents, mounts

_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "9p", "virtiofs", "fuse.sshfs")
# By vendor or model, as these hypervisors and clouds name the disks that they make up.
_VIRTUAL = ("qemu", "virtio", "vmware", "vbox", "msft", "amazon elastic", "persistentdisk", "google", "nvme_card")


@dataclass(frozen=True)
class Disk:
    """The disk, or what stands in for one, that holds a folder's files."""

    folder: str
    filesystem: str  # as the kernel names its type; "unknown" if it does not tell
    device: str  # the block device's name; "" if there is none
    number: str  # MAJOR:MINOR of the device that is throttled and counted (the whole disk); "" as above
    model: str  # as the device names itself, or ""
    memory: bool  # it is no disk: what is written there stays in memory
    remote: bool
    virtual: bool  # a hypervisor made it up
    layered: bool  # a loop or a device-mapper device: the disk is below
    guest: bool = False  # the machine itself is virtual

    def what(self) -> str:
        """The disk in words."""
        if self.memory:
            return f"{self.filesystem}, which is memory"
        if self.remote:
            return f"{self.filesystem}, over a network"
        kind = "virtual disk" if self.virtual else "device" if self.layered else "disk"
        name = f"{kind} {self.device}{f' ({self.model})' if self.model else ''}" if self.device else "unknown device"
        return f"{self.filesystem} on {name}"

    def notes(self) -> tuple[str, ...]:
        """Notes for readers of its figures."""
        if self.memory:
            return (f"{self.folder} is on {self.filesystem}: that is memory, so nothing here is a disk's figure",)
        if self.remote:
            return ("possibly cached: the server behind the network may answer from its memory",)
        if self.virtual:
            return ("possibly cached: a virtual disk's host may keep bytes in its memory, and does not tell",)
        if self.layered:
            return (f"possibly cached: {self.device} lies on something else, which may keep bytes in memory",)
        if not self.device:
            return (f"possibly cached: what lies below {self.filesystem} is not known here",)
        if self.guest:
            return ("possibly cached: this machine is virtual, and its host may keep bytes of any disk in its memory",)
        return ()


def disk_at(folder: Path) -> Disk:
    """The disk below the folder of `--dir`. Raises UsageError if it is no folder, or may not be looked into."""
    expected = "expected a folder on the disk that is to be measured"
    try:
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise UsageError(f"--dir={str(folder)!r}: a file; {expected}")
        return disk_of(folder)
    except FileNotFoundError:
        raise UsageError(f"--dir={str(folder)!r}: no such folder; {expected}") from None
    except OSError as error:
        raise UsageError(f"--dir={str(folder)!r}: {error.strerror}; {expected}") from None


def disk_of(folder: Path, root: Path = Path("/")) -> Disk:
    """The disk below `folder`, which must exist. Raises OSError."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    filesystem, source = _mount(number, folder.resolve(), root)
    block = root / "sys/dev/block" / number
    if not block.exists() and source.startswith("/dev/"):
        # btrfs and overlays have a number of their own: the source's device is the one that stores.
        try:
            number = _number(root / source.lstrip("/"))
        except OSError:
            number = ""
        block = root / "sys/dev/block" / number if number else block
    there = block.exists()
    real = block.resolve()
    if (real / "partition").exists():
        real = real.parent
    name = real.name if there else ""
    model = " ".join(filter(None, (_word(real / "device/vendor"), _word(real / "device/model"))))
    return Disk(
        str(folder),
        filesystem,
        name,
        (_word(real / "dev") or number) if there else "",
        model,
        memory=filesystem in _MEMORY or name.startswith(("zram", "ram")),
        remote=filesystem in _REMOTE,
        virtual="virtio" in str(real) or name.startswith("xvd") or any(one in model.lower() for one in _VIRTUAL),
        layered=name.startswith(("loop", "dm-", "md", "nbd")),
        guest=bool(machine.hypervisor(root)),
    )


def _mount(number: str, folder: Path, root: Path) -> tuple[str, str]:
    """Type and source of the file system: of the mount that is nearest above the folder.

    One with the folder's device number goes before others, which it may hide. A subvolume of btrfs has a number that no
    mount has.
    """
    best, found = (False, -1), ("unknown", "")
    for mount in mounts(root):
        rank = (mount.number == number, len(mount.point))
        if folder.is_relative_to(mount.point) and rank >= best:  # of two at one point the later one is on top
            best, found = rank, (mount.kind, mount.source)
    return found


def _number(path: Path) -> str:
    device = os.stat(path).st_rdev
    return f"{os.major(device)}:{os.minor(device)}"


def _word(path: Path) -> str:
    """A file of /sys in a line; a vendor's bare number says nothing to people."""
    text = " ".join(contents(path).split())
    return "" if text.startswith("0x") else text
