"""Links between two tiers: how fast bytes go out and come back. Plain data; `lms.memory.meter` measures them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from lms import documents
from lms.documents import Rate
from lms.errors import UsageError


@dataclass(frozen=True)
class Link:
    """Bandwidth (bytes a second) of each direction, and latency (seconds); `source` says how they are known."""

    name: str
    out: Rate  # bytes a second from the device to the tier below
    back: Rate  # bytes a second from the tier below to the device
    latency: float = 1e-4  # seconds a copy takes beyond its bytes
    source: str = ""

    def seconds_out(self, nbytes: int) -> float:
        """Time one copy of `nbytes` keeps the way out busy."""
        return self.latency + nbytes / self.out

    def seconds_back(self, nbytes: int) -> float:
        """Time one copy of `nbytes` keeps the way back busy."""
        return self.latency + nbytes / self.back

    def scaled(self, factor: float) -> Link:
        """The same link at `factor` times the bandwidth."""
        return replace(self, out=self.out * factor, back=self.back * factor)

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, object]) -> Link:
        """The link that `to_dict` wrote. Raises UsageError, which is a ValueError, for anything else."""
        try:
            return documents.read(cls, document, "link")
        except ValueError as error:
            raise UsageError(f"no link: {error}; record the trace again") from None


def _known(name: str, gigabytes: float, source: str) -> Link:
    return Link(name, gigabytes * 1e9, gigabytes * 1e9, 1e-5, source)


# Theoretical rates a direction. The machine's own figure (`lms run` measures it) is always the better one.
KNOWN: Mapping[str, Link] = {
    link.name: link
    for link in (
        _known("pcie3x16", 15.75, "PCI Express 3.0: 8 GT/s x 16 lanes, 128b/130b"),
        _known("pcie4x16", 31.5, "PCI Express 4.0: 16 GT/s x 16 lanes, 128b/130b"),
        _known("pcie5x16", 63.0, "PCI Express 5.0: 32 GT/s x 16 lanes, 128b/130b"),
        _known("nvlink2x3", 75.0, "NVLink 2.0: 25 GB/s a brick and direction, 3 bricks POWER9 to V100 (AC922)"),
        _known("nvlink-c2c", 450.0, "NVLink-C2C: 900 GB/s in both directions together (GH200)"),
        _known("nvme-pcie4", 7.0, "PCI Express 4.0 x 4 less protocol: what its fastest drives state"),
    )
}


def parse_link(text: str) -> Link:
    """The link that `text` names: a key of KNOWN, or `OUT/BACK` in GB a second, such as `6/2.1`.

    Raises UsageError that lists what is known.
    """
    if text in KNOWN:
        return KNOWN[text]
    try:
        out, _, back = text.partition("/")
        rates = float(out) * 1e9, float(back or out) * 1e9
    except ValueError:
        rates = 0.0, 0.0
    least, most = documents.RATES
    if not all(least <= rate <= most for rate in rates):
        raise UsageError(
            f"--link {text!r}: expected one of {', '.join(KNOWN)}, or GB a second as OUT/BACK, such as '6/2.1'"
        )
    return Link(text, *rates, source="given on the command line")
