"""A plan, and the sequence of accesses that it was made for. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from lms.plan import Plan
from lms.schedule import Move
from lms.trace import Trace

Key = tuple[str, int, int]  # kind of access, record, its bytes


class Guide:
    """Leads a pass along a plan for as long as the pass does what the recorded one did."""

    def __init__(self, keys: Sequence[Key], trace: Trace, plan: Plan) -> None:
        self.keys = list(keys)
        self.trace = trace
        self.follow(plan)
        self.margin = 0  # bytes that the plan was asked to stay under the limit
        self.passes = 0  # complete passes that followed it
        self.samples: list[list[float]] = []  # gaps of the passes that were timed
        self._prefix = _prefixes(self.keys)

    def follow(self, plan: Plan) -> None:
        """Take another plan for the same sequence."""
        self.plan = plan
        self.starts: dict[int, list[Move]] = defaultdict(list)
        for move in plan.moves:
            self.starts[move.after].append(move)
        self.returns = plan.returns(len(self.keys))
        self.on_demand = {(move.record, move.before) for move in self.returns if move.fetch >= move.before}
        self.pinned = [record.pinned for record in self.trace.records]

    def expects(self, position: int, key: Key) -> bool:
        """Whether the recorded pass did this at that position."""
        return position < len(self.keys) and self.keys[position] == key

    def began_like(self, keys: Sequence[Key]) -> bool:
        """Whether the recorded pass began with these accesses."""
        return len(keys) <= len(self.keys) and self._prefix[len(keys)] == _prefixes(keys)[-1]


def _prefixes(keys: Sequence[Key]) -> list[int]:
    """A hash of each prefix, the empty one first."""
    value = 0
    prefixes = [value]
    for key in keys:
        value = hash((value, key))
        prefixes.append(value)
    return prefixes
