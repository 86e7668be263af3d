"""The passes that plans are compared on, and the table of what was found."""

import random
from itertools import islice

import planner_gap
from planner_gap import MODELS, cases, cut_out, measure, table

from lms.trace import Trace


def test_a_cut_out_keeps_the_computation_and_is_a_pass() -> None:
    whole = Trace.load(planner_gap.GOLDEN / f"{MODELS[0]}.json")
    part = cut_out(whole, random.Random(1))
    part.check()
    assert len(part.tensors) < len(whole.tensors)
    assert abs(part.seconds - whole.seconds) < 1e-9
    assert part.measured


def test_the_same_seed_makes_the_same_cases() -> None:
    first, again, other = (list(islice(cases(seed, 8), 8)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert {(case.kind, case.limit is None) for case in first} == {
        ("cut-out", True), ("random", True), ("cut-out", False), ("random", False),
    }  # fmt: skip


def test_the_table_has_a_row_for_each_kind_of_pass_and_bound() -> None:
    found = measure(seed=24, count=12)
    rows = [line for line in table(found).splitlines() if "%" in line][1:]
    assert [row.split("|")[1:3] for row in rows] == [
        [f" {kind} ", f" {under} "] for kind in ("cut-out", "random") for under in ("limit", "budget")
    ]
    assert sum(int(row.split("|")[3]) for row in rows) == len(found)
