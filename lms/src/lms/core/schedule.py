"""What the runtime executes and the simulator times: one list of moves and one memory cap for each access.

Both follow the same rules at access `i`, after the computation that leads to it:

1. Records that were freed are gone, once their copies in flight are complete; copies out that are complete have given
   their memory back; clean drops whose `after` lies behind take effect.
2. A save makes its record resident. A use waits for its record's copy back; one that nobody started (a miss) is
   started now, behind as many copies out as it takes to make room for it. A use of a record that is leaving keeps it.
3. Moves with `after == i` start their write.
4. While more than `cap[i]` bytes are held, the oldest copy out is waited for.
5. Copies back whose `fetch` is past start, in the order of their uses, as long as they fit under `cap[i]`. A record
   whose copy out is not complete by then simply stays.

*Held* are the bytes of records that LMS keeps a reference to, copies in flight included. What LMS let go of and the
forward pass still uses *lingers*: it is on the device, is not held, and is gone at the record's `let_go`. No rule
counts it; under a limit the plan's caps leave room for it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Move:
    """One record out of memory for one of the gaps between its accesses."""

    record: int
    after: int  # the access with which the way out starts
    before: int  # the use that it must be back for; the record's `freed` when it need not come back
    fetch: int  # the access with which the way back may start; the pass's end when it need not come back
    write: bool  # False: the tier below holds the bytes already, memory is dropped without a copy


@dataclass(frozen=True)
class Schedule:
    """Moves in the order in which they start, the cap at each access, and how many copies out may be in flight."""

    moves: tuple[Move, ...]
    cap: tuple[int, ...]
    write_ahead: int | None = None  # None: as many as fit under the cap

    def returns(self, accesses: int) -> list[Move]:
        """The moves that come back within `accesses` accesses, in the order of their uses."""
        return sorted((m for m in self.moves if m.fetch < accesses), key=lambda m: (m.fetch, m.before, m.record))
