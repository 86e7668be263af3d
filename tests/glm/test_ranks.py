"""Ranks that each have a share of the rows, over DDL."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.datasets import dump_svmlight_file, load_breast_cancer, load_digits
from sklearn.preprocessing import scale

from bascule_glm import DataError, LinearSVC, LogisticRegression, Ridge, convert
from bascule_glm.ranks import Ranks

pytestmark = pytest.mark.timeout(300)  # processes that import scikit-learn, on a busy machine
DDLRUN = Path(sys.executable).with_name("ddlrun")

FIT = """
import json
import bascule_glm, ddl, numpy as np
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.preprocessing import scale

ddl.init()
for data in (load_breast_cancer, load_digits):
    x, y = data(return_X_y=True)
    x, order = scale(x), np.argsort(y, kind="stable")  # sorted: a rank may have one class alone
    mine = np.array_split(order, ddl.size())[ddl.rank()]
    for kind in (bascule_glm.LogisticRegression, bascule_glm.LinearSVC, bascule_glm.Ridge):
        model = kind(tol=1e-7, distributed=True).fit(x[mine], y[mine])
        found = np.concatenate([np.ravel(model.coef_), np.ravel(model.intercept_)])
        same = bool((ddl.allgather(found) == found).all())
        if ddl.rank() == 0:
            print("found", json.dumps([model.objective_, model.gap_, same, model.solver_.reason]), flush=True)
"""


def ddlrun(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(DDLRUN), "-np", "2", sys.executable, "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def test_ranks_reach_the_objective_of_one_process() -> None:
    done = ddlrun(FIT)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line.partition("found ")[2]) for line in done.stdout.splitlines() if "found " in line]
    expected: list[Any] = []
    for data in (load_breast_cancer, load_digits):
        x, y = data(return_X_y=True)
        expected += [kind(tol=1e-7).fit(scale(x), y) for kind in (LogisticRegression, LinearSVC, Ridge)]
    for (objective, gap, same, reason), alone in zip(lines, expected, strict=True):
        assert same
        assert "2 ranks" in reason
        assert gap <= 1e-7 * objective
        assert abs(objective - alone.objective_) <= max(gap, alone.gap_)


def test_shares_with_different_numbers_of_features_are_refused_by_every_rank() -> None:
    done = ddlrun(
        "import bascule_glm, ddl, numpy as np; ddl.init()\n"
        "try: bascule_glm.Ridge(distributed=True).fit(np.eye(4, 3 + ddl.rank()), np.arange(4))\n"
        "except bascule_glm.DataError as error: print('refused:', error)"
    )
    assert done.stdout.count("refused: rank 0 has n_features=3 and rank 1 has n_features=4") == 2, (
        done.stdout + done.stderr
    )


REFUSED = """
import sys, bascule_glm, ddl, numpy as np
ddl.init()
mine, x, y = ddl.rank() == 1, np.eye(4), np.array([0, 1, 0, 1])
rows = bascule_glm.open_rows(sys.argv[1])
turned = bascule_glm.open_rows(sys.argv[2])
bad = np.where(x == 0, np.nan, x)
for given, limit in (
    ((bad if mine else x, y), None),
    ((x, np.array(list("abab")) if mine else y), None),
    ((rows,), 1 if mine else None),
    ((rows.share(ddl.rank(), 2),), None),
    ((turned if mine else rows,), None),
):
    try:
        bascule_glm.LogisticRegression(distributed=True, limit=limit).fit(*given)
    except ValueError as error:
        print("refused:", error, flush=True)
warm = bascule_glm.LogisticRegression(distributed=True, warm_start=True).fit(x, y)
warm.coef_ = warm.coef_ + mine
plain = bascule_glm.LogisticRegression(distributed=True)
for model, *given in (
    (bascule_glm.LogisticRegression(C=1.0 + mine, distributed=True), x, y),
    (bascule_glm.Ridge(distributed=True), x, x[:, :2] if mine else y),
    (warm, x, y),
    (bascule_glm.LogisticRegression(distributed=True, class_weight="balanced"), x, y, 1 - y),
    (plain, x, y, 0 * y),
    (plain, x, y + 2**53 * mine),
    (bascule_glm.LinearSVC(distributed=True) if mine else plain, x, y),
    (plain, x * np.where(mine, 1e200, 1), y),
):
    try:
        model.fit(*given)
    except ValueError as error:
        print("refused:", error, flush=True)
"""


def test_what_one_rank_refuses_every_rank_refuses(tmp_path: Path) -> None:
    paths = []
    for names in (["a", "b", "y"], ["b", "a", "y"]):
        source = tmp_path / f"{names[0]}.parquet"
        pq.write_table(pa.table([[0.0, 1], [1.0, 0], [0, 1]], names=names), source)
        paths.append(str(convert(source, label="y").path))
    done = ddlrun(REFUSED, *paths)
    assert done.returncode == 0, done.stderr
    for words, ranks in (
        ("Input X contains NaN", 2),
        ("rank 1 cannot fit its rows: Input X contains NaN", 1),
        ("raise the limit by", 2),
        ("share of ", 2),
        ("rank 0 has column 0='a' and rank 1 has column 0='b'", 2),
        ("rank 0 has C=1.0 and rank 1 has C=2.0", 2),
        ("rank 0 has y.shape[1:]=() and rank 1 has y.shape[1:]=(2,)", 2),
        ("rank 0 has warm_start's coef_ and intercept_='an array of shape (5,) with checksum", 2),
        ("class_weight='balanced' divides by 0, the weight of class 1.0", 2),
        ("at least one non-zero number", 2),
        ("labels are <U1: between ranks they must be numbers", 2),
        ("labels of 2**53 or more", 2),
        ("rank 0 has the estimator='LogisticRegression' and rank 1 has the estimator='LinearSVC'", 2),
        ("column 0 reaches 1e+200", 2),
    ):
        assert done.stdout.count(words) == ranks, (words, done.stdout)


ALIKE = """
import sys, bascule_glm, ddl, numpy as np
ddl.init()
mine, x, y = ddl.rank() == 1, np.eye(4), np.array([0, 1, 0, 1])
weights = {1: 2.0, 0: 1} if mine else {0: 1.0, 1: 2}
model = bascule_glm.LogisticRegression(C=1 if mine else np.float64(1), class_weight=weights, distributed=True)
print("fitted:", model.fit(x, y).gap_, flush=True)
for given in (np.zeros(4) if mine else np.ones(4), np.ones(4)):
    print("weighed:", bascule_glm.Ridge(distributed=True).fit(x, y + 1, given).objective_, flush=True)
print("half:", bascule_glm.Ridge().fit(x, y + 1).objective_, flush=True)
rows = bascule_glm.open_rows(sys.argv[1 + mine])
print("named:", bascule_glm.LogisticRegression(distributed=True).fit(rows).gap_, flush=True)
alpha = np.ones(1500)
alpha[700] += mine
try:
    bascule_glm.Ridge(alpha, distributed=True).fit(x, np.ones((4, 1500)))
except ValueError as error:
    print("refused:", error, flush=True)
"""


def test_ranks_may_say_the_same_in_other_words(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [0.0, 1], "b": [1.0, 0], "y": [0, 1]}), tmp_path / "a.parquet")
    (tmp_path / "b.svm").write_text("0 2:1\n1 1:1\n")
    paths = [
        str(convert(tmp_path / "a.parquet", label="y", dtype="float32").path),
        str(convert(tmp_path / "b.svm").path),
    ]
    done = ddlrun(ALIKE, *paths)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fitted:") == done.stdout.count("named:") == 2
    said = {words: re.findall(rf"{words}: ([0-9.e-]+)", done.stdout) for words in ("weighed", "half")}
    assert float(said["weighed"][0]) == pytest.approx(float(said["half"][0]))  # one rank's rows weigh nothing
    assert done.stdout.count("rank 0 has alpha='an array of shape (1500,) with checksum") == 2


DEAD = """
import os, bascule_glm, ddl, numpy as np
ddl.init()
ddl.barrier()
if ddl.rank() == 1:
    os._exit(7)
try:
    bascule_glm.Ridge(distributed=True).fit(np.eye(4), np.arange(4))
except ddl.PeerLostError as error:
    print("lost:", error)
"""


def test_a_dead_rank_is_named() -> None:
    with socket.socket() as free:  # no launcher, which would end the job when a rank dies
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DDL_TRANSPORT": "tcp", "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", DEAD],
            env=os.environ | shared | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=280)[0] for rank in ranks]
    assert "lost: rank 1 " in said[0]
    assert [rank.returncode for rank in ranks] == [0, 7]


SHARE = """
import sys, bascule_glm, ddl
ddl.init()
rows = bascule_glm.open_rows(sys.argv[1]).share(ddl.rank(), ddl.size())
model = bascule_glm.LogisticRegression(tol=1e-7, distributed=True, verbose=1).fit(rows)
print(f"rank {ddl.rank()}: {rows.n_rows} rows, objective {float(model.objective_)!r}", flush=True)
"""


def test_ranks_share_one_file(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(9000, 30)).round(3)
    y = (x.sum(axis=1) + 3 * generator.normal(size=9000) > 0).astype(int)

    dump_svmlight_file(x, y, str(tmp_path / "a.svm"), zero_based=False)

    rows = convert(tmp_path / "a.svm")
    done = ddlrun(SHARE, str(rows.path))
    assert done.returncode == 0, done.stderr
    said = [line.partition("rank ")[2] for line in done.stdout.splitlines() if "rows, objective" in line]
    counts = [int(line.split()[1]) for line in said]
    objectives = {float(line.split()[-1]) for line in said}
    assert sum(counts) == 9000
    assert min(counts) > 0
    assert len(objectives) == 1
    alone = LogisticRegression(tol=1e-7).fit(rows)
    assert objectives.pop() == pytest.approx(alone.objective_, rel=2e-7)
    assert done.stdout.count("pass 1:") == 1  # one rank prints


def test_an_error_may_name_a_path_that_is_no_text() -> None:
    with pytest.raises(DataError, match="cannot be read"), Ranks().agree():
        raise DataError("\udc80.rows cannot be read")
