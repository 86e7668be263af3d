"""The solvers against Caffe's formulas in NumPy, across changes of the learning rate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bascule_caffe.optimizers import SOLVERS, CaffeOptimizer

Array = NDArray[np.float64]
STEPS = 12
RATES = [0.1 if step < 4 else 0.01 if step < 8 else 0.3 for step in range(STEPS)]


class Formula:
    """One parameter's update, in float64, written from Caffe's definitions."""

    def __init__(self, kind: str, momentum: float, momentum2: float, delta: float, rms_decay: float) -> None:
        self.kind, self.m, self.m2, self.delta, self.rms = kind, momentum, momentum2, delta, rms_decay
        self.a: Array | float = 0.0
        self.b: Array | float = 0.0
        self.t = 0

    def update(self, g: Array, rate: float) -> Any:
        self.t += 1
        before = self.a
        if self.kind in ("SGD", "Nesterov"):
            self.a = self.m * self.a + rate * g
            return self.a if self.kind == "SGD" else (1 + self.m) * self.a - self.m * before
        if self.kind == "AdaGrad":
            self.a = self.a + g**2
            return rate * g / (np.sqrt(self.a) + self.delta)
        if self.kind == "RMSProp":
            self.a = self.rms * self.a + (1 - self.rms) * g**2
            return rate * g / (np.sqrt(self.a) + self.delta)
        if self.kind == "AdaDelta":
            self.a = self.m * self.a + (1 - self.m) * g**2
            step = g * np.sqrt((self.b + self.delta) / (self.a + self.delta))
            self.b = self.m * self.b + (1 - self.m) * step**2
            return rate * step
        self.a = self.m * self.a + (1 - self.m) * g
        self.b = self.m2 * self.b + (1 - self.m2) * g**2
        corrected = rate * np.sqrt(1 - self.m2**self.t) / (1 - self.m**self.t)
        return corrected * self.a / (np.sqrt(self.b) + self.delta)


FIELDS: dict[str, dict[str, float]] = {
    "SGD": {"momentum": 0.9},
    "Nesterov": {"momentum": 0.9},
    "AdaGrad": {"delta": 1e-8},
    "RMSProp": {"rms_decay": 0.95, "delta": 1e-6},
    "AdaDelta": {"momentum": 0.95, "delta": 1e-6},
    "Adam": {"momentum": 0.9, "momentum2": 0.999, "delta": 1e-3},
}


@pytest.mark.parametrize("kind", list(SOLVERS))
@pytest.mark.parametrize("regularization", ["L1", "L2"])
def test_a_solver_follows_its_formula_across_changes_of_the_rate(kind: str, regularization: str) -> None:
    generator = np.random.default_rng(0)
    defaults = {"momentum": 0.0, "momentum2": 0.999, "delta": 1e-8, "rms_decay": 0.99}
    starts = [generator.normal(size=(3, 4)), generator.normal(size=5)]
    mults = [(1.0, 1.0), (2.0, 0.0)]  # of a weight and a bias
    parameters = [torch.nn.Parameter(torch.tensor(start)) for start in starts]
    groups = [
        {"params": [p], "lr_mult": lr, "decay_mult": decay} for p, (lr, decay) in zip(parameters, mults, strict=True)
    ]
    optimizer: CaffeOptimizer = SOLVERS[kind](
        groups, weight_decay=0.02, regularization_type=regularization, clip_gradients=3.0, iter_size=2, **FIELDS[kind]
    )
    formulas = [Formula(kind, **defaults | FIELDS[kind]) for _ in starts]
    expected = [start.copy() for start in starts]
    clipped = 0
    for rate in RATES:
        gradients = [generator.normal(size=start.shape) for start in starts]
        for group, parameter, gradient in zip(optimizer.param_groups, parameters, gradients, strict=True):
            group["lr"] = rate
            parameter.grad = torch.tensor(gradient)
        optimizer.step()
        norm = np.sqrt(sum((g**2).sum() for g in gradients))
        clipped += norm > 3
        for i, (lr, decay) in enumerate(mults):
            g = gradients[i] * min(1, 3 / norm) / 2  # clipped first, then divided by iter_size
            weight = expected[i]
            g = g + 0.02 * decay * (weight if regularization == "L2" else np.sign(weight))
            expected[i] = weight - formulas[i].update(g, rate * lr)
    assert 0 < clipped < STEPS
    for parameter, right in zip(parameters, expected, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), right, rtol=1e-6, atol=1e-9)


def test_a_parameter_without_a_gradient_stays_and_has_a_history_of_zeros() -> None:
    used, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = SOLVERS["Adam"]([used, unused], lr=0.1, weight_decay=0.5)
    used.grad = torch.ones(2)
    optimizer.step()
    assert unused.tolist() == [1, 1]
    assert [bool(history.any()) for history in optimizer.histories()] == [True, False, True, False]


def test_another_regularisation_is_refused() -> None:
    with pytest.raises(ValueError, match="'L3': L1 and L2 are allowed"):
        SOLVERS["SGD"]([torch.nn.Parameter(torch.ones(1))], regularization_type="L3")
