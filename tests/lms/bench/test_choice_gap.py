"""Chosen modules beside the best set of them."""

import random
from itertools import islice

from choice_gap import MOST, candidates, measure
from planner_gap import cases


def test_candidates_are_parts_of_the_forward_and_modules_around_two_of_them() -> None:
    nested = 0
    for number, case in enumerate(islice(cases(1, 40), 40)):
        found = candidates(case.trace, random.Random(number))
        assert 1 <= len(found) <= MOST
        for one in found:
            (call,) = one.calls
            assert all(access.kind != "read" for access in case.trace.accesses[call.first : call.last])
            nested += bool(one.within)
    assert nested


def test_no_choice_is_better_than_the_best_set_and_none_is_far_from_it() -> None:
    gaps = measure(seed=24, count=60)
    assert len(gaps) > 40
    assert min(gaps) > -1e-9
    assert max(gaps) < 0.15
