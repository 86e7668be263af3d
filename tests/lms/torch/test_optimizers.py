"""Whose steps count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from lms.torch.optimizers import Optimizers


class Wrapped(Optimizer):
    """What Accelerate puts around an optimizer: an Optimizer by its class, without the hooks of one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: object = None) -> None:
        self.optimizer.step()


def plain() -> Optimizer:
    return torch.optim.SGD([torch.zeros(1)], 0.1)


@pytest.fixture
def told() -> list[Optimizer]:
    return []


def test_of_optimizers_that_are_known_each_step_is_told_and_those_of_the_first_count(told: list[Optimizer]) -> None:
    one, two, other = plain(), plain(), plain()
    known = Optimizers([one, two])
    known.listen(told.append)
    for optimizer in (two, one, other, two):
        optimizer.step()
    assert told == [two, one, two]
    assert [known.counts(optimizer) for optimizer in told] == [True, False, True]
    known.leave()
    two.step()
    assert len(told) == 3


@pytest.mark.parametrize("known", [True, False])
def test_a_step_that_calls_its_bases_step_is_told_once(told: list[Optimizer], known: bool) -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    plain()  # PyTorch wraps the step of each class whose optimizer is made
    own = Own([torch.zeros(1)], 0.1)
    optimizers = Optimizers([own] if known else [])
    optimizers.listen(told.append)
    for _ in range(3):
        own.step()
    optimizers.leave()
    assert told == [own] * 3


def test_after_an_optimizer_that_is_gone_or_rests_the_next_one_counts() -> None:
    one, two = plain(), plain()
    known = Optimizers([])
    assert known.counts(one)
    assert [known.counts(two) for _ in range(64)] == [False] * 64
    assert known.counts(two), "the first has done its work"
    assert not known.counts(one)
    del two
    assert known.counts(one)
    many = [plain() for _ in range(200)]  # one for each parameter
    assert sum(known.counts(optimizer) for _ in range(3) for optimizer in (one, *many)) == 3


def test_while_none_is_known_any_may_step_and_one_that_is_added_takes_over(told: list[Optimizer]) -> None:
    one, two = plain(), plain()
    known = Optimizers([])
    known.listen(told.append)
    one.step()
    assert known.counts(one)
    known.add([two, two])
    one.step()
    two.step()
    assert told == [one, two]
    assert known.counts(two)
    known.leave()
    known.add([one])
    one.step()
    assert told == [one, two], "nobody listens"


def test_the_optimizer_inside_wrappers_is_the_one_that_is_told(told: list[Optimizer]) -> None:
    inner = plain()
    known = Optimizers([Wrapped(Wrapped(inner)), inner])
    known.listen(told.append)
    Wrapped(inner).step()
    assert told == [inner]
    known.leave()
