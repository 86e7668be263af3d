"""How much memory a process may use, from trees as the kernel shows them."""

import os
from pathlib import Path

import pytest

from lms.memory.capacity import memory_capacity

TOTAL = 32 * 2**30
MOUNT_V1 = "30 25 0:26 {root} {point} rw,nosuid shared:9 - cgroup cgroup rw,memory\n"
MOUNT_V2 = "31 25 0:27 {root} {point} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
OTHER = (
    "32 25 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n22 1 253:1 / / rw,relatime - ext4 /dev/vda rw\n"
)


def tree(folder: Path, cgroup: str, mountinfo: str, limits: dict[str, str]) -> Path:
    files = {
        "proc/meminfo": f"MemTotal:       {TOTAL // 1024} kB\nMemFree:        1 kB\n",
        "proc/self/cgroup": cgroup,
        "proc/self/mountinfo": mountinfo + OTHER,
        **limits,
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def v2(root: str = "/", point: str = "/sys/fs/cgroup") -> str:
    return MOUNT_V2.format(root=root, point=point)


def v1(root: str = "/", point: str = "/sys/fs/cgroup/memory") -> str:
    return MOUNT_V1.format(root=root, point=point)


CASES: dict[str, tuple[str, str, dict[str, str], int]] = {
    "v2, the group itself": (
        "0::/user/job\n",
        v2(),
        {"sys/fs/cgroup/user/job/memory.max": "1000000\n", "sys/fs/cgroup/user/memory.max": "max\n"},
        1_000_000,
    ),
    "v2, a group above": (
        "0::/user/job\n",
        v2(),
        {"sys/fs/cgroup/user/job/memory.max": "max\n", "sys/fs/cgroup/user/memory.max": "2000000\n"},
        2_000_000,
    ),
    "v2, the least of all": (
        "0::/a/b/c\n",
        v2(),
        {
            "sys/fs/cgroup/a/b/c/memory.max": "5000000\n",
            "sys/fs/cgroup/a/b/memory.max": "3000000\n",
            "sys/fs/cgroup/a/memory.max": "4000000\n",
        },
        3_000_000,
    ),
    "v2, no limit": ("0::/user\n", v2(), {"sys/fs/cgroup/user/memory.max": "max\n"}, TOTAL),
    "v2, more than the machine has": ("0::/u\n", v2(), {"sys/fs/cgroup/u/memory.max": f"{2 * TOTAL}\n"}, TOTAL),
    "v2, inside a container's namespace": ("0::/\n", v2(), {"sys/fs/cgroup/memory.max": "7000000\n"}, 7_000_000),
    "v2, mounted from a part of the tree": (
        "0::/docker/abc/inner\n",
        v2(root="/docker/abc"),
        {"sys/fs/cgroup/inner/memory.max": "max\n", "sys/fs/cgroup/memory.max": "6000000\n"},
        6_000_000,
    ),
    "v2, outside the namespace's root": (
        "0::/../other\n",
        v2(),
        {"sys/fs/cgroup/memory.max": "8000000\n", "sys/fs/other/memory.max": "1\n"},
        8_000_000,
    ),
    "v1, the group itself": (
        "4:memory:/job\n0::/\n",
        v1(),
        {"sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9000000\n"},
        9_000_000,
    ),
    "v1, a group above": (
        "4:cpu,memory:/a/b\n",
        v1(),
        {
            "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "4000000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
        4_000_000,
    ),
    "v1, no limit": (
        "4:memory:/\n",
        v1(),
        {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
        TOTAL,
    ),
    "v1, a path told from outside the container": (
        "4:memory:/host/pod/abc\n",
        v1(root="/elsewhere"),
        {"sys/fs/cgroup/memory/memory.limit_in_bytes": "5000000\n"},
        5_000_000,
    ),
    "v1 and v2 side by side": (
        "4:memory:/job\n0::/job\n",
        v1() + v2(point="/sys/fs/cgroup/unified"),
        {
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "3000000\n",
            "sys/fs/cgroup/unified/job/cgroup.procs": "1\n",
        },
        3_000_000,
    ),
    "a mount point with a space": (
        "0::/job\n",
        v2(point="/mnt/my\\040groups"),
        {"mnt/my groups/job/memory.max": "2500000\n"},
        2_500_000,
    ),
    "no control groups": ("", "", {}, TOTAL),
}


@pytest.mark.parametrize("case", CASES)
def test_capacity_is_the_lesser_of_the_machine_and_the_control_groups(tmp_path: Path, case: str) -> None:
    cgroup, mountinfo, limits, expected = CASES[case]
    assert memory_capacity(tree(tmp_path, cgroup, mountinfo, limits)) == expected


def test_this_machine_has_a_capacity() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory_capacity() <= total
