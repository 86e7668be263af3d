"""How far the modules chosen for recomputation are from the best set of modules: `python lms/bench/choice_gap.py`.

Nothing is timed: the figures depend on the planner, the choice and the seed alone.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from statistics import median

from planner_gap import Case, cases

from lms.core.plan import make_plan
from lms.core.recompute import Call, Candidate, choose, recompute
from lms.core.trace import Trace
from lms.errors import LimitError

MOST = 7  # candidates: all of their sets are planned


def candidates(trace: Trace, rng: random.Random) -> list[Candidate]:
    """The forward in parts of 1 to 3 accesses, and some pairs of parts as modules around them."""
    forward = next(at for at, access in enumerate(trace.accesses) if access.kind == "read")
    parts: list[tuple[int, int]] = []
    first = rng.randint(0, 1)
    while first < forward:
        parts.append((first, min(first + rng.randint(1, 3), forward)))
        first = parts[-1][1]
    found: list[Candidate] = []
    while parts and len(found) < MOST:
        inner = parts[:1] if rng.random() < 0.7 or len(parts) < 2 or MOST - len(found) < 3 else parts[:2]
        del parts[: len(inner)]
        around = frozenset[int]()
        if len(inner) == 2:
            around = frozenset({len(found)})
            found.append(_candidate(trace, inner[0][0], inner[1][1], len(found), frozenset()))
        found += [_candidate(trace, *part, len(found) + at, around) for at, part in enumerate(inner)]
    return found


def _candidate(trace: Trace, first: int, last: int, number: int, within: frozenset[int]) -> Candidate:
    """Its input is what the access before it saved."""
    seconds = sum(access.seconds for access in trace.accesses[first:last])
    inputs = (trace.accesses[first - 1].tensor,) if first else ()
    return Candidate(str(number), (Call(first, last, seconds, inputs, () if first else (10**6,)),), within)


def best(case: Case, found: Sequence[Candidate]) -> float:
    """Seconds of the fastest step of all sets of candidates, none within another, that fit as `choose` asks."""
    swapping = make_plan(case.trace, case.link, limit=case.limit, budget=case.budget)
    most = max(case.limit if case.limit is not None else (case.budget or 0) + case.trace.largest, swapping.bounded_peak)
    least = swapping.forecast.seconds
    for count in range(1, len(found) + 1):
        for chosen in combinations(range(len(found)), count):
            if any(found[index].within & set(chosen) for index in chosen):
                continue
            calls = [call for index in chosen for call in found[index].calls]
            with suppress(LimitError):
                plan = make_plan(recompute(case.trace, calls), case.link, limit=case.limit, budget=case.budget)
                if plan.bounded_peak <= most:
                    least = min(least, plan.forecast.seconds)
    return least


def measure(seed: int, count: int) -> list[float]:
    """By how much the chosen step is above the best one, for each of `count` cases in which something has to move."""
    gaps: list[float] = []
    for case in cases(seed, count):
        found = candidates(case.trace, random.Random(len(gaps)))
        choice = choose(case.trace, case.link, found, limit=case.limit, budget=case.budget)
        if make_plan(case.trace, case.link, limit=case.limit, budget=case.budget).moves:
            gaps.append(choice.seconds / best(case, found) - 1)
    return gaps


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=24)
    parser.add_argument("--cases", type=int, default=200)
    args = parser.parse_args(argv)
    gaps = sorted(measure(args.seed, args.cases))
    above = sum(gap > 0.15 for gap in gaps)
    print(
        f"{len(gaps)} cases: median {median(gaps):.1%}, 90% within {gaps[int(0.9 * (len(gaps) - 1))]:.1%}, "
        f"worst {gaps[-1]:.1%}; {above} above 15%"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
