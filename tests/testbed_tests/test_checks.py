"""What counts as a decoy that leads nowhere, on a bed whose connections are chosen."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from checks import check
from testbed import Decoy, TestbedError, cluster


class Bed:
    """Two hosts with a second card; says of each connection what it is told to."""

    name = "fake"

    def __init__(self, honest: str, decoy: str, listener: str = "print('ready', flush=True); input()") -> None:
        self.topology = cluster([2], decoys=[Decoy("eth1", "10.9.0.0/24", same=False)])
        self.said = {"eth0": honest, "eth1": decoy}
        self.listener = listener
        self.tried: list[tuple[str, str, str]] = []

    def state(self) -> dict[str, str]:
        return {}

    def popen(self, host: str, argv: Sequence[str]) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        words = [sys.executable, "-ES", "-c", self.listener]
        return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def run(self, host: str, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        address, interface, _ = argv[-3:]
        self.tried.append((host, address, interface))
        said = self.said[interface]
        broken = said.startswith("OSError")
        return subprocess.CompletedProcess(argv, int(broken), "" if broken else f"{said}\n", said if broken else "")


@pytest.mark.parametrize(
    ("honest", "decoy", "passed"),
    [
        ("connected", "no answer", True),
        ("connected", "refused", True),
        ("connected", "connected", False),
        ("refused", "refused", False),  # nobody listens: no wonder
        ("no answer", "no answer", False),
        ("connected", "OSError: [Errno 19] No such device", False),
    ],
)
def test_a_decoy_leads_nowhere_only_where_an_honest_interface_leads_there(
    honest: str, decoy: str, passed: bool
) -> None:
    bed = Bed(honest, decoy)
    found = list(check(bed))  # type: ignore[arg-type]
    assert [one.passed for one in found] == [passed, passed]
    assert str(found[0]).endswith(
        f"{decoy}, and over eth0 {honest}, expected refused or no answer, and over eth0 connected"
    )
    assert bed.tried[:2] == [("h0", "10.77.0.2", "eth0"), ("h0", "10.9.0.2", "eth1")]


def test_a_listener_that_does_not_listen_is_an_error() -> None:
    with pytest.raises(TestbedError, match="decoys, who listens on h1: OSError: taken"):
        list(check(Bed("connected", "refused", "raise OSError('taken')")))  # type: ignore[arg-type]
