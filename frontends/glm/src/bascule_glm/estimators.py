"""scikit-learn's linear models with a certificate, for arrays and for files larger than memory.

Rows in memory go to scikit-learn's solver, or to Newton's method of `bascule_glm.solver` if that is faster; a file that
fits into the limit is read and goes there too. Larger files, and rows that are spread over ranks, are fitted in passes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import sklearn.linear_model
import sklearn.svm
from numpy.typing import NDArray
from sklearn.utils._param_validation import StrOptions
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets

from bascule_glm.certified import Certified, Labels, Solver, check_weight, is_file
from bascule_glm.errors import DataError
from bascule_glm.files import MOST_CLASSES
from bascule_glm.losses import Floats, Logistic, Loss, Softmax, Squared, SquaredHinge
from bascule_glm.objective import Intercept, Problem
from bascule_glm.ranks import Ranks
from bascule_glm.rows import EXACT, MemoryRows
from bascule_glm.solver import uses_cholesky


class _Classifier(Certified):
    """Labels of classes; scores, predictions and accuracy of a file."""

    def _labels(self, labels: NDArray[Any], weights: Floats, joined: Ranks) -> Labels:
        classes = joined.union(labels) if joined.size > 1 else np.unique(labels)
        if classes.dtype.kind == "f" and np.abs(classes).max() >= EXACT:  # a file's, and those between ranks
            raise DataError("there are labels of 2**53 or more, which float64 cannot tell apart: number the classes")
        if len(classes) < 2:
            raise DataError(f"there is one class, {classes[0]}: a classifier needs rows of two classes or more")
        if labels.dtype.kind == "f" and len(classes) > MOST_CLASSES:
            raise DataError(f"there are {len(classes)} different labels: for numbers that are no classes take Ridge")
        counts = joined.add(np.bincount(np.searchsorted(classes, labels), weights, len(classes)))
        check_weight(counts)
        return Labels(classes, counts)

    def _class_weights(self, labels: Labels) -> Floats:
        if self.class_weight == "balanced" and not labels.counts.all():
            empty = labels.classes[labels.counts == 0][0]
            raise DataError(f"class_weight='balanced' divides by 0, the weight of class {empty}: drop its rows")
        # Each class once, with the weight of all its rows: for "balanced" the same as all rows.
        weights: Floats = compute_class_weight(
            self.class_weight, classes=labels.classes, y=labels.classes, sample_weight=labels.counts
        )
        if not ((weights >= 0) & np.isfinite(weights)).all():
            raise DataError(f"class_weight={self.class_weight!r}: expected finite numbers of zero or more")
        return weights

    def _memory_rows(self, X: Any, y: Any, sample_weight: Any) -> MemoryRows:
        rows = super()._memory_rows(X, y, sample_weight)
        check_classification_targets(rows.labels)
        return rows

    def decision_function(self, X: Any) -> Any:
        """Scores (n,) or (n, K) of rows, or of a file's rows. `predict` takes both, too."""
        return self._scores(X) if is_file(X) else super().decision_function(X)

    def _keep(self, parameters: Floats, problem: Problem, steps: int) -> None:
        super()._keep(parameters, problem, steps)
        self.classes_ = problem.loss.classes  # type: ignore[union-attr]  # Squared has none


class LogisticRegression(_Classifier, sklearn.linear_model.LogisticRegression):  # type: ignore[misc]
    """scikit-learn's LogisticRegression with an L2 penalty, a certificate, and files larger than memory.

    Parameters and attributes are scikit-learn's, and:

    solver: "auto", or one of scikit-learn's. Of these "newton-cholesky" and "lbfgs" also fit in passes.
    tol: the gap that is small enough, as a share of the objective.
    limit: the memory this process may hold while it fits a file, as bytes or "2GB". None: half of what is available,
    divided by the ranks on this host.
    distributed: each rank of DDL's job fits its share of the rows, and all have the same result.
    """

    _engine = sklearn.linear_model.LogisticRegression
    _parameter_constraints: ClassVar[dict[str, Any]] = _engine._parameter_constraints | {
        "solver": [StrOptions({"auto", *_engine._parameter_constraints["solver"][0].options})]
    }
    _types: ClassVar[dict[str, Any]] = {"accept_sparse": "csr", "dtype": [np.float64, np.float32], "order": "C"}

    def __init__(
        self, penalty: Any = "deprecated", *, C: float = 1.0, l1_ratio: float = 0.0, dual: bool = False,
        tol: float = 1e-4, fit_intercept: bool = True, intercept_scaling: float = 1, class_weight: Any = None,
        random_state: Any = None, solver: str = "auto", max_iter: int = 100, verbose: int = 0, warm_start: bool = False,
        n_jobs: Any = None, limit: int | str | None = None, distributed: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            penalty, C=C, l1_ratio=l1_ratio, dual=dual, tol=tol, fit_intercept=fit_intercept,
            intercept_scaling=intercept_scaling, class_weight=class_weight, random_state=random_state, solver=solver,
            max_iter=max_iter, verbose=verbose, warm_start=warm_start, n_jobs=n_jobs,
        )  # fmt: skip
        self.limit, self.distributed = limit, distributed

    def _check(self) -> None:
        if self.l1_ratio or self.penalty in ("l1", "elasticnet"):
            asked = f"penalty={self.penalty!r}, l1_ratio={self.l1_ratio}"
            raise DataError(f"{asked}: only the L2 penalty has a certificate; take scikit-learn's LogisticRegression")

    def _problem(self, labels: Labels, solver: str, joined: Ranks) -> Problem:
        free = self.penalty is None or np.isinf(self.C)
        kind = Logistic if len(labels.classes) == 2 else Softmax
        loss: Loss = kind(1.0 if free else self.C, labels.classes, self._class_weights(labels))
        intercept: Intercept = "none"
        if self.fit_intercept:
            intercept = "penalised" if solver == "liblinear" else "free"
        scale = self.intercept_scaling if intercept == "penalised" else 1.0
        return Problem(loss, np.full(loss.outputs, 0.0 if free else 1.0), intercept, scale, joined)

    def _in_memory(self, problem: Problem, n_features: int) -> Solver | None:
        if self.solver != "auto":
            return Solver(self.solver, "it was asked for")
        if problem.loss.outputs == 1 and problem.penalty.all():
            return None
        return Solver("newton-cg", "several classes" if problem.penalty.all() else "there is no penalty")

    def _in_passes(self, problem: Problem, n_features: int) -> tuple[bool, str]:
        if self.solver == "auto":
            return super()._in_passes(problem, n_features)
        if self.solver not in ("lbfgs", "newton-cholesky"):
            raise DataError(f"solver={self.solver!r} needs all rows in memory: auto, lbfgs and newton-cholesky do not")
        if self.solver == "newton-cholesky" and isinstance(problem.loss, Softmax):
            raise DataError("solver='newton-cholesky' in passes is for two classes: take auto or lbfgs")
        return self.solver == "newton-cholesky", "it was asked for"


class LinearSVC(_Classifier, sklearn.svm.LinearSVC):  # type: ignore[misc]
    """scikit-learn's LinearSVC with the squared hinge and an L2 penalty, a certificate, and files larger than memory.

    Parameters and attributes are scikit-learn's; `tol`, `limit` and `distributed` are those of LogisticRegression.
    """

    _engine = sklearn.svm.LinearSVC
    _types: ClassVar[dict[str, Any]] = {"accept_sparse": "csr", "dtype": np.float64, "order": "C"}

    def __init__(
        self, penalty: str = "l2", loss: str = "squared_hinge", *, dual: bool | str = "auto", tol: float = 1e-4,
        C: float = 1.0, multi_class: str = "ovr", fit_intercept: bool = True, intercept_scaling: float = 1,
        class_weight: Any = None, verbose: int = 0, random_state: Any = None, max_iter: int = 1000,
        limit: int | str | None = None, distributed: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            penalty, loss, dual=dual, tol=tol, C=C, multi_class=multi_class, fit_intercept=fit_intercept,
            intercept_scaling=intercept_scaling, class_weight=class_weight, verbose=verbose, random_state=random_state,
            max_iter=max_iter,
        )  # fmt: skip
        self.limit, self.distributed = limit, distributed

    def _check(self) -> None:
        for name, known in (("penalty", "l2"), ("loss", "squared_hinge"), ("multi_class", "ovr")):
            if (asked := getattr(self, name)) != known:
                raise DataError(f"{name}={asked!r} has no certificate, {known!r} has: take scikit-learn's LinearSVC")

    def _problem(self, labels: Labels, solver: str, joined: Ranks) -> Problem:
        loss = SquaredHinge(self.C, labels.classes, self._class_weights(labels))
        intercept: Intercept = "penalised" if self.fit_intercept else "none"
        return Problem(loss, np.ones(loss.outputs), intercept, self.intercept_scaling, joined)

    def _in_memory(self, problem: Problem, n_features: int) -> Solver | None:
        if self.dual == "auto" and uses_cholesky(problem, n_features)[0]:
            return None
        return Solver("liblinear", "scikit-learn has no other for the squared hinge")

    def _keep(self, parameters: Floats, problem: Problem, steps: int) -> None:
        super()._keep(parameters, problem, steps)
        self.n_iter_ = steps  # scikit-learn's is no array here


class Ridge(Certified, sklearn.linear_model.Ridge):  # type: ignore[misc]
    """scikit-learn's Ridge with a certificate, and files larger than memory.

    Parameters and attributes are scikit-learn's, and `verbose`; `tol`, `limit` and `distributed` are those of
    LogisticRegression.
    """

    _engine = sklearn.linear_model.Ridge
    _types: ClassVar[dict[str, Any]] = {
        "accept_sparse": "csr", "dtype": [np.float64, np.float32], "multi_output": True, "y_numeric": True,
    }  # fmt: skip

    def __init__(
        self, alpha: Any = 1.0, *, fit_intercept: bool = True, copy_X: bool = True, max_iter: int | None = None,
        tol: float = 1e-4, solver: str = "auto", positive: bool = False, random_state: Any = None, verbose: int = 0,
        limit: int | str | None = None, distributed: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            alpha, fit_intercept=fit_intercept, copy_X=copy_X, max_iter=max_iter, tol=tol, solver=solver,
            positive=positive, random_state=random_state,
        )  # fmt: skip
        self.verbose, self.limit, self.distributed = verbose, limit, distributed

    def _check(self) -> None:
        if self.positive:
            raise DataError("positive=True has no certificate: take scikit-learn's Ridge")

    def _labels(self, labels: NDArray[Any], weights: Floats, joined: Ranks) -> Labels:
        check_weight(joined.add(np.array([weights.sum()])))
        return Labels(np.empty(0), np.empty(0), 1 if labels.ndim == 1 else labels.shape[1])

    def _problem(self, labels: Labels, solver: str, joined: Ranks) -> Problem:
        penalty = 2 * np.broadcast_to(np.asarray(self.alpha, dtype=np.float64), (labels.targets,))
        return Problem(Squared(labels.targets), penalty, "free" if self.fit_intercept else "none", 1.0, joined)

    def _in_memory(self, problem: Problem, n_features: int) -> Solver:
        return Solver(self.solver, "scikit-learn's own choice" if self.solver == "auto" else "it was asked for")

    def _keep(self, parameters: Floats, problem: Problem, steps: int) -> None:
        super()._keep(parameters, problem, steps)
        if len(parameters) == 1:
            self.coef_, self.intercept_ = self.coef_[0], float(self.intercept_[0])

    def predict(self, X: Any) -> Any:
        """Predictions (n,) or (n, K) for rows, or for a file's rows."""
        return self._scores(X) if is_file(X) else super().predict(X)
