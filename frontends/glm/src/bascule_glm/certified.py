"""What the estimators share: a fit of arrays or files that ends with a certificate."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from bascule_glm.budget import budget
from bascule_glm.errors import DataError, ScaleWarning
from bascule_glm.files import FileRows, Rows
from bascule_glm.losses import Floats
from bascule_glm.objective import Problem, evaluate
from bascule_glm.ranks import ALONE, Ranks, ranks
from bascule_glm.rows import MemoryRows, extremes
from bascule_glm.solver import History, Pass, minimise, uses_cholesky
from bascule_glm.sources import is_converted, open_rows
from lms.units import format_size

_SPREAD = 1e4  # of the columns' largest entries: beyond, the penalty means another thing for each column
_LARGEST = 1e30  # of a feature, as scikit-learn has it: beyond, liblinear may never end
_ROWS_OF_A_COLUMN = 1000  # at least, and less than twice as many, if memory has them: more rows save no pass
_OWN = ("limit", "n_jobs", "random_state", "verbose")  # parameters that ranks may have of their own
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


class Certified(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """What the three estimators share. Fitted, they have scikit-learn's attributes, and:

    - `objective_`, and `gap_`: the objective is at most this far above its optimum;
    - `history_`: a `Pass` for each pass over the rows, or for each call of scikit-learn's solver;
    - `solver_`: the solver that was taken, and why.
    """

    # Each has `_check()`, which refuses parameters that have no certificate; `_labels(labels, weights, ranks)`; and
    # `_problem(labels, solver, ranks)`, which is minimised. `_in_memory(problem, n_features)` says which of
    # scikit-learn's solvers takes rows in memory, or None for our own method.
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
        joined = ranks(self.distributed)
        with joined.agree():
            self._validate_params()  # scikit-learn's solvers do this, and passes would not
            self._check()
            history = History(self.tol, bool(self.verbose) and joined.rank == 0)
            prepare: Any = self._file_rows if is_file(X) else self._memory_rows
            rows: Rows = prepare(X, y, sample_weight)
            scale = rows.about["scale"] if isinstance(rows, FileRows) else extremes(rows.largest())
            _check_largest(rows, *scale[1])
        self._agree(rows, joined)
        self._warn_of_scale(scale)
        if isinstance(rows, FileRows):
            self._fit_file(rows, joined, history)
        elif joined.size > 1:
            labels = self._labels(rows.labels, rows.weights, joined)
            self._fit_passes(rows, self._problem(labels, "", joined), history, rows, labels)
        else:
            self._fit_memory(rows, history, "the rows are in memory")
        self._conclude(history)
        return self

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """The accuracy, or for Ridge R^2, on rows and their labels, or on a file's rows.

        `y` may name the column of a Parquet or Arrow file's labels. Raises DataError for y or sample_weight beside
        rows that are converted already.
        """
        if is_file(X):
            if is_converted(X) and not (y is None and sample_weight is None):
                raise DataError("X is converted, with labels and weights in it: give y=None, sample_weight=None")
            X = _rows_of(X, y, sample_weight)
            y, sample_weight = X.labels()
        return super().score(X, y, sample_weight)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.array_api_support = False  # the certificate is NumPy's
        return tags

    def _in_passes(self, problem: Problem, n_features: int) -> tuple[bool, str]:
        """Whether Newton's direction comes from a Cholesky factor, and why."""
        return uses_cholesky(problem, n_features)

    def _keep(self, parameters: Floats, problem: Problem, steps: int) -> None:
        """Set scikit-learn's attributes from parameters (K, D)."""
        free = problem.intercept != "none"
        self.coef_: Any = parameters[:, :-1] if free else parameters
        self.intercept_: Any = problem.scale * parameters[:, -1] if free else np.zeros(len(parameters))
        self.n_iter_: Any = np.array([steps], dtype=np.int32)

    def _memory_rows(self, X: Any, y: Any, sample_weight: Any) -> MemoryRows:
        x, labels = validate_data(self, X, y, **self._types)
        if sample_weight is not None:  # with a negative one the objective has no bound
            sample_weight = _check_sample_weight(
                sample_weight, x, dtype=np.float64, ensure_non_negative=True, allow_all_zero_weights=True
            )
        return MemoryRows(x, np.asarray(labels), sample_weight)

    def _file_rows(self, X: Any, y: Any, sample_weight: Any) -> FileRows:
        rows = _rows_of(X, y, sample_weight)
        if not rows.n_rows:
            raise DataError(f"this share of {rows.path} has no rows: start fewer ranks, or give it some")
        self.n_features_in_ = rows.n_features
        self.__dict__.pop("feature_names_in_", None)  # a former fit's
        if rows.names is not None:
            self.feature_names_in_ = np.array(rows.names, dtype=object)
        return rows

    def _agree(self, rows: Rows, joined: Ranks) -> None:
        """Raise DataError if ranks differ in what all must have alike, else their sums were of different problems."""
        if joined.size == 1:
            return
        shared: dict[str, Any] = {"the estimator": type(self).__name__}
        shared |= {name: value for name, value in self.get_params().items() if name not in _OWN}
        targets = "a file's" if isinstance(rows, FileRows) else rows.labels.shape[1:]
        start = np.append(np.ravel(self.coef_), self.intercept_) if self._is_warm() else None
        shared |= {"n_features": rows.n_features, "y.shape[1:]": targets, "warm_start's coef_ and intercept_": start}
        joined.agree_on(shared)
        names = getattr(self, "feature_names_in_", None)
        joined.agree_on(None if names is None else {f"column {number}": name for number, name in enumerate(names)})

    def _is_warm(self) -> bool:
        return bool(getattr(self, "warm_start", False)) and hasattr(self, "coef_")

    def _start(self, problem: Problem, n_features: int) -> Floats:
        """The last fit's parameters (K, D) for a warm start, else zeros."""
        if not self._is_warm():
            return np.zeros((problem.loss.outputs, problem.columns(n_features)))
        had, needed = np.atleast_2d(self.coef_).shape, (problem.loss.outputs, n_features)
        if had != needed:
            raise DataError(f"warm_start: coef_ has the shape {had}, these rows need {needed}: give a new estimator")
        return _parameters(self, problem)

    def _fit_memory(self, rows: MemoryRows, history: History, why: str) -> None:
        """Let our own method fit, or scikit-learn's; go on from there if that ends too far from the optimum."""
        labels = self._labels(rows.labels, rows.weights, ALONE)
        problem = self._problem(labels, "", ALONE)
        found = self._in_memory(problem, rows.n_features)
        if found is None:
            self._fit_passes(rows, problem, history, _sample(rows, problem), labels, f"{why}; ")
            return
        self.solver_ = Solver(found.name, f"{why}; {found.reason}")
        history.say(f"solver: {found.name} of scikit-learn ({self.solver_.reason})")
        problem = self._problem(labels, found.name, ALONE)
        given = {name: getattr(self, name) for name in self._engine().get_params()}
        # scikit-learn's tolerances are on the mean gradient, and half the square of its sum is the gap.
        cost = self.C if np.isfinite(given.get("C", np.inf)) else 1.0
        given["tol"] = min(self.tol, (self.tol / (rows.n_rows * rows.n_features * cost)) ** 0.5)
        given |= {name: value for name, value in (("verbose", 0), ("solver", found.name)) if name in given}
        inner = self._engine(**given)
        if self._is_warm() and found.name != "liblinear":  # which always begins at zero
            self._start(problem, rows.n_features)  # refuses one of another shape
            inner.coef_, inner.intercept_ = self.coef_, self.intercept_
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the gap says it better
            warnings.filterwarnings("ignore", module=r"sklearn\.utils\.optimize|scipy\.optimize")  # line searches
            inner.fit(rows.x, rows.labels, None if (rows.weights == 1).all() else rows.weights)
        start = _parameters(inner, problem)
        history.add(evaluate(problem, rows, start), 0)
        for name in ("classes_", "coef_", "intercept_", "n_iter_"):
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))
        if self.n_iter_ is None:
            self.n_iter_ = np.ones(problem.loss.outputs, dtype=np.int32)  # a direct solver's one step
        done = int(np.max(self.n_iter_))
        left = self._most_steps() - done
        if not history.done and left > 0 and problem.penalty.all():
            history.say("scikit-learn stopped too far from the optimum: Newton's method goes on")
            cholesky = uses_cholesky(problem, rows.n_features)[0]
            parameters, steps = minimise(problem, rows, start, rows, left, history, cholesky)
            self._keep(parameters, problem, steps + done)

    def _most_steps(self) -> int:
        return 100 if self.max_iter is None else int(self.max_iter)

    def _fit_file(self, rows: FileRows, joined: Ranks, history: History) -> None:
        size = f"the file's {format_size(rows.nbytes)}"
        with joined.agree():
            allowed = budget(self.limit)
            counted = None if joined.size == 1 and allowed.holds(rows) else rows.label_counts()
        if counted is None:
            self._fit_memory(rows.load(), history, f"{size} fit into limit={allowed.limit}")
            return
        labels = self._labels(*counted, joined)
        problem = self._problem(labels, "", joined)
        with joined.agree():
            nbytes = allowed.held(rows, problem, self._in_passes(problem, rows.n_features)[0])
            generator = np.random.default_rng(check_random_state(self.random_state).randint(1 << 31))
            rows = rows.hold(nbytes, generator)
        assert rows.held is not None
        sample = _sample(rows.held, problem)
        history.say(f"sample: {sample.n_rows} of {rows.n_rows} rows, {format_size(sample.nbytes)}, drawn at random")
        why = f"{size} do not fit into limit={allowed.limit}; " if joined.size == 1 else ""
        self._fit_passes(rows, problem, history, sample, labels, why)

    def _fit_passes(
        self, rows: Rows, problem: Problem, history: History, sample: MemoryRows, labels: Labels, why: str = ""
    ) -> None:
        """Passes over the rows, from the optimum of the sample; all rows may be the sample."""
        cholesky, reason = self._in_passes(problem, rows.n_features)
        if problem.ranks.size > 1:
            why += f"{problem.ranks.size} ranks; "
        starts = list[MemoryRows]()  # rows whose optimum is near that of all rows, the fewest first
        if sample is not rows:
            for some in (sample.every(10), sample):
                standing, complete = _standing_for(some, rows.n_rows, labels, problem)
                starts += [standing] * complete
            sample = rows if isinstance(rows, MemoryRows) and not complete else standing
        name, how = ("newton-cg", "Newton's method") if sample is rows else ("lbfgs", "L-BFGS, Newton on a sample")
        self.solver_ = Solver("newton-cholesky" if cholesky else name, why + reason)
        history.say(f"solver: {how} ({self.solver_.reason})")
        start = self._start(problem, rows.n_features)
        for some in () if self._is_warm() else starts:
            enough = History(max(self.tol, _SAMPLE_GAP), False)
            start, _ = minimise(problem, some, start, some, 50, enough, cholesky)
        found, steps = minimise(problem, rows, start, sample, self._most_steps(), history, cholesky)
        self._keep(found, problem, steps)

    def _conclude(self, history: History) -> None:
        last = history.passes[-1]
        if not np.isfinite(last.objective):
            found = f"the objective is {last.objective}: features, labels, weights or C are too large"
            raise DataError(f"{found}. Make them smaller (sklearn.preprocessing.MaxAbsScaler scales columns)")
        self.history_, self.gap_, self.objective_ = history.passes, last.gap, last.objective
        if history.done:
            history.say(f"stopped: the gap is at most tol = {self.tol:g} times the objective")
            return
        message = (
            f"the gap is {last.gap:.2g}, which is {history.relative:.1g} of the objective; tol asks for {self.tol:g}: "
            "raise max_iter or tol, or scale the columns. Without a penalty there is no gap but the objective"
        )
        history.say(f"stopped: {message}")
        warnings.warn(message, ConvergenceWarning, stacklevel=3)

    def _warn_of_scale(self, scale: list[list[float]]) -> None:
        """Warn if the least and the largest of the columns' largest values are far apart."""
        (narrow, least), (broad, most) = scale
        if self.fit_intercept and most > _SPREAD * least:
            found = f"column {broad} reaches {most:.3g}, column {narrow} only {least:.3g}"
            advice = "scale the columns first (sklearn.preprocessing.StandardScaler, or MaxAbsScaler for sparse data)"
            warnings.warn(f"{found}: the penalty weighs on them very differently; {advice}", ScaleWarning, stacklevel=3)

    def _scores(self, X: Any) -> Floats:
        """Scores of a file's rows, (n,) or (n, K)."""
        check_is_fitted(self)
        rows, d = open_rows(X), self.n_features_in_
        names = rows.names and [*getattr(self, "feature_names_in_", rows.names)]
        if rows.n_features != d:
            advice = f": convert(..., n_features={d})" if rows.sparse else ""
            raise DataError(f"{rows.path} has {rows.n_features} features; the fit had {d}{advice}")
        if rows.names != names:
            raise DataError(
                f"{rows.path} has the columns {rows.names}; the fit had {names}: give it these, in this order"
            )
        scores = np.concatenate([np.asarray(block.x @ np.atleast_2d(self.coef_).T + self.intercept_) for block in rows])
        return scores[:, 0] if scores.shape[1] == 1 else scores


def _check_largest(rows: Rows, column: int, most: float) -> None:
    """Raise DataError if a column is so large that the sum of its squares overflows."""
    dtype = rows.dtype if isinstance(rows, FileRows) else rows.x.dtype
    limit = min(_LARGEST, float(np.finfo(dtype).max / rows.n_rows) ** 0.5)
    if most > limit:
        found = f"column {column} reaches {most:.3g}; a fit of {rows.n_rows} rows of {dtype} takes {limit:.2g} at most"
        raise DataError(f"{found}: scale the columns first (sklearn.preprocessing.MaxAbsScaler)")


def _sample(rows: MemoryRows, problem: Problem) -> MemoryRows:
    """What Newton's steps see: enough of the rows, or all of them. Each rank has its share of one sample."""
    enough = _ROWS_OF_A_COLUMN * problem.columns(rows.n_features)
    return rows.every(problem.ranks.size * max(1, rows.n_rows // enough))


def _standing_for(sample: MemoryRows, n_rows: int, labels: Labels, problem: Problem) -> tuple[MemoryRows, bool]:
    """Rows with weights that stand for this rank's `n_rows`, and whether there are some of each class.

    Each class has the weight that it has among all rows, which blocks of a sorted file would not give it. If one has no
    row, these have no optimum: the intercept grows without bound. A class without weight needs none.
    """
    weights, complete = sample.weights * (n_rows / sample.n_rows), True
    if len(labels.classes):  # else labels are numbers
        codes = np.searchsorted(labels.classes, sample.labels)
        found = problem.ranks.add(np.bincount(codes, weights, len(labels.classes)))
        complete = not labels.counts[found == 0].any()
        if complete:
            weights *= (labels.counts / np.where(found > 0, found, 1))[codes]
    return MemoryRows(sample.x, sample.labels, weights), complete


def _parameters(fitted: Any, problem: Problem) -> Floats:
    """The coefficients of a fitted estimator as (K, D), in float64."""
    coefficients = np.atleast_2d(np.asarray(fitted.coef_, dtype=np.float64))
    if problem.intercept == "none":
        return coefficients
    intercept = np.reshape(np.asarray(fitted.intercept_, dtype=np.float64), (-1, 1)) / problem.scale
    return np.concatenate([coefficients, intercept], axis=1)


def check_weight(counts: Floats) -> None:
    """Raise DataError if all rows of all ranks have weight 0. `counts` are weights of parts of them."""
    if not counts.any():
        raise DataError("Sample weights must contain at least one non-zero number")


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
