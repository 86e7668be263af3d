"""Meters: the link as the copies over it saw it."""

from __future__ import annotations

from lms.link import Link

_LATENCY = 1e-4  # seconds; what Link assumes where the copies so far do not tell


class Meter:
    """Bandwidth and latency of one direction, from the copies that it was told of."""

    def __init__(self) -> None:
        self.copies = 0
        self.nbytes = 0
        self.seconds = 0.0
        self.stalled = 0.0  # seconds that the computation waited for these copies
        self._least = float("inf")
        self._squares = self._products = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        """Count one copy that kept the way busy for `seconds`."""
        self.copies += 1
        self.nbytes += nbytes
        self.seconds += seconds
        self._least = min(self._least, seconds)
        self._squares += float(nbytes) * nbytes
        self._products += nbytes * seconds

    def latency(self) -> float:
        """Seconds a copy takes beyond its bytes: a straight line through (bytes, seconds), held to what was seen."""
        if not self.copies:
            return _LATENCY
        mean = self.nbytes / self.copies
        spread = self._squares / self.copies - mean * mean
        if spread <= (0.1 * mean) ** 2:  # copies of one size say nothing about a second unknown
            return min(_LATENCY, self._least / 2)
        slope = (self._products / self.copies - mean * self.seconds / self.copies) / spread
        return min(max(self.seconds / self.copies - slope * mean, 0.0), self._least)

    def bandwidth(self, latency: float) -> float:
        """Bytes a second of the copies so far, when each took `latency` seconds beyond its bytes."""
        return self.nbytes / max(self.seconds - latency * self.copies, 1e-9)


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
