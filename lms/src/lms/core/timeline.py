"""What took time in a pass, and what was held while it did: foreseen by the simulator, or as it ran. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Lane = Literal["compute", "out", "back", "stall"]


@dataclass(frozen=True)
class Span:
    """Something that took time: computation, a copy out or back, or a stall. Seconds from the pass's start."""

    lane: Lane
    start: float
    end: float
    nbytes: int = 0
    record: int = -1


@dataclass(frozen=True)
class Timeline:
    """One pass: its spans, and the bytes held as a staircase of (seconds, bytes from then on)."""

    spans: tuple[Span, ...]
    held: tuple[tuple[float, int], ...]
