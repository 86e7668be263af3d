"""The solver in passes over rows: L-BFGS whose first matrix is Newton's, of a sample, or of all rows in memory.

A pass over a file costs far more than work on rows in memory. So each step asks the sample, at the current point, for
Newton's direction (by Cholesky, or by conjugate gradients if there are many columns: Byrd et al., 2011, "On the use of
stochastic Hessian information"), and L-BFGS (Nocedal and Wright, algorithm 7.4) corrects it by what the passes over all
rows have shown. Nothing depends on the order of the rows, so a file may be sorted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.linalg
from threadpoolctl import ThreadpoolController

from bascule_glm.errors import DataError
from bascule_glm.files import Rows
from bascule_glm.losses import Floats, Softmax
from bascule_glm.objective import Curvature, Evaluation, Problem, evaluate
from bascule_glm.rows import MemoryRows

CHOLESKY_COLUMNS = 2000  # up to here factoring a matrix of columns x columns is cheap beside a pass
_MANY_COLUMNS = 500  # from here on the second derivative of a block is enough work for several threads
_PAIRS = 10  # of steps and changes of the gradient that L-BFGS remembers
_HALVINGS = 20


@dataclass(frozen=True)
class Pass:
    """One pass over the rows, or one call of scikit-learn's solver.

    `gap` bounds how far `objective` is above the optimum. `seconds` counts from the start of `fit`; `nbytes` were read
    from a file in this pass.
    """

    number: int
    seconds: float
    objective: float
    gap: float
    nbytes: int


class History:
    """What a fit has done so far; prints it if `verbose`."""

    def __init__(self, tol: float, verbose: bool) -> None:
        self.tol, self.passes = tol, list[Pass]()
        self._verbose, self._start = verbose, time.monotonic()
        self._best = -np.inf  # the best lower bound of the optimum

    def say(self, line: str) -> None:
        """Print a line if `verbose`."""
        if self._verbose:
            print(line, flush=True)

    def add(self, found: Evaluation, nbytes: int) -> bool:
        """Note a pass; whether its gap is at most `tol` times the objective."""
        self._best = max(self._best, found.value - found.gap)
        gap = min(found.gap, found.value - self._best)
        gap = max(0.0, gap) if np.isfinite(gap) and 0 <= found.value < np.inf else np.inf
        seconds = time.monotonic() - self._start
        self.passes.append(Pass(len(self.passes) + 1, seconds, found.value, gap, nbytes))
        self.say(
            f"pass {len(self.passes)}: objective {found.value:.9g}, gap {gap:.2g} "
            f"({self.relative:.1g} of the objective), {seconds:.2f} s, {nbytes} bytes read"
        )
        return self.done

    @property
    def relative(self) -> float:
        """The last gap by the objective."""
        last = self.passes[-1]
        return last.gap / last.objective if 0 < last.gap < np.inf else last.gap

    @property
    def done(self) -> bool:
        """Whether the last gap is small enough."""
        return self.relative <= self.tol


def minimise(
    problem: Problem, rows: Rows, start: Floats, sample: MemoryRows, max_iter: int, history: History, cholesky: bool
) -> tuple[Floats, int]:
    """The parameters (K, D) at which the gap is small enough, or those after `max_iter` steps; and the steps.

    Raises DataError if second derivatives overflow, and DDL's errors.
    """
    controller = ThreadpoolController()
    # Most blocks are too small to be shared among threads, and another thread may be reading the next one.
    threads = None if cholesky and start.shape[1] > _MANY_COLUMNS else 1

    def look(parameters: Floats) -> Evaluation:
        with controller.limit(limits=1, user_api="blas"):
            return evaluate(problem, rows, parameters)

    point, step, nbytes = start, 0, 0 if isinstance(rows, MemoryRows) else rows.nbytes
    here = look(point)
    pairs: deque[tuple[Floats, Floats]] = deque(maxlen=_PAIRS)
    if history.add(here, nbytes) or not np.isfinite(here.value):
        return point, 0
    for step in range(1, max_iter + 1):
        if sample is rows:
            pairs.clear()  # Newton's own direction needs no correction
        exact = min(0.01, max(history.relative, 0.0) ** 0.5) if sample is rows else 0.01
        with controller.limit(limits=threads, user_api="blas"):
            newton = _newton(problem, sample, point, cholesky, exact, sampled=sample is not rows)
            direction = -_two_loops(here.gradient, pairs, newton)
        slope = float(np.vdot(direction, here.gradient))
        if not slope < 0:
            pairs.clear()
            direction = -newton(here.gradient)
            slope = float(np.vdot(direction, here.gradient))
        length = 1.0
        for _ in range(_HALVINGS):
            there = look(point + length * direction)
            done = history.add(there, nbytes)
            if done or there.value <= here.value + 1e-4 * length * slope:
                break
            # The lowest point of the parabola through both values and the slope.
            rise = there.value - here.value - length * slope
            length *= float(np.clip(-length * slope / (2 * rise) if rise > 0 else 0.5, 0.1, 0.5))
        else:  # no step lowers the objective: its rounding is reached, or the model of it is far off
            history.add(here, 0)
            return point, step
        moved, changed = length * direction, there.gradient - here.gradient
        if length < 1:
            pairs.clear()  # they describe another place
        if np.vdot(moved, changed) > 0:
            pairs.append((moved, changed))
        point, here = point + moved, there
        if done:
            break
    return point, step


def uses_cholesky(problem: Problem, n_features: int) -> tuple[bool, str]:
    """Whether Newton's direction comes from a Cholesky factor, and why."""
    columns = problem.columns(n_features)
    if isinstance(problem.loss, Softmax):
        return False, f"the {problem.loss.outputs} classes depend on one another: conjugate gradients"
    if columns > CHOLESKY_COLUMNS:
        return False, f"{columns} columns, more than {CHOLESKY_COLUMNS}: conjugate gradients"
    return True, f"{columns} columns, at most {CHOLESKY_COLUMNS}: Cholesky"


def _newton(
    problem: Problem, sample: MemoryRows, point: Floats, cholesky: bool, exact: float, *, sampled: bool
) -> Callable[[Floats], Floats]:
    """The inverse of the sample's second derivative, times a gradient."""
    curvature = Curvature(problem, sample, point, sampled)
    if not cholesky:
        return lambda gradient: _conjugate_gradients(curvature, gradient, exact)
    factors = [_factor(matrix) for matrix in curvature.matrices()]
    return lambda gradient: np.stack(
        [scipy.linalg.cho_solve(factor, row) for factor, row in zip(factors, gradient, strict=True)]
    )


def _factor(matrix: Floats) -> tuple[Floats, bool]:
    """A Cholesky factor, from the lower triangle; of a little more than the matrix if rounding made it indefinite.

    Raises DataError for a diagonal that is not finite.
    """
    diagonal = np.einsum("ii->i", matrix)  # a view
    if not np.isfinite(diagonal).all():
        column = int(np.argmin(np.isfinite(diagonal)))
        raise DataError(f"the squares of column {column} overflow: scale the columns first, or lower C and the weights")
    added = max(1e-10 * float(np.abs(diagonal).max()), np.finfo(float).tiny)
    while True:
        try:
            factor: tuple[Floats, bool] = scipy.linalg.cho_factor(matrix, lower=True)
            return factor
        except np.linalg.LinAlgError:
            diagonal += added
            added *= 10


def _conjugate_gradients(curvature: Curvature, gradient: Floats, exact: float) -> Floats:
    """The solution, until what is left is `exact` times the gradient, both scaled by the diagonal (Jacobi)."""
    solution, left = np.zeros_like(gradient), gradient.copy()
    direction = left / curvature.diagonal
    square = float(np.vdot(left, direction))
    enough = exact**2 * square
    for _ in range(100):
        if square <= enough:
            break
        product = curvature @ direction
        bend = float(np.vdot(direction, product))
        if bend <= 0:  # rounding, or a flat direction of an objective without penalty
            break
        length = square / bend
        solution += length * direction
        left -= length * product
        scaled = left / curvature.diagonal
        square, before = float(np.vdot(left, scaled)), square
        direction = scaled + square / before * direction
    return solution if solution.any() else gradient


def _two_loops(gradient: Floats, pairs: deque[tuple[Floats, Floats]], newton: Callable[[Floats], Floats]) -> Floats:
    """L-BFGS's product of the approximate inverse and the gradient."""
    left, shares = gradient.copy(), []
    for moved, changed in reversed(pairs):
        share = float(np.vdot(moved, left) / np.vdot(moved, changed))
        shares.append(share)
        left -= share * changed
    found = newton(left)
    for (moved, changed), share in zip(pairs, reversed(shares), strict=True):
        found += (share - float(np.vdot(changed, found) / np.vdot(moved, changed))) * moved
    return found
