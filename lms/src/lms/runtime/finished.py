"""The records of a complete pass: plain data for the planner to learn from."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lms.core.guide import Guide
from lms.runtime.recorder import Recorder


@dataclass
class Counters:
    """Bytes moved and seconds waited."""

    out: int = 0
    back: int = 0
    stall_out: float = 0.0
    stall_in: float = 0.0
    hook: float = 0.0  # in LMS, waiting left out

    def since(self, before: Counters) -> Counters:
        """The difference to an earlier state."""
        return Counters(*(getattr(self, one.name) - getattr(before, one.name) for one in fields(self)))

    def copy(self) -> Counters:
        """A snapshot."""
        return Counters(**self.__dict__)


@dataclass
class Finished:
    """A complete pass, for the planner to learn from."""

    recorder: Recorder
    guide: Guide | None  # the plan for just this sequence of accesses; None when none is known
    counters: Counters
    held_peak: int
    seconds: float
