"""The learning rate at an iteration: Caffe's `lr_policy`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Schedule:
    """A policy with its fields of SolverParameter.

    `current_step` is what a solverstate keeps: how often the rate of `step` and `multistep` has fallen. Raises
    ValueError for another policy, and for `step` without a stepsize.
    """

    policy: str = "fixed"
    base_lr: float = 0.01
    gamma: float = 1.0
    power: float = 1.0
    stepsize: int = 0
    stepvalue: tuple[int, ...] = ()
    max_iter: int = 0
    current_step: int = 0

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"lr_policy is {self.policy!r}: {', '.join(POLICIES)} are allowed")
        for policy, field in (("step", "stepsize"), ("poly", "max_iter")):
            if self.policy == policy and getattr(self, field) <= 0:
                raise ValueError(f'lr_policy "{policy}" needs a {field} above 0')

    def rate(self, iteration: int) -> float:
        """The rate of this iteration. `multistep` advances by one step a call at most, as Caffe's does.

        Raises ValueError if the rate is no number of float32.
        """
        try:
            rate = self._rate(iteration)
        except (ArithmeticError, ValueError):
            rate = math.nan
        if not abs(rate) < 3.4e38:
            raise ValueError(f"the learning rate of iteration {iteration} is no number: {rate:g}")
        return rate

    def _rate(self, iteration: int) -> float:
        if self.policy == "step":
            self.current_step = iteration // self.stepsize
        elif self.policy == "multistep":
            left = self.stepvalue[self.current_step :]
            self.current_step += bool(left and iteration >= left[0])
        return self.base_lr * _FACTORS[self.policy](self, iteration)


_FACTORS: dict[str, Callable[[Schedule, int], float]] = {
    "fixed": lambda policy, _: 1.0,
    "step": lambda policy, _: policy.gamma**policy.current_step,
    "exp": lambda policy, iteration: policy.gamma**iteration,
    "inv": lambda policy, iteration: math.pow(1 + policy.gamma * iteration, -policy.power),
    "multistep": lambda policy, _: policy.gamma**policy.current_step,
    "poly": lambda policy, iteration: math.pow(1 - iteration / policy.max_iter, policy.power),
    # Beyond 700, exp has no float.
    "sigmoid": lambda policy, i: 1 / (1 + math.exp(min(-policy.gamma * (i - policy.stepsize), 700.0))),
}
POLICIES = tuple(_FACTORS)
