"""A lower bound on the time of a pass: no schedule of copies that keeps to the limit is faster. Pure.

The bound is the solution of a mixed-integer linear program. Its rules are the simulator's: what each access holds, when
a copy may start, that it needs memory while it is in flight, that a tensor is written once and read back before its
access, that each direction of the link carries one tensor at a time. It covers the schedules in which tensors are away
in gaps alone (`find_gaps`), and which hold no more than the cap wherever the gaps allow that.

It is not the optimum, because these rules are relaxed. The optimum lies between the bound and any plan.

- A copy may be interrupted by another one of the same direction and go on later, and copies back come in any order.
- A tensor that is freed during a copy needs no memory any more; in the simulator it does until the copy is complete.
- Under a budget a tensor may be away while its operation still has it in hand.
- What an operation has in hand may be above the cap; the simulator waits there for copies out that have begun.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lms.core.gaps import Gap, find_gaps, held_at
from lms.core.link import Link
from lms.core.plan import caps
from lms.core.profile import Bytes
from lms.core.trace import Trace
from lms.errors import UsageError

_SAFETY = 1e-6  # of the pass: the solver's tolerances
_MOST = 250_000  # accesses in all gaps together: each takes several rows and columns
_STOPPED = 1  # SciPy's status of a program that took too long

Terms = list[tuple[float, int]]  # a sum: a factor and a column each


@dataclass(frozen=True)
class Bound:
    """No schedule takes less than `seconds`. `solved`: the program's own optimum was found; else `why` it was not."""

    seconds: float
    solved: bool
    why: str = ""

    def gap(self, seconds: float) -> float:
        """By which share of it a pass of `seconds` may be above the optimum, at most."""
        return max(0.0, seconds / self.seconds - 1) if self.seconds else 0.0


def least_seconds(
    trace: Trace, link: Link, *, limit: int | None = None, budget: int | None = None, effort: float = 60.0
) -> Bound:
    """The bound for `limit` (bytes on the device) or `budget` (bytes of tensors that may stay), as `make_plan` takes.

    If a single operation needs more than that, as much as it needs is allowed to it. The solver takes at most about
    `effort` seconds; then the bound is lower than it could be.

    Raises UsageError for a trace with tensors that live on in the next step, for a pass of too many accesses, or unless
    exactly one of limit and budget is given; ModuleNotFoundError without scipy.
    """
    if (limit is None) == (budget is None):
        raise UsageError("give exactly one of limit and budget")
    if any(tensor.freed is None and not tensor.pinned for tensor in trace.tensors):
        raise UsageError(
            "this trace has state that lives on in the next step; expected one recorded with activations alone"
        )
    gaps = find_gaps(trace)
    least_held = np.maximum(caps(trace, gaps, limit=limit, budget=budget), held_at(trace, gaps))
    needed = np.array(trace.live, np.int64) - least_held  # bytes that must be away at each access, if they can be
    if not (needed > 0).any():
        return Bound(trace.seconds, True)
    size = sum(gap.before - gap.written for gap in gaps)
    if size > _MOST:
        raise UsageError(
            f"this pass is too long for it: its tensors can be away at {size:,} accesses together; expected "
            f"{_MOST:,} at most, as in a pass of some hundred accesses"
        )
    program = _Program(trace, link, gaps, needed, held=limit is None)
    found, why = program.solve(effort)
    return Bound(max(trace.seconds, found * (1 - _SAFETY)), not why, why)


class _Program:
    """The rows and columns, with the time of the computation as the unit of time.

    Each access has the moment at which what it reads is there (`ready`), and the moment at which all that it waits for
    is over and the computation goes on (`done`). Each gap has two columns for every access with which its tensor may
    be away: `away` is 1 once the copy out is complete and the memory is free, `back` once the copy back has started.
    Each copy has a column for every access, too: the share of it that is complete when the computation goes on.
    """

    def __init__(self, trace: Trace, link: Link, gaps: Sequence[Gap], needed: Bytes, *, held: bool) -> None:
        self.trace, self.link, self.gaps = trace, link, gaps
        self.unit = trace.seconds or 1.0
        self.integers: list[int] = []
        self.tops: list[float] = []  # of the columns; each is at least 0
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.least: list[float] = []  # of the rows
        self.ready = [self._column(np.inf) for _ in trace.accesses]
        self.done = [self._column(np.inf) for _ in trace.accesses]
        for at, access in enumerate(trace.accesses):
            self._row([(1.0, self.ready[at]), *self._gone_on(at)], access.seconds / self.unit)
            self._row([(1.0, self.done[at]), (-1.0, self.ready[at])], 0.0)
        self.away: list[dict[int, int]] = []
        self.back: list[dict[int, int]] = []
        for gap in gaps:
            # A limit counts it until the framework has let go of it, too; a budget until its copy is complete.
            first, last = gap.after if held else gap.start, gap.before - 1
            self.away.append(self._rising(first, last, integer=True))
            self.back.append(self._rising(first, last, integer=True) if gap.comes_back else {})
        self._write()
        self._read()
        self._fit(needed)

    def _column(self, top: float, *, integer: bool = False) -> int:
        if integer:
            self.integers.append(len(self.tops))
        self.tops.append(top)
        return len(self.tops) - 1

    def _row(self, terms: Terms, least: float) -> None:
        """The sum of the terms is at least `least`."""
        for value, column in terms:
            self.rows.append(len(self.least))
            self.columns.append(column)
            self.values.append(value)
        self.least.append(least)

    def _rising(self, first: int, last: int, *, integer: bool = False) -> dict[int, int]:
        """A column for each access from first to last, between 0 and 1 and no less than the one before."""
        columns = {at: self._column(1.0, integer=integer) for at in range(first, last + 1)}
        for one, following in pairwise(columns.values()):
            self._row([(1.0, following), (-1.0, one)], 0.0)
        return columns

    def _gone_on(self, at: int) -> Terms:
        """Minus the moment at which the computation that leads to the access begins."""
        return [(-1.0, self.done[at - 1])] if at else []

    def _carry(self, work: Mapping[int, Terms]) -> None:
        """From one access to the next, one direction of the link does no more work than there is time."""
        for at, terms in work.items():
            self._row([(1.0, self.done[at]), *self._gone_on(at), *((-value, column) for value, column in terms)], 0.0)

    def _write(self) -> None:
        """A tensor is away only if the tier below has its bytes. They are written once, whatever gaps use them."""
        alike: dict[tuple[int, int], list[int]] = defaultdict(list)  # gaps in which the same bytes may be away
        for number, gap in enumerate(self.gaps):
            alike[gap.tensor, gap.written].append(number)
        work: dict[int, Terms] = defaultdict(list)
        for numbers in alike.values():
            first, last = self.gaps[numbers[0]], self.gaps[numbers[-1]]
            seconds = self.link.seconds_out(first.nbytes) / self.unit
            share = self._rising(first.written, last.before - 1)  # it may be written before it may leave
            for number in numbers:
                for at, column in self.away[number].items():
                    self._row([(1.0, share[at]), (-1.0, column)], 0.0)
            begin = first.written
            self._row([(1.0, self.done[begin]), (-1.0, self.ready[begin]), (-seconds, share[begin])], 0.0)
            work[begin].append((seconds, share[begin]))
            for one, following in pairwise(share):
                work[following] += [(seconds, share[following]), (-seconds, share[one])]
        self._carry(work)

    def _read(self) -> None:
        """What was away is read back before its access is ready, from the access on at which the copy started."""
        work: dict[int, Terms] = defaultdict(list)
        for gap, away, back in zip(self.gaps, self.away, self.back, strict=True):
            if not gap.comes_back:
                continue
            seconds, before, last = self.link.seconds_back(gap.nbytes) / self.unit, gap.before, gap.before - 1
            for at, column in back.items():
                self._row([(1.0, away[at]), (-1.0, column)], 0.0)
            # What starts back while the framework still has it in hand needs no copy.
            free = [(-1.0, back[gap.start - 1])] if gap.start - 1 in back else []
            share = self._rising(gap.start, last)
            self.tops[share[gap.start]] = 0.0
            for one, following in pairwise(share):
                self._row([(1.0, back[one]), *free, (-1.0, share[following])], 0.0)
                work[following] += [(seconds, share[following]), (-seconds, share[one])]
            rest = [(seconds * value, column) for value, column in ((1.0, away[last]), *free, (-1.0, share[last]))]
            work[before] += rest
            ready = [(1.0, self.ready[before]), *self._gone_on(before)]
            self._row([*ready, *((-value, column) for value, column in rest)], 0.0)
            # If it has not started by then, it starts with the access that needs it.
            late = [(-seconds, away[last]), (seconds, back[last])]
            self._row([*ready, *late], self.trace.accesses[before].seconds / self.unit)
        self._carry(work)

    def _fit(self, needed: Bytes) -> None:
        """At each access, as many bytes are away as are needed."""
        scale = float(max(gap.nbytes for gap in self.gaps)) or 1.0
        terms: list[Terms] = [[] for _ in needed]
        for gap, away, back in zip(self.gaps, self.away, self.back, strict=True):
            for at, column in away.items():
                terms[at].append((gap.nbytes / scale, column))
                if back:
                    terms[at].append((-gap.nbytes / scale, back[at]))
        for sum_of, least in zip(terms, needed.tolist(), strict=True):
            if least > 0:
                self._row(sum_of, least / scale)

    def solve(self, effort: float) -> tuple[float, str]:
        """A lower bound of the pass's seconds, and why it is not the program's optimum; "" if it is."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        width = len(self.tops)
        objective, integrality = np.zeros(width), np.zeros(width)
        objective[self.done[-1]] = 1.0
        integrality[self.integers] = 1
        matrix = csr_array((self.values, (self.rows, self.columns)), shape=(len(self.least), width))
        found = milp(
            objective,
            integrality=integrality,
            bounds=Bounds(0.0, np.array(self.tops)),
            constraints=LinearConstraint(matrix, np.array(self.least), np.inf),
            options={"time_limit": effort, "mip_rel_gap": 1e-6},
        )
        why = (
            f"the solver was stopped after {effort:g} s" if found.status == _STOPPED else f"SciPy says: {found.message}"
        )
        lowest = found.mip_dual_bound
        if lowest is None or not np.isfinite(lowest):
            return 0.0, why
        return float(lowest) * self.unit + self.trace.tail, "" if found.status == 0 else why
