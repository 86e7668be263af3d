"""The estimators on arrays: scikit-learn's checks, its parameters and attributes, and the certificate."""

import re
import warnings
from typing import Any
from unittest import SkipTest

import numpy as np
import pytest
from scipy import sparse
from sklearn.ensemble import BaggingClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.estimator_checks import estimator_checks_generator

from bascule_glm import DataError, LinearSVC, LogisticRegression, Ridge, ScaleWarning

ESTIMATORS = (LogisticRegression, LinearSVC, Ridge)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_every_check_of_scikit_learn_that_applies_passes(kind: Any) -> None:
    passed, skipped = 0, list[str]()
    for estimator, check in estimator_checks_generator(kind()):
        try:
            check(estimator)
            passed += 1
        except SkipTest as skip:
            skipped.append(str(skip))
    assert passed > 50
    # SciPy's switch for arrays that are not NumPy's, or a library that is not installed.
    assert all(re.search("SCIPY_ARRAY_API is not set|is not installed", words) for words in skipped)


def data(classes: int, generator: np.random.Generator, n: int = 300, d: int = 8) -> tuple[Any, Any]:
    x = generator.normal(size=(n, d))
    scores = x @ generator.normal(size=(d, classes)) + generator.normal(size=(n, classes))
    return x, scores.argmax(axis=1)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("form", [np.asarray, sparse.csr_matrix])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_the_result_is_scikit_learns_and_certified(
    kind: Any, dtype: Any, form: Any, intercept: bool, classes: int
) -> None:
    x, y = data(classes, np.random.default_rng(5))
    weights = np.random.default_rng(6).uniform(0.5, 2, len(y))
    more: dict[str, Any] = {} if kind is Ridge else {"class_weight": "balanced"}
    exact, x = form(x.astype(dtype).astype(float)), form(x.astype(dtype))
    ours = kind(fit_intercept=intercept, tol=1e-9, **more).fit(x, y, weights)
    theirs = kind._engine(fit_intercept=intercept, tol=1e-10, max_iter=10000, **more).fit(
        exact, y, sample_weight=weights
    )
    assert ours.gap_ <= 1e-9 * ours.objective_
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-3)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, atol=1e-3)
    assert np.shape(ours.coef_) == np.shape(theirs.coef_)
    np.testing.assert_allclose(ours.predict(x[:20]), theirs.predict(x[:20]), atol=1e-2)


def test_labels_may_be_words() -> None:
    x, y = data(3, np.random.default_rng(1))
    names = np.array(["ash", "beech", "oak"])[y]
    model = LogisticRegression().fit(x, names)
    assert model.classes_.tolist() == ["ash", "beech", "oak"]
    assert model.score(x, names) > 0.7


def test_a_fit_that_stops_early_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = data(3, np.random.default_rng(2))
    with pytest.warns(ConvergenceWarning, match="raise max_iter or tol"):
        model = LogisticRegression(max_iter=1, tol=1e-12, solver="lbfgs", verbose=1).fit(x, y)
    assert model.gap_ > 1e-12 * model.objective_
    said = capsys.readouterr().out
    assert "solver: lbfgs of scikit-learn" in said
    assert "it was asked for" in said
    assert "stopped: the gap is" in said
    assert [one.number for one in model.history_] == list(range(1, len(model.history_) + 1))


def test_a_warm_start_begins_at_the_last_solution() -> None:
    x, y = data(2, np.random.default_rng(3))
    cold = LogisticRegression(solver="lbfgs", tol=1e-6).fit(x, y)
    warm = LogisticRegression(solver="lbfgs", tol=1e-6, warm_start=True).fit(x, y)
    warm.fit(x, y)
    assert warm.n_iter_.max() < cold.n_iter_.max()
    assert warm.gap_ <= 1e-6 * warm.objective_


def test_a_warm_start_with_other_classes_is_refused() -> None:
    model = LogisticRegression(warm_start=True, fit_intercept=False).fit(*data(3, np.random.default_rng(3)))
    with pytest.raises(DataError, match=r"warm_start: .*shape \(3, 8\), these rows need \(1, 8\)"):
        model.fit(*data(2, np.random.default_rng(3)))


# Beyond 2,000 rows a column Newton's method sees every second row, or fewer.
@pytest.mark.parametrize("period", [2, 3, 10, 30])
@pytest.mark.parametrize("kind", [LogisticRegression, LinearSVC])
def test_rows_in_a_regular_order_are_fitted_like_shuffled_ones(kind: Any, period: int) -> None:
    generator = np.random.default_rng(0)
    y = (np.arange(6000) % period == 0).astype(int)
    x = (y + generator.normal(size=6000))[:, None]
    order = generator.permutation(6000)
    regular, shuffled = kind().fit(x, y), kind().fit(x[order], y[order])
    assert regular.objective_ == pytest.approx(shuffled.objective_, rel=1e-4)
    assert regular.gap_ <= 1e-4 * regular.objective_
    assert len(regular.history_) < 15


def test_regular_weights_of_zero_slow_nothing_down() -> None:
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(6000, 1)), generator.integers(0, 2, 6000)
    weights = (np.arange(6000) % 3 != 0).astype(float)
    model = LogisticRegression().fit(x, y, weights)
    assert len(model.history_) < 10
    assert model.gap_ <= 1e-4 * model.objective_


def test_many_columns_are_fitted_by_conjugate_gradients() -> None:
    generator = np.random.default_rng(0)
    frequency = 1 / np.arange(1, 3001)
    x = sparse.csr_matrix(generator.random((2000, 3000)) < frequency, dtype=np.float32)
    y = (x @ generator.normal(size=3000) > 0).astype(int)
    model = LogisticRegression(C=10).fit(x, y)
    assert model.solver_.name == "newton-cg"
    assert len(model.history_) < 12
    assert model.gap_ <= 1e-4 * model.objective_


def test_columns_of_very_different_scale_are_warned_of() -> None:
    x, y = data(2, np.random.default_rng(4))
    x[:, 3] *= 1e6
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        with pytest.warns(ScaleWarning, match=r"column 3 .*StandardScaler"):
            LogisticRegression().fit(x, y)


def test_without_a_penalty_the_bound_is_the_objective() -> None:
    x, y = data(2, np.random.default_rng(7))
    with pytest.warns(ConvergenceWarning, match="Without a penalty"):
        model = LogisticRegression(C=np.inf).fit(x, y)
    assert model.gap_ == model.objective_


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (LogisticRegression(l1_ratio=0.5), "only the L2 penalty"),
        (LinearSVC(loss="hinge"), "loss='hinge' has no certificate"),
        (LinearSVC(multi_class="crammer_singer"), "multi_class='crammer_singer'"),
        (Ridge(positive=True), "positive=True"),
    ],
)
def test_what_has_no_certificate_is_refused_by_name(model: Any, words: str) -> None:
    x, y = data(2, np.random.default_rng(8))
    with pytest.raises(DataError, match=words):
        model.fit(x, y)


@pytest.mark.parametrize("kind", [LogisticRegression, LinearSVC])
def test_one_class_is_refused(kind: Any) -> None:
    with pytest.raises(DataError, match="one class"):
        kind().fit(np.eye(4), np.ones(4))


@pytest.mark.parametrize("kind", [LogisticRegression, LinearSVC])
def test_balanced_weights_of_a_class_whose_rows_weigh_nothing_are_refused(kind: Any) -> None:
    x, y = data(3, np.random.default_rng(9))
    with pytest.raises(DataError, match="class_weight='balanced' divides by 0, the weight of class 2"):
        kind(class_weight="balanced").fit(x, y, y != 2)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("kind", [LogisticRegression, LinearSVC])
def test_a_class_whose_rows_weigh_nothing_is_fitted_as_scikit_learn_does(
    kind: Any, intercept: bool, classes: int
) -> None:
    x, y = data(classes, np.random.default_rng(9))
    ours = kind(fit_intercept=intercept).fit(x, y, y != 1)
    assert np.isfinite(ours.coef_).all()
    assert np.isfinite(ours.intercept_).all()
    assert ours.classes_.tolist() == list(range(classes))
    if kind is LogisticRegression:  # scikit-learn's LinearSVC takes one class for another then
        theirs = kind._engine(fit_intercept=intercept).fit(x, y, sample_weight=y != 1)
        assert np.mean(ours.predict(x) == theirs.predict(x)) > 0.97
    if kind is LinearSVC or not intercept:  # else there is no optimum: the intercept grows without bound
        assert ours.gap_ <= 1e-4 * ours.objective_
    np.testing.assert_array_equal(kind(fit_intercept=intercept, class_weight={1: 0}).fit(x, y).classes_, ours.classes_)


def test_bagging_may_draw_no_row_of_a_class() -> None:
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(60, 3)), np.repeat([0, 1, 2], [57, 2, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = BaggingClassifier(LogisticRegression(), random_state=0).fit(x, y)
    assert np.isfinite(model.predict_proba(x)).all()


def test_liblinear_ignores_warm_start() -> None:
    x, y = data(2, np.random.default_rng(3))
    model = LogisticRegression(solver="liblinear", warm_start=True).fit(x, y).fit(x[:, 1:], y)
    assert model.coef_.shape == (1, 7)


def test_integer_labels_beyond_float64_stay_apart_in_memory() -> None:
    x, y = data(2, np.random.default_rng(3))
    assert LogisticRegression().fit(x, y + 2**53).classes_.tolist() == [2**53, 2**53 + 1]


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_negative_weights_are_refused(kind: Any) -> None:
    x, y = data(2, np.random.default_rng(9))
    with pytest.raises(ValueError, match="Negative values in data passed to `sample_weight`"):
        kind().fit(x, y, np.where(y == 0, -1, 1))


@pytest.mark.parametrize("kind", [LogisticRegression, LinearSVC])
def test_negative_weights_of_classes_are_refused(kind: Any) -> None:
    x, y = data(2, np.random.default_rng(9))
    with pytest.raises(DataError, match=r"class_weight=\{0: -1\}: expected finite numbers of zero or more"):
        kind(class_weight={0: -1}).fit(x, y)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_duplicate_entries_of_sparse_rows_add_up(kind: Any) -> None:
    generator = np.random.default_rng(0)
    columns = generator.integers(0, 8, 300 * 6)  # unsorted, and some twice in a row
    x = sparse.csr_matrix((generator.normal(size=1800), columns, np.arange(0, 1801, 6)), shape=(300, 8))
    y = (x.toarray() @ generator.normal(size=8) + generator.normal(size=300) > 0).astype(int)
    assert kind().fit(x, y).objective_ == pytest.approx(kind().fit(x.toarray(), y).objective_, rel=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_nan_and_infinities_are_refused(kind: Any, bad: float) -> None:
    x, y = data(2, np.random.default_rng(9))
    x[7, 2] = bad
    with pytest.raises(ValueError, match=r"NaN|infinity"):
        kind().fit(x, y)


@pytest.mark.parametrize("form", [np.asarray, sparse.csr_matrix])
@pytest.mark.parametrize(("dtype", "large"), [(np.float64, 1e200), (np.float64, 1e31), (np.float32, 1e25)])
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_a_column_that_is_too_large_is_named(kind: Any, dtype: Any, large: float, form: Any) -> None:
    x, y = data(2, np.random.default_rng(9))
    x[7, 2] = large * (1e6 if kind is LinearSVC and dtype == np.float32 else 1)
    with pytest.raises(DataError, match=r"column 2 reaches 1e\+\d+; .* at most: scale the columns first"):
        kind().fit(form(x.astype(dtype)), y)


def test_squares_of_a_column_that_overflow_with_their_cost_are_named() -> None:
    x, y = data(2, np.random.default_rng(9))
    x[:, 2] *= 1e16
    with (
        pytest.warns(RuntimeWarning, match="overflow"),
        pytest.warns(ScaleWarning),
        pytest.raises(DataError, match="the squares of column 2 overflow: scale the columns first, or lower C"),
    ):
        LogisticRegression(C=1e9).fit(x.astype(np.float32), y)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_objective_that_is_no_number_is_an_error(bad: float) -> None:
    x, y = data(2, np.random.default_rng(9))
    model = LogisticRegression(warm_start=True).fit(x, y)
    model.coef_ = model.coef_ * bad
    with pytest.raises(DataError, match=r"the objective is (nan|inf): features, labels, weights or C are too large"):
        model.fit(x, y)
