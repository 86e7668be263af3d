"""The learning-rate policies against Caffe's definitions."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bascule_caffe.schedule import POLICIES, Schedule


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"policy": "fixed"}, lambda i: 0.5),
        ({"policy": "step", "gamma": 0.1, "stepsize": 4}, lambda i: 0.5 * 0.1 ** (i // 4)),
        ({"policy": "exp", "gamma": 0.9}, lambda i: 0.5 * 0.9**i),
        ({"policy": "inv", "gamma": 0.1, "power": 0.75}, lambda i: 0.5 * (1 + 0.1 * i) ** -0.75),
        (
            {"policy": "multistep", "gamma": 0.1, "stepvalue": (3, 5, 9)},
            lambda i: 0.5 * 0.1 ** sum(i >= step for step in (3, 5, 9)),
        ),
        ({"policy": "poly", "power": 2.0, "max_iter": 12}, lambda i: 0.5 * (1 - i / 12) ** 2),
        ({"policy": "sigmoid", "gamma": -0.7, "stepsize": 6}, lambda i: 0.5 / (1 + math.exp(0.7 * (i - 6)))),
    ],
    ids=POLICIES,
)
def test_a_policy_gives_its_rate(fields: dict[str, Any], expected: Any) -> None:
    schedule = Schedule(base_lr=0.5, **fields)
    for iteration in range(12):
        assert schedule.rate(iteration) == pytest.approx(expected(iteration), rel=1e-12)


def test_multistep_advances_once_a_call_and_goes_on_where_a_solverstate_was() -> None:
    schedule = Schedule(policy="multistep", base_lr=1.0, gamma=0.1, stepvalue=(2, 2, 4))
    assert [schedule.rate(i) for i in (0, 2, 2, 3)] == pytest.approx([1, 0.1, 0.01, 0.01])
    resumed = Schedule(policy="multistep", base_lr=1.0, gamma=0.1, stepvalue=(2, 2, 4), current_step=2)
    assert resumed.rate(3) == pytest.approx(0.01)


def test_a_rate_that_is_no_number_is_an_error() -> None:
    for fields, last in (({"policy": "exp", "gamma": 1e38}, 1), ({"policy": "inv", "gamma": -1.0, "power": 0.5}, 0)):
        schedule = Schedule(base_lr=1.0, **fields)
        assert schedule.rate(last) > 0
        with pytest.raises(ValueError, match=f"the learning rate of iteration {last + 1} is no number"):
            schedule.rate(last + 1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"policy": "cosine"}, "'cosine': fixed, step, exp, inv, multistep, poly, sigmoid are allowed"),
        ({"policy": "step"}, 'lr_policy "step" needs a stepsize above 0'),
        ({"policy": "poly"}, 'lr_policy "poly" needs a max_iter above 0'),
    ],
)
def test_what_no_policy_can_use_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Schedule(**fields)
