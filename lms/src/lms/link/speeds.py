"""What the makers' numbers mean in bytes a second: generations and widths of PCI Express, versions of NVLink. Pure."""

from __future__ import annotations

# GT/s a lane and direction; what is left of it after the line code (8b/10b, 128b/130b, and FLITs from 6.0 on).
# Source: PCI-SIG, PCI Express Base Specification 6.0, sections 4.2.2 (encodings) and 8 (rates).
_PCIE = {
    1: (2.5, 8 / 10),
    2: (5.0, 8 / 10),
    3: (8.0, 128 / 130),
    4: (16.0, 128 / 130),
    5: (32.0, 128 / 130),
    6: (64.0, 242 / 256),
}

# NVML's numbers for versions of NVLink (nvml.h, NVML_NVLINK_VERSION_*), which are not the versions themselves.
NVLINK_VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}

# GB/s a link and direction, for drivers that do not tell: NVIDIA's white papers on P100 (WP-08019), V100 (WP-08608),
# A100 and H100 ("NVLink": 20, 25, 25 and 25 GB/s), and the data sheet of Blackwell (1.8 TB/s over 18 links, both ways).
_NVLINK = {"1.0": 20.0, "2.0": 25.0, "2.2": 25.0, "3.0": 25.0, "3.1": 25.0, "4.0": 25.0, "5.0": 50.0}


def pcie_rate(generation: int, width: int) -> float | None:
    """Bytes a second in each direction, before the packets' headers; None for a generation that we do not know."""
    if generation not in _PCIE:
        return None
    transfers, code = _PCIE[generation]
    return transfers * 1e9 / 8 * code * width


def nvlink_rate(version: str) -> float | None:
    """Bytes a second of one link in each direction; None for a version that we do not know."""
    rate = _NVLINK.get(version)
    return None if rate is None else rate * 1e9
