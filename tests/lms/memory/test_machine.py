"""What the kernel tells of a machine: from folders that tests made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lms.memory import machine


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def two_sockets(root: Path) -> Path:
    """An AC922: nodes 0 and 8, and a GPU's memory as node 255 without processors."""
    folder = "sys/devices/system/node"
    for node, cpus, memory in ((0, "0-3,8", 256), (8, "4-7", 256), (255, "", 16)):
        put(root, f"{folder}/node{node}/cpulist", f"{cpus}\n")
        put(root, f"{folder}/node{node}/meminfo", f"Node {node} MemTotal:       {memory * 2**20} kB\n")
        put(root, f"{folder}/node{node}/distance", "10 40 80\n" if node == 0 else "40 10 80\n")
    return root


def test_nodes_come_in_their_order_with_processors_memory_and_distances(tmp_path: Path) -> None:
    nodes = machine.nodes(two_sockets(tmp_path))
    assert [node.index for node in nodes] == [0, 8, 255]
    assert nodes[0].cpus == (0, 1, 2, 3, 8)
    assert nodes[1].distances == (40, 10, 80)
    assert nodes[2].cpus == ()
    assert nodes[2].memory == 16 << 30


def test_a_kernel_without_nodes_has_one_with_all_that_we_may_use(tmp_path: Path) -> None:
    (node,) = machine.nodes(tmp_path)
    assert node.cpus == tuple(sorted(os.sched_getaffinity(0)))


def test_available_memory_is_what_the_kernel_says(tmp_path: Path) -> None:
    assert machine.available_memory(tmp_path) == 0
    put(tmp_path, "proc/meminfo", "MemTotal:  99 kB\nMemAvailable:   42 kB\n")
    assert machine.available_memory(tmp_path) == 42 * 1024


def test_the_processor_is_named_on_x86_and_on_power(tmp_path: Path) -> None:
    put(tmp_path, "proc/cpuinfo", "processor : 0\nmodel name\t: AMD EPYC 7763\nflags\t\t: fpu hypervisor sse\n")
    assert machine.processor(tmp_path) == "AMD EPYC 7763"
    assert machine.hypervisor(tmp_path)
    put(tmp_path, "proc/cpuinfo", "processor\t: 0\ncpu\t\t: POWER9, altivec supported\n")
    assert machine.processor(tmp_path) == "POWER9, altivec supported"
    assert machine.hypervisor(tmp_path) is None
    assert machine.machine(tmp_path)["virtual"] == "not known"
    put(tmp_path, "proc/cpuinfo", "flags\t\t: fpu sse\n")
    assert machine.hypervisor(tmp_path) is False
    assert machine.machine(tmp_path)["virtual"] == "no"


def test_this_machine_is_described_with_the_versions_that_measure() -> None:
    facts = machine.machine()
    assert {"processor", "kernel", "Python", "lms", "numpy"} <= facts.keys()
    assert all(isinstance(value, str) and value for value in facts.values())


def test_the_last_caches_count_once_however_many_processors_share_them(tmp_path: Path) -> None:
    folder = "sys/devices/system/cpu"
    for cpu in range(4):
        shared = "0-1" if cpu < 2 else "2-3"
        for index, level, size, cpus in ((0, 1, "48K", cpu), (2, 2, "1024K", cpu), (3, 3, "32768K", shared)):
            put(tmp_path, f"{folder}/cpu{cpu}/cache/index{index}/level", f"{level}\n")
            put(tmp_path, f"{folder}/cpu{cpu}/cache/index{index}/size", f"{size}\n")
            put(tmp_path, f"{folder}/cpu{cpu}/cache/index{index}/shared_cpu_list", f"{cpus}\n")
    assert machine.last_cache([0, 1], tmp_path) == 32 << 20
    assert machine.last_cache([1, 2, 3], tmp_path) == 64 << 20
    assert machine.last_cache([7], tmp_path) == 0


def test_a_kernel_is_named_by_the_first_two_numbers_of_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.release", lambda: "6.18.44-host-v7")
    assert machine.machine()["kernel"] == "6.18"
    monkeypatch.setattr("platform.release", lambda: "unreleased")
    assert machine.kernel() == "not known"


def test_a_control_group_that_allows_less_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 100)
    monkeypatch.setattr(machine, "memory_capacity", lambda: 40)
    assert machine.memory_room(0.25) == 10
    monkeypatch.setattr(machine, "memory_capacity", lambda: 400)
    assert machine.memory_room(0.25) == 25
