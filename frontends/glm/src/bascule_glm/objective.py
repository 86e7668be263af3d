"""The objective, its derivatives, and the certificate: how far above the optimum a solution can be at most.

The objective is P(w, b) = 1/2 sum_k penalty_k |w_k|^2 + sum_i loss_i(w x_i + b), with K outputs k. For any a_i (K
numbers each) that add up to zero if the intercept b is free, Fenchel duality (Rockafellar, Convex Analysis, section
31) gives

    D(a) = - sum_k |v_k|^2 / (2 penalty_k) - sum_i loss_i*(-a_i) <= min P,   v = sum_i a_i x_i.

With a_i = -loss_i'(z_i), P - D is sum_k |grad_w P_k|^2 / (2 penalty_k), and the a_i add up to -grad_b P. Without a
free intercept that is the gap. With one, the a_i must be shifted until they add up to zero. Let B be the second
derivative of P by b, and B s = -grad_b P. The shifted numbers a_i - loss_i''(z_i) s add up to zero. They turn grad_w
P into grad_w P + R, R being the mixed second derivative times s, and each loss adds the Bregman divergence of loss_i*
between the old point and the shifted one. For the logistic loss and the softmax this is a Kullback-Leibler
divergence, which the chi-squared divergence bounds (Gibbs and Su, 2002, theorem 5); for the squared error it is half
of that. Added up, the chi-squared divergences are s^T B s. So

    P - min P <= sum_k |grad_w P_k + R_k|^2 / (2 penalty_k) + s^T B s.

loss_i* must be finite at the shifted numbers. For the softmax it is if the entries of s differ by at most 1, for the
logistic loss if |s| <= 1. Else D(0) = 0 still holds, and the bound is P itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import scipy.sparse

from bascule_glm.files import Rows
from bascule_glm.losses import Floats, Loss, Softmax, Squared, Terms
from bascule_glm.ranks import ALONE, Ranks
from bascule_glm.rows import Matrix, MemoryRows

Intercept = Literal["none", "free", "penalised"]
_EPSILON = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Problem:
    """What is minimised. Parameters are (K, D): D is d, or d + 1 with the intercept's coefficient last.

    `penalty` is (K,). A penalised intercept is the coefficient of one more feature, the constant `scale`, as liblinear
    has it; a free one has scale 1.
    """

    loss: Loss
    penalty: Floats
    intercept: Intercept
    scale: float = 1.0
    ranks: Ranks = ALONE

    def columns(self, n_features: int) -> int:
        """D."""
        return n_features + (self.intercept != "none")

    def scores(self, x: Matrix, parameters: Floats) -> Floats:
        """(r, K) of a block (r, d)."""
        d = x.shape[1]
        scores: Floats = np.asarray(x @ np.ascontiguousarray(parameters[:, :d].T))
        return scores + self.scale * parameters[:, d] if self.intercept != "none" else scores

    def backward(self, x: Matrix, slopes: Floats) -> Floats:
        """The transpose of `scores`: (K, D) of (r, K)."""
        gradient = np.asarray(x.T @ slopes).T
        if self.intercept == "none":
            return gradient
        return np.concatenate([gradient, self.scale * slopes.sum(axis=0)[:, None]], axis=1)

    def ridge(self, n_features: int) -> Floats:
        """The penalty of each parameter, (K, D)."""
        ridge = np.repeat(self.penalty[:, None], self.columns(n_features), axis=1)
        if self.intercept == "free":
            ridge[:, -1] = 0
        return ridge


@dataclass(frozen=True)
class Evaluation:
    """The objective at one point: value, gradient (K, D), and an upper bound of its distance to the optimum."""

    value: float
    gradient: Floats
    gap: float


def evaluate(problem: Problem, rows: Rows, parameters: Floats) -> Evaluation:
    """One pass over the rows of all ranks. Raises DDL's errors."""
    outputs, d, free = problem.loss.outputs, rows.n_features, problem.intercept == "free"
    gradient = np.zeros_like(parameters)
    offset = problem.scale * np.abs(parameters[:, d]) if problem.intercept != "none" else 0.0
    total, mixed = np.zeros((outputs, outputs)), np.zeros((outputs, d))
    value = spread = moved = 0.0
    blocks, memory = 0, np.empty(0)
    for block in rows:
        # In float64: sums in float32 would be wrong by more than a small gap. Dense blocks share memory: with new
        # memory for each the first pass took half as long again, because the allocator gave it back each time.
        x = block.x
        if scipy.sparse.issparse(x):
            x = x.astype(np.float64, copy=False)
        elif x.dtype != np.float64:
            memory = memory if memory.size >= x.size else np.empty(x.size)
            x = memory[: x.size].reshape(x.shape)
            x[...] = block.x
        scores = problem.scores(x, parameters)
        terms = problem.loss.terms(scores, block.labels, block.weights)
        value += terms.value
        moved += float(np.sum(np.abs(terms.slope) * (np.abs(scores) + offset)))
        blocks += 1
        gradient += problem.backward(x, terms.slope)
        if free:
            total += terms.total()
            if terms.probabilities is None:
                mixed += np.asarray(x.T @ terms.curvature).T
            else:
                spread += float(terms.largest() @ _norms(x))
    parts = [np.array([value, spread, blocks, moved]), gradient.ravel(), total.ravel(), mixed.ravel()]
    packed = problem.ranks.add(np.concatenate(parts))
    (value, spread, count, moved), packed = packed[:4], packed[4:]
    gradient, packed = packed[: gradient.size].reshape(gradient.shape), packed[gradient.size :]
    total, mixed = packed[: total.size].reshape(total.shape), packed[total.size :].reshape(mixed.shape)
    ridge = problem.ridge(d)
    value = float(value + 0.5 * np.sum(ridge * parameters**2))
    gradient = gradient + ridge * parameters
    bounded = (problem.penalty > 0).all() and np.isfinite(value)
    bound = _gap(problem, gradient, total, mixed, float(spread)) if bounded else np.inf
    # What the sums and the scores are rounded by, so that the bound holds at the optimum itself.
    rounding = _EPSILON * (64 + float(count)) * (value + float(moved))
    return Evaluation(value, gradient, min(bound + rounding, value))


def _gap(problem: Problem, gradient: Floats, total: Floats, mixed: Floats, spread: float) -> float:
    """The bound of this module's head. If `mixed` was not summed, R is bounded by Cauchy and Schwarz.

    |R|^2 <= s^T B s times `spread`, the sum over i of |x_i|^2 times the largest second derivative of loss_i.
    """
    penalty = problem.penalty
    if problem.intercept != "free":
        return float(np.sum(gradient**2 / (2 * penalty[:, None])))
    by_w, by_b = gradient[:, :-1], gradient[:, -1]
    if not isinstance(problem.loss, Softmax):
        curvature = np.diag(total)
        if ((curvature <= 0) & (by_b != 0)).any():
            return np.inf
        shift = -np.divide(by_b, curvature, out=np.zeros_like(by_b), where=curvature > 0)
        if not isinstance(problem.loss, Squared) and np.abs(shift).max() > 1:
            return np.inf
        left = np.sum((by_w + shift[:, None] * mixed) ** 2 / (2 * penalty[:, None]))
        return float(left - shift @ by_b)
    by_b = by_b - by_b.mean()  # the mean is zero but for rounding: all scores may grow alike
    shift = -np.linalg.lstsq(total, by_b, rcond=None)[0]
    left_over = np.linalg.norm(total @ shift + by_b)
    if np.ptp(shift) > 1 or left_over > 1e-8 * np.linalg.norm(by_b) + 64 * _EPSILON * float(np.trace(total)):
        return np.inf
    added = 1.000001 * max(0.0, float(-shift @ by_b))  # a little more, for what is left over
    norm = np.linalg.norm(by_w) + np.sqrt(added * spread)
    return float(norm**2 / (2 * penalty.min()) + added)


def _norms(x: Matrix) -> Floats:
    """The square of each row's norm (r,). Of a dense block no copy is made, which no limit counts."""
    return np.ravel(_squares(x).sum(axis=1)) if scipy.sparse.issparse(x) else np.einsum("ij,ij->i", x, x)


def _squares(x: Matrix) -> Matrix:
    return x.multiply(x) if scipy.sparse.issparse(x) else x * x


class Curvature:
    """The second derivative of the objective at one point, of rows in memory on each rank.

    With `sampled` the n rows stand for more, and trace / n is added to the diagonal: it damps directions that few of
    them cover (compare Ledoit and Wolf, 2004). For the softmax the trace is an upper bound.
    """

    def __init__(self, problem: Problem, rows: MemoryRows, parameters: Floats, sampled: bool) -> None:
        self._problem, self._rows = problem, rows
        self._terms: list[Terms] = []
        for block in rows:
            scores = problem.scores(block.x, parameters.astype(block.x.dtype)).astype(np.float64)
            self._terms.append(problem.loss.terms(scores, block.labels, block.weights))
        self._ridge = problem.ridge(rows.n_features)
        if sampled:
            n_rows = problem.ranks.add(np.array([rows.n_rows]))
            self._ridge += self._without_ridge.sum(axis=1, keepdims=True) / n_rows

    @cached_property
    def diagonal(self) -> Floats:
        """(K, D); 1 instead of 0, for an empty column without a penalty."""
        found: Floats = self._without_ridge + self._ridge
        return np.where(found > 0, found, 1.0)

    @cached_property
    def _without_ridge(self) -> Floats:
        diagonal = np.zeros_like(self._ridge)
        d = self._rows.n_features
        for block, terms in zip(self._rows, self._terms, strict=True):
            bend = terms.curvature if terms.probabilities is None else terms.curvature * (1 - terms.probabilities)
            diagonal[:, :d] += np.asarray(_squares(block.x).T @ bend.astype(block.x.dtype)).T
            diagonal[:, d:] += self._problem.scale**2 * bend.sum(axis=0)[:, None]
        return self._problem.ranks.add(diagonal)

    def __matmul__(self, vector: Floats) -> Floats:
        """Times a (K, D)."""
        product = np.zeros_like(vector)
        for block, terms in zip(self._rows, self._terms, strict=True):
            narrow = vector.astype(block.x.dtype)
            change = terms.multiply(self._problem.scores(block.x, narrow).astype(np.float64))
            product += self._problem.backward(block.x, change.astype(block.x.dtype))
        return self._problem.ranks.add(product) + self._ridge * vector

    def matrices(self) -> Floats:
        """(K, D, D), if the outputs do not depend on one another. Only the lower triangle is complete."""
        outputs, columns = self._ridge.shape
        d = self._rows.n_features
        found = np.zeros((outputs, columns, columns))
        for block, terms in zip(self._rows, self._terms, strict=True):
            for k in range(outputs):
                root = np.sqrt(terms.curvature[:, k]).astype(block.x.dtype)[:, None]
                sparse = scipy.sparse.issparse(block.x)
                scaled = block.x.multiply(root).tocsr() if sparse else block.x * root
                product = scaled.T @ scaled
                found[k, :d, :d] += product.toarray() if sparse else product
                if columns > d:
                    found[k, d, :d] += self._problem.scale * np.asarray(scaled.T @ root).ravel()
                    found[k, d, d] += self._problem.scale**2 * float(terms.curvature[:, k].sum())
        found = self._problem.ranks.add(found)
        np.einsum("kii->ki", found)[...] += self._ridge  # a view of the diagonals
        return found
