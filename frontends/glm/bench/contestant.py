"""One fit in a process of its own: `contestant.py NAME FILE LIMIT SECONDS SEED` prints a line of JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rivals import RIVALS
from sklearn.linear_model import SGDClassifier

from bascule_glm import FileRows, LogisticRegression
from bascule_glm.certified import _sample
from bascule_glm.objective import Problem, evaluate
from bascule_glm.ranks import ALONE
from bascule_glm.rows import MemoryRows
from bascule_glm.solver import History

TOL = 1e-4


def problem_of(model: LogisticRegression, rows: Any) -> Problem:
    """What the model minimises on these rows."""
    names, weights = rows.labels() if isinstance(rows, FileRows) else (rows.labels, rows.weights)
    return model._problem(model._labels(names, weights, ALONE), "", ALONE)


def passes(rows: FileRows, limit: int, seed: int, tol: float = TOL) -> dict[str, Any]:
    """From the file within the limit."""
    start = time.monotonic()
    model = LogisticRegression(tol=tol, limit=limit, random_state=seed).fit(rows)
    return _line(model, time.monotonic() - start)


def passes_in_memory(rows: FileRows) -> dict[str, Any]:
    """The same solver over arrays in memory. Its sample is every so many rows, so all runs compute the same."""
    loaded = rows.load()
    model = LogisticRegression(tol=TOL)
    start = time.monotonic()
    history = History(TOL, False)
    labels = model._labels(loaded.labels, loaded.weights, ALONE)
    problem = model._problem(labels, "", ALONE)
    model._fit_passes(loaded, problem, history, _sample(loaded, problem), labels)
    model._conclude(history)
    return _line(model, time.monotonic() - start)


def scikit_learn(rows: FileRows) -> dict[str, Any]:
    """scikit-learn's Newton's method over arrays in memory, with the certificate."""
    loaded = rows.load()
    start = time.monotonic()
    model = LogisticRegression(tol=TOL, solver="newton-cholesky").fit(loaded.x, loaded.labels)
    return _line(model, time.monotonic() - start)


def partial_fit(rows: FileRows, seconds: float, seed: int) -> dict[str, Any]:
    """scikit-learn's SGDClassifier, block by block, for as many seconds."""
    model = SGDClassifier(loss="log_loss", alpha=1 / rows.n_rows, random_state=seed)
    start, passes_done = time.monotonic(), 0
    while time.monotonic() - start < seconds:
        for block in rows:
            model.partial_fit(block.x, block.labels, classes=[0, 1])
            if time.monotonic() - start >= seconds:
                break
        else:
            passes_done += 1
    seconds = time.monotonic() - start
    parameters = np.concatenate([model.coef_, model.intercept_[:, None]], axis=1).astype(np.float64)
    return {"seconds": seconds, "objective": objective(rows, parameters), "passes": passes_done}


def rival(rows: FileRows, name: str) -> dict[str, Any]:
    """Another library's solver, if it is installed."""
    try:
        seconds, parameters = RIVALS[name](rows)
    except ImportError as error:
        return {"missing": str(error)}
    return {"seconds": seconds, "objective": objective(rows, parameters)}


def objective(rows: FileRows | MemoryRows, parameters: NDArray[np.float64]) -> float:
    """What ours minimises, at these parameters (1, columns + 1)."""
    return evaluate(problem_of(LogisticRegression(), rows), rows, parameters).value


def ranks(rows: FileRows, limit: int, seed: int) -> dict[str, Any]:
    """Ranks of ddlrun, each with its share of the file and of the limit."""
    import ddl

    ddl.init()
    mine = rows.share(ddl.rank(), ddl.size())
    # Touch `limit` bytes first: this VM gets new memory from its host at only 0.3 GB/s.
    np.ones(limit, dtype=np.uint8)
    ddl.barrier()
    start = time.monotonic()
    model = LogisticRegression(tol=TOL, limit=limit, random_state=seed, distributed=True).fit(mine)
    return _line(model, time.monotonic() - start) if ddl.rank() == 0 else {}


def _line(model: LogisticRegression, seconds: float) -> dict[str, Any]:
    return {
        "seconds": seconds, "objective": model.objective_, "gap": model.gap_, "passes": len(model.history_),
        "nbytes": sum(one.nbytes for one in model.history_), "solver": model.solver_.name,
    }  # fmt: skip


def main(name: str, file: str, limit: str, seconds: str, seed: str) -> None:
    """Run one and print what it found."""
    rows = FileRows(file)
    calls = {
        "passes": lambda: passes(rows, int(limit), int(seed)),
        "optimum": lambda: passes(rows, int(limit), int(seed), 1e-9),
        "passes in memory": lambda: passes_in_memory(rows),
        "scikit-learn": lambda: scikit_learn(rows),
        "partial_fit": lambda: partial_fit(rows, float(seconds), int(seed)),
        "ranks": lambda: ranks(rows, int(limit), int(seed)),
    }
    if found := calls[name]() if name in calls else rival(rows, name):
        print("found", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
