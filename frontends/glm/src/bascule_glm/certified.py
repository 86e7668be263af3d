"""What the estimators share: a fit of arrays or files that ends with a certificate."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from bascule_glm.budget import budget
from bascule_glm.errors import DataError, ScaleWarning
from bascule_glm.files import FileRows
from bascule_glm.losses import Floats
from bascule_glm.objective import Problem, evaluate
from bascule_glm.ranks import ALONE, Ranks, ranks
from bascule_glm.rows import MemoryRows
from bascule_glm.solver import History, Pass, minimise, uses_cholesky
from bascule_glm.sources import is_converted, open_rows
from lms.units import format_size

_SPREAD = 1e4  # of the columns' largest entries: beyond, the penalty means another thing for each column
_ROWS_OF_A_COLUMN = 1000  # at least, and less than twice as many, if memory has them: more rows save no pass
_SAMPLE_GAP = 1e-4  # of the objective: the optimum of a sample is no nearer to that of all rows


@dataclass(frozen=True)
class Solver:
    """Which solver was taken, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Labels:
    """What a problem must know of the labels: classes and the weight of each, or the number of targets."""

    classes: NDArray[Any]
    counts: Floats
    targets: int = 1


class Certified:
    """What the three estimators share. Fitted, they have scikit-learn's attributes, and:

    - `objective_`, and `gap_`: the objective is at most this far above its optimum;
    - `history_`: a `Pass` for each pass over the rows, or for each call of scikit-learn's solver;
    - `solver_`: the solver that was taken, and why.
    """

    _engine: ClassVar[Any]  # scikit-learn's estimator of the same name
    _types: ClassVar[dict[str, Any]]  # how scikit-learn checks the rows

    gap_: float
    objective_: float
    history_: list[Pass]
    solver_: Solver

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Fit until the gap is at most `tol` times the objective.

        X: array or sparse matrix (n, d); or a file, by its path or as the rows that `open_rows` or `convert` returned.
        A path to svmlight, Parquet or Arrow is converted once to row blocks, beside it.
        y: labels (n,); for Parquet and Arrow the column's name; for svmlight and row blocks None.
        sample_weight: (n,), or for Parquet and Arrow a column's name.

        Raises DataError (a ValueError) for data that cannot be fitted, FileError for a damaged file, and DDL's errors
        if a rank is missing. Warns with ConvergenceWarning if the gap is larger when `max_iter` is reached.
        """
        this: Any = self
        this._validate_params()  # scikit-learn's solvers do this, and passes would not
        self._check()
        joined = ranks(this.distributed)
        history = History(this.tol, bool(this.verbose) and joined.rank == 0)
        if is_file(X):
            self._fit_file(X, y, sample_weight, joined, history)
        else:
            with joined.agree():
                x, labels = self._validated(X, y, joined)
                weights = None if sample_weight is None else _check_sample_weight(sample_weight, x, dtype=np.float64)
                rows = MemoryRows(x, labels, weights)
            self._warn_of_scale([[k, v] for k, v in enumerate(_largest(rows))])
            if joined.size > 1:
                joined.agree_on_features(rows.n_features, getattr(this, "feature_names_in_", None))
                labels_of_all = self._labels(rows.labels, rows.weights, joined)
                problem = self._problem(labels_of_all, "", joined)
                self._fit_passes(rows, problem, history, rows, labels_of_all)
            else:
                self._fit_memory(rows, sample_weight, history, "the rows are in memory")
        self._conclude(history)
        return self

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """The accuracy, or for Ridge R^2, on rows and their labels, or on a file's rows.

        `y` may name the column of a Parquet or Arrow file's labels. Raises DataError for y or sample_weight beside
        rows that are converted already.
        """
        parent: Any = super()
        if is_file(X):
            if is_converted(X) and not (y is None and sample_weight is None):
                raise DataError("X is converted, with labels and weights in it: give y=None, sample_weight=None")
            X = _rows_of(X, y, sample_weight)
            y, sample_weight = X.labels()
        return parent.score(X, y, sample_weight)

    def _check(self) -> None:
        """Raise DataError for parameters of scikit-learn's that have no certificate here."""

    def _problem(self, labels: Labels, solver: str, joined: Ranks) -> Problem:
        raise NotImplementedError

    def _in_memory(self, problem: Problem, rows: MemoryRows) -> Solver | None:
        """Which of scikit-learn's solvers takes rows in memory. None: our own Newton's method."""
        raise NotImplementedError

    def _in_passes(self, problem: Problem, n_features: int) -> tuple[bool, str]:
        """Whether Newton's direction comes from a Cholesky factor, and why."""
        return uses_cholesky(problem, n_features)

    def _keep(self, parameters: Floats, problem: Problem, steps: int, n_features: int) -> None:
        """Set scikit-learn's attributes from parameters (K, D)."""
        raise NotImplementedError

    def _labels(self, labels: NDArray[Any], weights: Floats, joined: Ranks) -> Labels:
        raise NotImplementedError

    def _validated(self, X: Any, y: Any, joined: Ranks) -> tuple[Any, NDArray[Any]]:
        x, labels = validate_data(self, X, y, **self._types)
        return x, np.asarray(labels)

    def _fit_memory(self, rows: MemoryRows, sample_weight: Any, history: History, why: str) -> None:
        """Let our own method fit, or scikit-learn's; go on from there if that ends too far from the optimum."""
        this: Any = self
        labels = self._labels(rows.labels, rows.weights, ALONE)
        problem = self._problem(labels, "", ALONE)
        found = self._in_memory(problem, rows)
        if found is None:
            self._fit_passes(rows, problem, history, _sample(rows, problem), labels, f"{why}; ")
            return
        inner = self._engine(
            **{name: getattr(this, name) for name in self._engine().get_params() if hasattr(this, name)}
        )
        inner.set_params(**({"verbose": 0} if "verbose" in inner.get_params() else {}))
        self.solver_ = Solver(found.name, f"{why}; {found.reason}")
        if "solver" in inner.get_params():
            inner.solver = found.name
        history.say(f"solver: {found.name} of scikit-learn ({self.solver_.reason})")
        if getattr(this, "warm_start", False) and hasattr(this, "coef_"):
            inner.coef_, inner.intercept_ = this.coef_, this.intercept_

        problem = self._problem(labels, found.name, ALONE)
        # scikit-learn's tolerances are on the mean gradient, and half the square of its sum is the gap.
        cost = getattr(this, "C", 1.0)
        size = rows.n_rows * rows.n_features * (cost if np.isfinite(cost) else 1.0)
        inner.tol = min(inner.tol, (this.tol / size) ** 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the gap says it better
            warnings.filterwarnings("ignore", module=r"sklearn\.utils\.optimize|scipy\.optimize")  # line searches
            inner.fit(rows.x, rows.labels, sample_weight=None if sample_weight is None else rows.weights)
        start = _parameters(inner, problem)
        history.add(evaluate(problem, rows, start), 0)
        for name in ("classes_", "coef_", "intercept_", "n_iter_", "solver_name_"):
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))
        if this.n_iter_ is None:
            this.n_iter_ = np.ones(problem.loss.outputs, dtype=np.int32)  # a direct solver's one step
        left = 100 if this.max_iter is None else this.max_iter - int(np.max(this.n_iter_))
        if not history.done and left > 0 and problem.penalty.all():
            history.say("scikit-learn stopped too far from the optimum: Newton's method goes on")
            cholesky = uses_cholesky(problem, rows.n_features)[0]
            parameters, steps = minimise(problem, rows, start, rows, left, history, cholesky)
            self._keep(parameters, problem, steps + int(np.max(this.n_iter_)), rows.n_features)

    def _fit_file(self, X: Any, y: Any, sample_weight: Any, joined: Ranks, history: History) -> None:
        this: Any = self
        with joined.agree():
            rows = _rows_of(X, y, sample_weight)
            if not rows.n_rows:
                raise DataError(f"rank {joined.rank} has no rows of {rows.path}: start fewer ranks, or give it some")
            allowed = budget(this.limit)
            counted = None if joined.size == 1 and allowed.holds(rows) else rows.label_counts()
        joined.agree_on_features(rows.n_features, rows.names)
        this.n_features_in_ = rows.n_features
        vars(this).pop("feature_names_in_", None)  # a former fit's
        if rows.names is not None:
            this.feature_names_in_ = np.array(rows.names, dtype=object)
        self._warn_of_scale(rows.about["scale"])
        size = f"the file's {format_size(rows.nbytes)}"
        if counted is None:
            loaded = rows.load()
            why = f"{size} fit into limit={allowed.limit}"
            self._fit_memory(loaded, loaded.weights, history, why)
            return
        labels = self._labels(*counted, joined)
        problem = self._problem(labels, "", joined)
        with joined.agree():
            nbytes = allowed.held(rows, problem, self._in_passes(problem, rows.n_features)[0])
            generator = np.random.default_rng(check_random_state(this.random_state).randint(1 << 31))
            rows = rows.hold(nbytes, generator)
        assert rows.held is not None
        sample = _sample(rows.held, problem)
        history.say(f"sample: {sample.n_rows} of {rows.n_rows} rows, {format_size(sample.nbytes)}, drawn at random")
        why = f"{size} do not fit into limit={allowed.limit}; " if joined.size == 1 else ""
        self._fit_passes(rows, problem, history, sample, labels, why)

    def _fit_passes(
        self,
        rows: FileRows | MemoryRows,
        problem: Problem,
        history: History,
        sample: MemoryRows,
        labels: Labels,
        why: str = "",
    ) -> None:
        """Passes over the rows, from the optimum of the sample; all rows may be the sample."""
        this: Any = self
        cholesky, reason = self._in_passes(problem, rows.n_features)
        if problem.ranks.size > 1:
            why += f"{problem.ranks.size} ranks; "
        starts = list[MemoryRows]()  # rows whose optimum is near that of all rows, the fewest first
        if sample is not rows:
            for some in (sample.every(10), sample):
                standing, complete = _standing_for(some, rows.n_rows, labels, problem)
                starts += [standing] * complete
            sample = standing if complete or isinstance(rows, FileRows) else rows
        name, how = ("newton-cg", "Newton's method") if sample is rows else ("lbfgs", "L-BFGS, Newton on a sample")
        self.solver_ = Solver("newton-cholesky" if cholesky else name, why + reason)
        history.say(f"solver: {how} ({self.solver_.reason})")
        start = np.zeros((problem.loss.outputs, problem.columns(rows.n_features)))
        if getattr(this, "warm_start", False) and hasattr(this, "coef_"):
            if np.atleast_2d(this.coef_).shape != (problem.loss.outputs, rows.n_features):
                raise DataError(
                    f"warm_start: the last fit's coef_ has the shape {np.shape(this.coef_)}, and these rows need "
                    f"({problem.loss.outputs}, {rows.n_features}): give the same features and classes, or begin anew"
                )
            start, starts = _parameters(this, problem), []
        for some in starts:
            enough = History(max(this.tol, _SAMPLE_GAP), False)
            start, _ = minimise(problem, some, start, some, 50, enough, cholesky)
        most = 100 if this.max_iter is None else this.max_iter
        found, steps = minimise(problem, rows, start, sample, most, history, cholesky)
        self._keep(found, problem, steps, rows.n_features)

    def _conclude(self, history: History) -> None:
        this: Any = self
        last = history.passes[-1]
        self.history_, self.gap_, self.objective_ = history.passes, last.gap, last.objective
        if history.done:
            history.say(f"stopped: the gap is at most tol = {this.tol:g} times the objective")
            return
        message = (
            f"the gap is {last.gap:.2g}, which is {history.relative:.1g} of the objective; tol asks for {this.tol:g}: "
            "raise max_iter or tol, or scale the columns. Without a penalty there is no gap but the objective"
        )
        history.say(f"stopped: {message}")
        warnings.warn(message, ConvergenceWarning, stacklevel=3)

    def _warn_of_scale(self, largest: list[list[float]]) -> None:
        """Warn if columns (number, largest absolute value) are of very different scale."""
        this: Any = self
        used = [(value, int(column)) for column, value in largest if value > 0]
        if this.fit_intercept and used and max(used)[0] > _SPREAD * min(used)[0]:
            (least, narrow), (most, broad) = min(used), max(used)
            warnings.warn(
                f"column {broad} reaches {most:.3g}, column {narrow} only {least:.3g}: the penalty weighs on "
                "them very differently, and solvers are slow; scale the columns first "
                "(sklearn.preprocessing.StandardScaler, or MaxAbsScaler for sparse data)",
                ScaleWarning,
                stacklevel=4,
            )

    def _scores(self, X: Any) -> Floats:
        """Scores of a file's rows, (n,) or (n, K)."""
        this: Any = self
        check_is_fitted(this)
        rows = open_rows(X)
        if rows.n_features != this.n_features_in_:
            raise DataError(
                f"{rows.path} has {rows.n_features} features, and the fit had {this.n_features_in_}: convert a file "
                f"with the same columns (for svmlight: convert(..., n_features={this.n_features_in_}))"
            )
        fitted = getattr(this, "feature_names_in_", None)
        if rows.names is not None and fitted is not None and rows.names != list(fitted):
            raise DataError(
                f"{rows.path} has the columns {rows.names}, and the fit had {list(fitted)}: convert a file with the "
                "same columns in the same order"
            )
        found = np.concatenate([np.asarray(block.x @ np.atleast_2d(this.coef_).T + this.intercept_) for block in rows])
        return found[:, 0] if found.shape[1] == 1 else found


def _sample(rows: MemoryRows, problem: Problem) -> MemoryRows:
    """What Newton's steps see: enough of the rows, or all of them. Each rank has its share of one sample."""
    enough = _ROWS_OF_A_COLUMN * problem.columns(rows.n_features)
    return rows.every(problem.ranks.size * max(1, rows.n_rows // enough))


def _standing_for(sample: MemoryRows, n_rows: int, labels: Labels, problem: Problem) -> tuple[MemoryRows, bool]:
    """Rows with weights that stand for this rank's `n_rows`, and whether there are some of each class.

    Each class has the weight that it has among all rows, which blocks of a sorted file would not give it. If one has no
    row, these have no optimum: the intercept grows without bound.
    """
    standing = sample.standing_for(n_rows)
    if not len(labels.classes):  # numbers
        return standing, True
    codes = np.searchsorted(labels.classes, standing.labels)
    found = problem.ranks.add(np.bincount(codes, standing.weights, len(labels.classes)))
    if (labels.counts[found == 0] > 0).any():
        return standing, False
    share = np.divide(labels.counts, found, out=np.zeros_like(found), where=found > 0)
    return MemoryRows(standing.x, standing.labels, standing.weights * share[codes]), True


def _parameters(fitted: Any, problem: Problem) -> Floats:
    """The coefficients of a fitted estimator as (K, D), in float64."""
    coefficients = np.atleast_2d(np.asarray(fitted.coef_, dtype=np.float64))
    if problem.intercept == "none":
        return coefficients
    intercept = np.reshape(np.asarray(fitted.intercept_, dtype=np.float64), (-1, 1)) / problem.scale
    return np.concatenate([coefficients, intercept], axis=1)


def is_file(x: Any) -> bool:
    """Whether rows are given as a file."""
    return isinstance(x, (str, PathLike, FileRows))


def _rows_of(x: Any, label: Any, weight: Any) -> FileRows:
    """A file's rows, with weights that may be an array."""
    if label is not None and not isinstance(label, str):
        raise DataError("y is an array and X a file: give y=None, or the name of a Parquet or Arrow file's column")
    named = isinstance(weight, str)
    rows = open_rows(x, label=label, weight=weight if named else None)
    return rows if weight is None or named else rows.weighted(weight)


def _largest(rows: MemoryRows) -> Floats:
    """The largest absolute value of each column, (d,)."""
    largest = np.zeros(rows.n_features)
    for block in rows:
        found = abs(block.x).max(axis=0)
        largest = np.maximum(largest, found.toarray().ravel() if hasattr(found, "toarray") else found)
    return largest
