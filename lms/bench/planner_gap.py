"""How far plans are from a lower bound on every plan: `python lms/bench/planner_gap.py`. docs/benchmarks.md says how.

Nothing is timed: the figures depend on the planner, the solver and the seed alone.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from lms.core.bound import least_seconds
from lms.core.plan import floor, make_plan, plain_peak
from lms.core.trace import Access, AccessKind, Tensor
from lms.link import Link
from lms.trace import Trace

GOLDEN = Path(__file__).resolve().parents[2] / "tests/lms/core/golden"
MODELS = ("resnet", "gpt", "unet")
# Of the saved bytes as budget; of the way from the floor to the plain peak as limit.
SHARES = (0.0, 0.1, 0.25, 0.5, 0.75)
SPEEDS = (0.5, 1.0, 2.0, 4.0)  # how often the link carries the saved bytes out in the time of the forward
EFFORT = 20.0  # seconds for the solver


@dataclass(frozen=True)
class Case:
    """One pass, a link, and what is asked of the planner."""

    kind: str  # "cut-out" or "random"
    trace: Trace
    link: Link
    limit: int | None
    budget: int | None


@dataclass(frozen=True)
class Found:
    """By which share of the bound the plan is above it; whether the solver came to its end."""

    case: Case
    gap: float
    solved: bool


def random_pass(rng: random.Random) -> Trace:
    """4 to 10 tensors of 1 to 64 MB; some are saved by a second operation; the backward takes twice the forward."""
    count = rng.randint(4, 10)
    sizes = {
        "equal": [16 * 10**6] * count,
        "falling": [int(64e6 * 0.7**at) for at in range(count)],
        "hourglass": [int(64e6 * 0.5 ** min(at, count - 1 - at)) for at in range(count)],
        "mixed": [int(1e6 * 2 ** rng.uniform(0, 6)) for _ in range(count)],
    }[rng.choice(["equal", "falling", "hourglass", "mixed", "mixed"])]
    touches: list[tuple[AccessKind, int, float]] = []
    graph: list[tuple[int, float]] = []
    for index in range(count):
        seconds = rng.uniform(1e-3, 2e-2)
        touches.append(("write", index, seconds))
        graph.append((index, 2 * seconds))
        if index and rng.random() < 0.25:
            again, seconds = rng.randrange(index), rng.uniform(1e-3, 1e-2)
            touches.append(("hold", again, seconds))
            graph.append((again, 2 * seconds))
    before = 0.0
    for index, seconds in reversed(graph):
        touches.append(("read", index, before))
        before = seconds
    others = [300 * 10**6 + rng.choice([0, 0, rng.randint(0, 20 * 10**6)]) for _ in range(len(touches) + 1)]
    freed = [0] * count
    for at, (kind, index, _) in enumerate(touches):
        freed[index] = at + 1
        others[at] += sizes[index] if kind == "write" else 0  # an operation makes its result before it is saved
    accesses = (Access(*touch, other) for touch, other in zip(touches, others, strict=False))
    tensors = tuple(Tensor(nbytes, end) for nbytes, end in zip(sizes, freed, strict=True))
    return Trace(tensors, tuple(accesses), tail=before, tail_other=others[-1])


def cut_out(trace: Trace, rng: random.Random) -> Trace:
    """5 to 14 neighbouring tensors of a recorded pass; the computation between their accesses stays."""
    count = rng.randint(5, min(14, len(trace.tensors)))
    first = rng.randrange(len(trace.tensors) - count + 1)
    accesses: list[Access] = []
    new = [0]  # the new number of each old access
    seconds, other = 0.0, 0
    for access in trace.accesses:
        seconds, other = seconds + access.seconds, max(other, access.other)
        if first <= access.tensor < first + count:
            accesses.append(replace(access, tensor=access.tensor - first, seconds=seconds, other=other))
            seconds, other = 0.0, 0
        new.append(len(accesses))
    tensors = tuple(
        replace(one, freed=new[one.freed or 0], let_go=None if one.let_go is None else new[one.let_go])
        for one in trace.tensors[first : first + count]
    )
    tail, tail_other = seconds + trace.tail, max(other, trace.tail_other)
    return replace(trace, tensors=tensors, accesses=tuple(accesses), tail=tail, tail_other=tail_other)


def cases(seed: int, count: int) -> Iterator[Case]:
    """`count` cases, cut-outs and random passes in turn, under limits and under budgets."""
    rng = random.Random(seed)
    recorded = [Trace.load(GOLDEN / f"{name}.json") for name in MODELS]
    for number in range(count):
        kind = "random" if number % 2 else "cut-out"
        trace = random_pass(rng) if number % 2 else cut_out(rng.choice(recorded), rng)
        trace.check()
        forward = sum(access.seconds for access in trace.accesses if access.kind != "read")
        rate = rng.choice(SPEEDS) * trace.saved / forward
        latency = rng.choice([0.0, 0.02]) * trace.saved / len(trace.tensors) / rate  # of an average copy's time
        link = Link("assumed", rate, rate * rng.choice([0.5, 1.0]), latency)
        share = rng.choice(SHARES)
        least, most = floor(trace)[0], plain_peak(trace)
        limit = int(least + share * (most - least)) if number // 2 % 2 else None
        yield Case(kind, trace, link, limit, int(share * trace.saved) if limit is None else None)


def measure(seed: int, count: int) -> list[Found]:
    """The gap of each case in which something has to move. Raises ArithmeticError if a plan is below its bound."""
    found = []
    for case in cases(seed, count):
        plan = make_plan(case.trace, case.link, limit=case.limit, budget=case.budget)
        if not plan.moves:
            continue
        bound = least_seconds(case.trace, case.link, limit=case.limit, budget=case.budget, effort=EFFORT)
        if plan.forecast.seconds < bound.seconds * (1 - 1e-9):
            raise ArithmeticError(
                f"a plan of {plan.forecast.seconds} s is below the bound of {bound.seconds} s: {case}"
            )
        found.append(Found(case, bound.gap(plan.forecast.seconds), bound.solved))
    return found


def table(found: Sequence[Found]) -> str:
    """The figures as Markdown."""
    lines = ["| passes | under | cases | median | 90% within | worst | above 15% |", "|---|---|---|---|---|---|---|"]
    for kind in ("cut-out", "random"):
        for under in ("limit", "budget"):
            gaps = sorted(one.gap for one in found if one.case.kind == kind and getattr(one.case, under) is not None)
            if gaps:
                median, most, worst = (gaps[int(share * (len(gaps) - 1))] for share in (0.5, 0.9, 1.0))
                above = sum(gap > 0.15 for gap in gaps)
                lines.append(f"| {kind} | {under} | {len(gaps)} | {median:.1%} | {most:.1%} | {worst:.1%} | {above} |")
    unsolved = sum(not one.solved for one in found)
    return "\n".join([*lines, "", f"The solver was stopped in {unsolved} of {len(found)} cases."])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=24)
    parser.add_argument("--cases", type=int, default=400)
    args = parser.parse_args(argv)
    print(table(measure(args.seed, args.cases)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
