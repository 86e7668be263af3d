"""The timeline of a pass, predicted or measured: computation, copies, stalls, and the bytes held. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Lane = Literal["compute", "out", "back", "stall"]


@dataclass(frozen=True, slots=True)
class Span:
    """Computation, a copy out or back, or a stall. Seconds from the pass's start."""

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
