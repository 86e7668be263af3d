"""The learning rate at an iteration: Caffe's `lr_policy`."""

from __future__ import annotations

import math
from dataclasses import dataclass

POLICIES = ("fixed", "step", "exp", "inv", "multistep", "poly", "sigmoid")


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
        """The rate of this iteration. `multistep` advances by one step a call at most, as Caffe's does."""
        if self.policy == "step":
            self.current_step = iteration // self.stepsize
        elif self.policy == "multistep":
            left = self.stepvalue[self.current_step :]
            self.current_step += bool(left and iteration >= left[0])
        if self.policy in ("step", "multistep"):
            return self.base_lr * self.gamma**self.current_step
        if self.policy == "exp":
            return self.base_lr * self.gamma**iteration
        if self.policy == "inv":
            return self.base_lr * math.pow(1 + self.gamma * iteration, -self.power)
        if self.policy == "poly":
            return self.base_lr * math.pow(1 - iteration / self.max_iter, self.power)
        if self.policy == "sigmoid":
            exponent = -self.gamma * (iteration - self.stepsize)
            return self.base_lr / (1 + math.exp(min(exponent, 700.0)))  # beyond, exp has no float
        return self.base_lr
