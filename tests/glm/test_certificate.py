"""The gap that is printed is never below the true distance to the optimum, on 500 random problems."""

import tracemalloc
import warnings

import numpy as np
import pytest
import sklearn.linear_model
import sklearn.svm
from scipy import sparse
from sklearn.exceptions import ConvergenceWarning

from bascule_glm.losses import Logistic, Loss, Softmax, Squared, SquaredHinge
from bascule_glm.objective import Evaluation, Problem, evaluate
from bascule_glm.rows import MemoryRows
from bascule_glm.solver import History, minimise, uses_cholesky

KINDS = ("logistic", "softmax", "hinge", "squared")
SEEDS = range(125)


class Case:
    """A random problem, its objective written down plainly, and scikit-learn's solution in float64."""

    def __init__(self, kind: str, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.n, self.d = int(generator.integers(8, 120)), int(generator.integers(1, 12))
        self.x = generator.normal(size=(self.n, self.d)) * 10 ** generator.uniform(-1.5, 1.5, self.d)
        self.x += generator.normal(size=self.d) * generator.integers(0, 3)
        self.C, self.intercept = float(10 ** generator.uniform(-3, 3)), bool(generator.integers(0, 2))
        self.weights = generator.uniform(0.1, 2, self.n)
        classes = 2 if kind == "logistic" else 3 if kind == "softmax" else int(generator.integers(2, 4))
        self.y = np.arange(self.n) % classes
        self.kind, self.classes, self.one = kind, np.arange(classes), np.ones(classes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            self.reference = self._fit()
        found = np.atleast_2d(self.reference.coef_)
        if self.intercept:
            found = np.concatenate([found, np.reshape(self.reference.intercept_, (-1, 1))], axis=1)
        self.solution = found
        self.generator = generator

    def _fit(self) -> object:
        if self.kind == "hinge":
            solver = sklearn.svm.LinearSVC(
                C=self.C, tol=1e-12, dual=False, fit_intercept=self.intercept, max_iter=10000
            )
        elif self.kind == "squared":
            solver = sklearn.linear_model.Ridge(1 / self.C, fit_intercept=self.intercept, solver="svd")
        else:
            solver = sklearn.linear_model.LogisticRegression(
                C=self.C, tol=1e-12, fit_intercept=self.intercept, solver="newton-cholesky", max_iter=1000
            )
        return solver.fit(self.x, self.y, self.weights)

    def problem(self) -> Problem:
        if self.kind == "squared":
            return Problem(Squared(), np.array([2 / self.C]), "free" if self.intercept else "none")
        kind = {"logistic": Logistic, "softmax": Softmax, "hinge": SquaredHinge}[self.kind]
        loss = kind(self.C, self.classes, self.one)
        free = "penalised" if self.kind == "hinge" else "free"
        return Problem(loss, np.ones(loss.outputs), free if self.intercept else "none")

    def objective(self, parameters: np.ndarray) -> float:
        """scikit-learn's, for Ridge times 1."""
        w, b = parameters[:, : self.d], parameters[:, self.d :].ravel() if self.intercept else 0
        z = self.x @ w.T + b
        if self.kind == "squared":
            return float(np.sum(self.weights * (z[:, 0] - self.y) ** 2) + np.sum(w**2) / self.C)
        size = 0.5 * np.sum(w**2)
        if self.kind == "softmax":
            chosen = z[np.arange(self.n), self.y]
            return float(
                size
                + self.C
                * np.sum(self.weights * (np.log(np.exp(z - z.max(1, keepdims=True)).sum(1)) + z.max(1) - chosen))
            )
        signs = np.where(self.y[:, None] == (self.classes if z.shape[1] > 1 else [1]), 1, -1)
        if self.kind == "logistic":
            return float(size + self.C * np.sum(self.weights[:, None] * np.logaddexp(0, -signs * z)))
        return float(
            size
            + 0.5 * np.sum(np.square(b))
            + self.C * np.sum(self.weights[:, None] * np.maximum(0, 1 - signs * z) ** 2)
        )


@pytest.mark.parametrize("kind", KINDS)
def test_the_gap_is_never_below_the_true_distance(kind: str) -> None:
    looked = 0
    for seed in SEEDS:
        case = Case(kind, seed)
        problem, rows = case.problem(), MemoryRows(case.x, case.y, case.weights)
        start = np.zeros((problem.loss.outputs, problem.columns(case.d)))
        history = History(1e-9, False)
        found, _ = minimise(problem, rows, start, rows, 100, history, uses_cholesky(problem, case.d)[0])
        best = min(case.objective(case.solution), case.objective(found))
        for place in (1e-8, 1e-5, 1e-2, 1):  # from the optimum to far away
            point = found + place * case.generator.normal(size=found.shape)
            looked_at = evaluate(problem, rows, point)
            assert looked_at.value == pytest.approx(case.objective(point), rel=1e-9)
            assert looked_at.gap >= looked_at.value - best, f"seed {seed}, {place}"
            looked += 1
        for one in history.passes:
            assert one.gap >= one.objective - best * (1 + 1e-13), f"seed {seed}, {one}"
    assert looked == 4 * len(SEEDS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gap_becomes_small_where_the_solution_is_good(kind: str) -> None:
    for seed in range(20):
        case = Case(kind, seed)
        problem, rows = case.problem(), MemoryRows(case.x, case.y, case.weights)
        start, history = np.zeros((problem.loss.outputs, problem.columns(case.d))), History(1e-8, False)
        minimise(problem, rows, start, rows, 200, history, uses_cholesky(problem, case.d)[0])
        assert history.done, f"seed {seed}: {history.passes[-1]}"


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_rows_have_the_same_objective_gradient_and_gap(kind: str) -> None:
    case = Case(kind, 3)
    point = case.solution + 0.1
    dense = evaluate(case.problem(), MemoryRows(case.x, case.y, case.weights), point)
    csr = evaluate(case.problem(), MemoryRows(sparse.csr_matrix(case.x), case.y, case.weights), point)
    assert csr.value == pytest.approx(dense.value)
    assert csr.gap == pytest.approx(dense.gap)
    np.testing.assert_allclose(csr.gradient, dense.gradient, rtol=1e-9)


@pytest.mark.parametrize(("value", "gap"), [(np.nan, np.nan), (1.0, np.nan), (np.nan, 0.0), (np.inf, 0.0), (-1.0, 0.0)])
def test_what_is_no_finite_objective_and_gap_is_never_converged(value: float, gap: float) -> None:
    history = History(1e-4, False)
    assert not history.add(Evaluation(value, np.zeros((1, 2)), gap), 0)


@pytest.mark.parametrize("loss", [Squared(), Softmax(1.0, np.arange(3), np.ones(3))])
def test_a_start_that_is_no_number_ends_the_search_unconverged(loss: Loss) -> None:
    rows = MemoryRows(np.eye(3), np.arange(3.0))
    problem = Problem(loss, np.ones(loss.outputs), "free")
    history = History(1e-4, False)
    _, steps = minimise(problem, rows, np.full((loss.outputs, 4), np.nan), rows, 5, history, True)
    assert (steps, history.done, history.passes[-1].gap) == (0, False, np.inf)


def test_a_pass_over_dense_rows_in_float64_copies_no_block() -> None:
    rows = MemoryRows(np.ones((512, 256)), np.arange(512) % 3)
    problem = Problem(Softmax(1.0, np.arange(3), np.ones(3)), np.ones(3), "free")
    tracemalloc.start()
    evaluate(problem, rows, np.zeros((3, 257)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < rows.nbytes / 2
