"""The others' solvers, whichever are installed: pip install snapml vowpalwabbit dask-ml.

Each returns its parameters (1, 257), with the intercept last, after the seconds that it took beyond reading or
converting its input. C = 1: the penalty is half the square of the coefficients, the loss is summed over all rows.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bascule_glm import FileRows

Fitted = tuple[float, NDArray[np.float64]]


def snapml(rows: FileRows) -> Fitted:
    """Snap ML holds the rows in memory."""
    loaded = rows.load()
    return snapml_arrays(loaded.x, loaded.labels)


def snapml_arrays(x: Any, labels: NDArray[Any]) -> Fitted:
    """Snap ML on arrays. It penalises the intercept."""
    from snapml import LogisticRegression

    start = time.monotonic()
    model = LogisticRegression(
        regularizer=1.0, fit_intercept=True, tol=1e-5, max_iter=1000, n_jobs=os.cpu_count() or 1, normalize=False
    ).fit(x, labels)
    return time.monotonic() - start, _joined(model.coef_, model.intercept_)


def vowpal_wabbit(rows: FileRows) -> Fitted:
    """L-BFGS in passes over its cache, which is made first from CSV; its own step from pass to pass ends it."""
    import pyarrow as pa
    import pyarrow.csv
    from vowpalwabbit import Workspace

    text = rows.path.with_suffix(".csv")
    cache = text.with_suffix(".cache")
    names = [f"x{j}" for j in range(rows.n_features)]
    if not cache.exists():
        schema = pa.schema([("_label", pa.int8()), *((name, pa.float32()) for name in names)])
        with pyarrow.csv.CSVWriter(text, schema) as writer:
            for block in rows:
                signs = np.where(block.labels > 0, 1, -1).astype(np.int8)
                writer.write_table(pa.table([signs, *np.ascontiguousarray(block.x.T)], schema=schema))
        Workspace(f"-d {text} --csv --cache_file {cache} -k --noop --quiet").finish()
        text.unlink()
    start = time.monotonic()
    model = Workspace(
        f"--cache_file {cache} --loss_function logistic --bfgs --l2 1 --no_bias_regularization --holdout_off "
        "--passes 60 --termination 1e-7 --quiet"
    )
    seconds = time.monotonic() - start
    coefficients = [model.get_weight_from_name(name) for name in names]
    return seconds, _joined(coefficients, model.get_weight_from_name("Constant"))


def dask_ml(rows: FileRows) -> Fitted:
    """Newton's method over chunks that are read in each pass; its intercept is penalised like a coefficient."""
    import dask.array
    from dask_ml.linear_model import LogisticRegression

    chunks = -(-rows.nbytes // (32 << 20))
    parts = [rows.share(number, chunks) for number in range(chunks)]

    def features(part: FileRows) -> Any:
        read = dask.delayed(lambda: part.load().x)()
        return dask.array.from_delayed(read, shape=(part.n_rows, part.n_features), dtype=part.dtype)

    def labels(part: FileRows) -> Any:
        read = dask.delayed(lambda: part.labels()[0])()
        return dask.array.from_delayed(read, shape=(part.n_rows,), dtype=np.dtype(np.float64))

    x, y = (dask.array.concatenate([one(part) for part in parts]) for one in (features, labels))
    start = time.monotonic()
    with dask.config.set(scheduler="threads", num_workers=os.cpu_count()):
        model = LogisticRegression(solver="newton", C=1.0, tol=1e-4).fit(x, y)
    return time.monotonic() - start, _joined(model.coef_, model.intercept_)


def _joined(coefficients: Any, intercept: Any) -> NDArray[np.float64]:
    return np.append(np.ravel(coefficients), np.ravel(intercept)[0]).astype(np.float64)[None]


RIVALS = {"Snap ML, in memory": snapml, "Vowpal Wabbit": vowpal_wabbit, "dask-ml": dask_ml}
