"""The losses of scikit-learn's linear models, as functions of the scores z = X w + b, in float64.

`terms` takes one block of rows: scores (r, K), labels (r,), sample weights (r,). It returns the weighted loss, its
derivative and its curvature by the score. K is 1 for two classes and for regression, else the number of classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logsumexp

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Terms:
    """The loss of a block at its scores.

    `slope` is (r, K). The second derivative by the scores of row i is diag(curvature[i]), and for the softmax
    diag(curvature[i]) - curvature[i] probabilities[i]^T.
    """

    value: float
    slope: Floats
    curvature: Floats
    probabilities: Floats | None = None

    def multiply(self, scores: Floats) -> Floats:
        """The second derivative times `scores` (r, K), row by row."""
        if self.probabilities is not None:
            scores = scores - np.einsum("ik,ik->i", self.probabilities, scores)[:, None]
        return self.curvature * scores

    def total(self) -> Floats:
        """The second derivative, added over the rows: (K, K)."""
        found: Floats = np.diag(self.curvature.sum(axis=0))
        return found if self.probabilities is None else found - self.curvature.T @ self.probabilities

    def largest(self) -> Floats:
        """For each row of the softmax a bound of the second derivative's largest eigenvalue: (r,)."""
        assert self.probabilities is not None
        trace = 1 - np.einsum("ik,ik->i", self.probabilities, self.probabilities)
        found: Floats = self.curvature.sum(axis=1) * np.minimum(trace, 0.5)  # 1/2: Boehning (1992), section 2
        return found


@dataclass(frozen=True)
class _OfClasses:
    """A loss whose labels are classes."""

    C: float
    classes: NDArray[np.generic]
    class_weight: Floats

    @property
    def outputs(self) -> int:
        """One score for two classes, else one a class."""
        return 1 if len(self.classes) == 2 else len(self.classes)


class Logistic(_OfClasses):
    """C w_i log(1 + exp(-y_i z_i)) for two classes: the second has y = 1, the first y = -1."""

    def terms(self, scores: Floats, labels: Floats, weights: Floats) -> Terms:
        """Value and derivatives of a block."""
        codes = np.searchsorted(self.classes, labels)
        cost = (self.C * weights * self.class_weight[codes])[:, None]
        sign = (2.0 * codes - 1)[:, None]
        margin = sign * scores
        wrong = expit(-margin)
        return Terms(float(np.sum(cost * np.logaddexp(0, -margin))), -sign * cost * wrong, cost * wrong * expit(margin))


class Softmax(_OfClasses):
    """-C w_i log p_i[y_i] with p = softmax(z), for three classes and more."""

    def terms(self, scores: Floats, labels: Floats, weights: Floats) -> Terms:
        """Value and derivatives of a block."""
        codes, rows = np.searchsorted(self.classes, labels), np.arange(len(labels))
        cost = self.C * weights * self.class_weight[codes]
        log = scores - logsumexp(scores, axis=1, keepdims=True)
        probabilities = np.exp(log)
        curvature = cost[:, None] * probabilities
        slope = curvature.copy()
        slope[rows, codes] -= cost
        return Terms(-float(cost @ log[rows, codes]), slope, curvature, probabilities)


class SquaredHinge(_OfClasses):
    """C w_i max(0, 1 - y_i z_i)^2, for two classes or one class against the rest.

    As liblinear has it: against the rest, a class's weight holds for its own rows alone.
    """

    def terms(self, scores: Floats, labels: Floats, weights: Floats) -> Terms:
        """Value and derivatives of a block."""
        codes = np.searchsorted(self.classes, labels)
        cost = np.repeat((self.C * weights)[:, None], self.outputs, axis=1)
        if self.outputs == 1:
            own, cost = codes[:, None] == 1, cost * self.class_weight[codes][:, None]
        else:
            own = codes[:, None] == np.arange(self.outputs)
            cost = np.where(own, cost * self.class_weight, cost)
        sign = np.where(own, 1.0, -1.0)
        short = np.maximum(0, 1 - sign * scores)
        return Terms(float(np.sum(cost * short**2)), -2 * sign * cost * short, 2 * cost * (short > 0))


@dataclass(frozen=True)
class Squared:
    """w_i (z_i - y_i)^2, for each of `outputs` targets."""

    outputs: int = 1

    def terms(self, scores: Floats, labels: Floats, weights: Floats) -> Terms:
        """Value and derivatives of a block. `labels` are (r,) or (r, K)."""
        cost = np.repeat(weights[:, None], self.outputs, axis=1)
        error = scores - labels.reshape(scores.shape)
        return Terms(float(np.sum(cost * error**2)), 2 * cost * error, 2 * cost)


Loss = Logistic | Softmax | SquaredHinge | Squared
