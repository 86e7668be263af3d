"""What the tests of the testbed share: a bed, and a way to see that nothing of one is left."""

from __future__ import annotations

import os
import select
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from testbed import Decoy, Testbed, cluster, running


@dataclass(frozen=True)
class Mark:
    """An entry in the environment of everything that a testbed starts, from its first process on."""

    name: str

    @property
    def environment(self) -> dict[str, str]:
        return {self.name: "1"}

    def processes(self) -> list[int]:
        found = []
        for entry in os.listdir("/proc"):
            try:
                if entry.isdigit() and f"{self.name}=1\0".encode() in Path("/proc", entry, "environ").read_bytes():
                    found.append(int(entry))
            except OSError:  # it has ended
                continue
        return found

    def wait_until_gone(self, seconds: float = 20) -> None:
        """Wait for the end of everything that is marked; fails when something stays."""
        while pids := self.processes():
            for pid in pids:
                try:
                    descriptor = os.pidfd_open(pid)
                except ProcessLookupError:
                    continue
                with os.fdopen(descriptor) as opened:
                    assert select.select([opened], [], [], seconds)[0], f"process {pid} stays"


@pytest.fixture
def mark() -> Mark:
    return Mark(f"TESTBED_MARK_{uuid.uuid4().hex}")


@pytest.fixture
def untouched() -> Iterator[None]:
    """The machine's own interfaces and mounts are afterwards what they were."""
    before = machine()
    yield
    assert machine() == before


def machine() -> tuple[list[str], list[str]]:
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return sorted(os.listdir("/sys/class/net")), [line for line in mounts if "nsfs" in line or "testbed" in line]


@pytest.fixture(scope="module")
def bed(needs_testbed: None) -> Iterator[Testbed]:
    """Two racks of two hosts, with one of each kind of decoy."""
    decoys = [Decoy(), Decoy("eth1", "10.9.0.0/24", same=False)]
    with running(cluster([2, 2], link="200mbit", uplink="100mbit", decoys=decoys)) as one:
        yield one
