"""Meters: the link as the copies over it saw it."""

from __future__ import annotations

from lms.core.link import Link

_LATENCY = 1e-4  # seconds; what Link assumes if the copies so far do not tell
_KEEP = 0.995  # of a copy's weight with each later copy: half of it after 138


class Meter:
    """Bandwidth and latency of one direction, from the copies that it was told of, the late ones most.

    The first copies of a process are not like the rest: memory is touched for the first time, a disk's cache is empty.
    """

    def __init__(self) -> None:
        self.copies = 0
        self.nbytes = 0
        self.stalled = 0.0  # seconds that the computation waited for these copies
        self._least = float("inf")
        # Sums over the copies, each with the weight that is left of it: 1, bytes, seconds, bytes squared, products.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def add(self, nbytes: int, seconds: float) -> None:
        """Count one copy that kept the way busy for `seconds`."""
        self.copies += 1
        self.nbytes += nbytes
        self._least = min(self._least, seconds)
        x, y = float(nbytes), seconds
        n, sx, sy, sxx, sxy = self._sums
        self._sums = n * _KEEP + 1, sx * _KEEP + x, sy * _KEEP + y, sxx * _KEEP + x * x, sxy * _KEEP + x * y

    def latency(self) -> float:
        """Seconds a copy takes beyond its bytes: a straight line through (bytes, seconds), held to what was seen."""
        if not self.copies:
            return _LATENCY
        n, sx, sy, sxx, sxy = self._sums
        mean = sx / n
        spread = sxx / n - mean * mean
        if spread <= (0.1 * mean) ** 2:  # copies of one size say nothing about a second unknown
            return min(_LATENCY, self._least / 2)
        slope = (sxy / n - mean * sy / n) / spread
        return min(max(sy / n - slope * mean, 0.0), self._least)

    def bandwidth(self, latency: float) -> float:
        """Bytes a second of the copies, when each took `latency` seconds beyond its bytes."""
        n, sx, sy, _, _ = self._sums
        return sx / max(sy - latency * n, 1e-9)


def measured_link(name: str, out: Meter, back: Meter) -> Link | None:
    """The link that two meters saw, or None when nothing was copied. A direction without copies takes the other's."""
    seen = [meter for meter in (out, back) if meter.nbytes]
    if not seen:
        return None
    latency = min(meter.latency() for meter in seen)
    there, home = (out if out.nbytes else back), (back if back.nbytes else out)
    return Link(
        name,
        out=there.bandwidth(latency),
        back=home.bandwidth(latency),
        latency=latency,
        source=f"measured: {out.copies} copies out, {back.copies} back",
    )
