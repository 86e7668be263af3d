"""Files: converted once, read in passes, fitted within a limit."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import sparse
from sklearn.datasets import dump_svmlight_file
from sklearn.exceptions import ConvergenceWarning

import bascule_glm.budget
import bascule_glm.certified
import bascule_glm.files
import bascule_glm.rows
import bascule_glm.sources
from bascule_glm import (
    DataError,
    FileError,
    FileRows,
    LinearSVC,
    LogisticRegression,
    Ridge,
    ScaleWarning,
    convert,
    open_rows,
)
from bascule_glm.budget import Budget
from lms.memory.resident import ResidentSet
from lms.units import parse_size

N, D = 6000, 40


@pytest.fixture(scope="module")
def arrays() -> tuple[Any, Any, Any]:
    """Features, labels of three classes by which the rows are sorted, and weights."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(N, D)).astype(np.float32)
    y = np.digitize(x @ generator.normal(size=D) / 5 + generator.normal(size=N), [-0.5, 0.5])
    order = np.argsort(y, kind="stable")
    return x[order], y[order], generator.uniform(0.5, 2, N)


@pytest.fixture(scope="module")
def parquet(arrays: tuple[Any, Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    x, y, weights = arrays
    path = tmp_path_factory.mktemp("glm") / "sorted.parquet"
    columns = {f"x{j}": x[:, j] for j in range(D)} | {"y": y, "w": weights}
    pq.write_table(pa.table(columns), path, row_group_size=1000)
    return path


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of many blocks. A fit may hold a part of them; the limit itself is the real one's affair."""
    monkeypatch.setattr(bascule_glm.rows, "_BLOCK", 16384)
    monkeypatch.setattr(bascule_glm.sources, "_ROWS", 1 << 18)
    monkeypatch.setattr(bascule_glm.sources, "_TEXT", 1 << 16)
    monkeypatch.setattr(bascule_glm.budget, "READ_AHEAD", 0)
    monkeypatch.setattr(
        bascule_glm.certified, "budget", lambda limit: Budget("a test's", 2_500_000 if limit else 1 << 40)
    )


def rows_of(rows: FileRows) -> tuple[Any, Any, Any]:
    blocks = [(b.x.toarray() if sparse.issparse(b.x) else b.x.copy(), b.labels.copy(), b.weights.copy()) for b in rows]
    return tuple(np.concatenate(part) for part in zip(*blocks, strict=True))


@pytest.mark.usefixtures("_small_blocks")
def test_parquet_comes_back_as_it_was(parquet: Path, arrays: tuple[Any, Any, Any], tmp_path: Path) -> None:
    rows = convert(parquet, tmp_path / "a.rows", label="y", weight="w")
    for found, expected in zip(rows_of(rows), arrays, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert (rows.n_rows, rows.n_features, rows.dtype, rows.sparse) == (N, D, np.float32, False)
    assert rows.names == [f"x{j}" for j in range(D)]
    assert len(rows.about["blocks"]) > 50
    labels, weights = rows.labels()
    np.testing.assert_array_equal(labels, arrays[1])
    np.testing.assert_array_equal(weights, arrays[2])


@pytest.mark.usefixtures("_small_blocks")
def test_svmlight_comes_back_as_it_was(arrays: tuple[Any, Any, Any], tmp_path: Path) -> None:
    x, y, _ = arrays
    x = np.where(np.abs(x) > 1, x, 0)
    dump_svmlight_file(x, y, str(tmp_path / "a.svm"), zero_based=False)
    rows = convert(tmp_path / "a.svm")
    found = rows_of(rows)
    np.testing.assert_array_equal(found[0], x)
    np.testing.assert_array_equal(found[1], y)
    assert rows.sparse
    assert rows.path == tmp_path / "a.svm.rows"


@pytest.mark.usefixtures("_small_blocks")
def test_arrow_comes_back_as_it_was(arrays: tuple[Any, Any, Any], tmp_path: Path) -> None:
    table = pa.table({"a": arrays[0][:, 0].astype(float), "b": arrays[1], "c": arrays[1] > 0})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=700)
    found = rows_of(convert(tmp_path / "a.arrow", label="b"))
    np.testing.assert_array_equal(found[0], np.stack([arrays[0][:, 0], arrays[1] > 0], axis=1))


@pytest.mark.filterwarnings("ignore:X does not have valid feature names")
@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("kind", [LogisticRegression, LinearSVC, Ridge])
def test_a_sorted_file_is_fitted_as_the_arrays_are(
    kind: Any, intercept: bool, parquet: Path, arrays: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    x, y, weights = arrays
    rows = convert(parquet, tmp_path / "a.rows", label="y", weight="w")
    more: dict[str, Any] = {} if kind is Ridge else {"class_weight": "balanced"}
    model = kind(tol=1e-10, fit_intercept=intercept, random_state=0, limit="1GB", **more).fit(rows)
    inside = kind(tol=1e-10, fit_intercept=intercept, **more).fit(x, y, weights)
    assert "do not fit into limit" in model.solver_.reason
    assert model.gap_ <= 1e-10 * model.objective_
    assert model.objective_ == pytest.approx(inside.objective_, rel=2e-10)
    np.testing.assert_allclose(model.coef_, inside.coef_, atol=1e-3)
    assert len(model.history_) < 25
    assert {one.nbytes for one in model.history_} == {0}  # all blocks stay in memory
    # Prediction from the file, too.
    np.testing.assert_allclose(model.predict(rows), model.predict(x))
    assert model.score(rows) == pytest.approx(model.score(x, y, weights))


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("kind", [LogisticRegression, LinearSVC])
def test_a_sample_that_lacks_a_class_of_a_sorted_file_does_no_harm(
    kind: Any, blocks: int, parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = convert(parquet, tmp_path / "a.rows", label="y")
    monkeypatch.setattr(Budget, "held", lambda *_: blocks * rows.largest_block)
    model = kind(tol=1e-6, random_state=0, limit="1GB").fit(rows)
    assert model.gap_ <= 1e-6 * model.objective_


@pytest.mark.usefixtures("_small_blocks")
def test_a_sparse_file_with_many_columns_is_fitted_as_the_arrays_are(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    x = sparse.random(4000, 3000, density=0.01, random_state=3, format="csr")
    y = (x @ generator.normal(size=3000) + 0.3 * generator.normal(size=4000) > 0).astype(int)
    dump_svmlight_file(x, y, str(tmp_path / "a.svm"), zero_based=False)
    rows = convert(tmp_path / "a.svm", n_features=3000, dtype="float64")
    model = LogisticRegression(tol=1e-7, C=10, random_state=0, limit="1GB").fit(rows)
    inside = LogisticRegression(tol=1e-7, C=10).fit(x, y)
    assert "conjugate gradients" in model.solver_.reason
    assert model.objective_ == pytest.approx(inside.objective_, rel=2e-7)


@pytest.mark.usefixtures("_small_blocks")
def test_a_file_that_fits_goes_to_scikit_learn(
    parquet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = convert(parquet, tmp_path / "a.rows", label="y")
    model = LogisticRegression(verbose=1).fit(rows)
    assert "fit into limit" in model.solver_.reason
    assert "of scikit-learn" in capsys.readouterr().out


@pytest.mark.usefixtures("_small_blocks")
def test_weights_given_as_an_array_are_those_of_the_rows(
    parquet: Path, arrays: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    rows = convert(parquet, tmp_path / "a.rows", label="y")
    np.testing.assert_array_equal(rows_of(rows.weighted(arrays[2]))[2], arrays[2])
    for bad in (arrays[2][1:], -arrays[2], np.nan * arrays[2]):
        with pytest.raises(DataError, match=f"expected {N} finite numbers"):
            rows.weighted(bad)


@pytest.mark.parametrize("limit", [None, "1GB"])
@pytest.mark.parametrize("kind", [LogisticRegression, Ridge])
@pytest.mark.usefixtures("_small_blocks")
def test_rows_that_all_weigh_nothing_are_refused(kind: Any, limit: Any, parquet: Path, tmp_path: Path) -> None:
    rows = convert(parquet, tmp_path / "a.rows", label="y")
    with pytest.raises(DataError, match="at least one non-zero number"):
        kind(limit=limit).fit(rows, None, np.zeros(N))


@pytest.mark.usefixtures("_small_blocks")
def test_a_class_of_a_file_whose_rows_weigh_nothing_is_fitted(
    parquet: Path, arrays: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    rows = convert(parquet, tmp_path / "a.rows", label="y", weight="w")
    model = LogisticRegression(random_state=0, limit="1GB", fit_intercept=False).fit(rows, None, arrays[1] != 1)
    inside = LogisticRegression(fit_intercept=False).fit(arrays[0], arrays[1], arrays[2] * (arrays[1] != 1))
    assert model.objective_ == pytest.approx(inside.objective_, rel=2e-4)
    assert "fit into" in model.solver_.reason


@pytest.mark.usefixtures("_small_blocks")
def test_a_warm_start_needs_no_more_passes(parquet: Path, tmp_path: Path) -> None:
    rows = convert(parquet, tmp_path / "a.rows", label="y")
    model = LogisticRegression(tol=1e-6, limit="1GB", warm_start=True, random_state=0).fit(rows)
    model.fit(rows)
    assert len(model.history_) == 1


@pytest.mark.timeout(300)
def test_a_limit_is_kept_in_a_process_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    generator = np.random.default_rng(0)
    x = generator.normal(size=(200_000, 64)).astype(np.float32)  # 51 MB
    pq.write_table(pa.table({f"x{j}": x[:, j] for j in range(64)} | {"y": (x[:, 0] > 0).astype(np.int8)}), path)
    rows = convert(path, label="y")
    program = """
import json, sys
import bascule_glm
from lms.memory.resident import ResidentSet
resident = ResidentSet()
limit = resident.current() + (60 << 20)
resident.reset_peak()
model = bascule_glm.LogisticRegression(limit=limit).fit(sys.argv[1])
print(json.dumps([limit, resident.peak(), model.gap_ / model.objective_, model.solver_.reason]))
"""
    done = subprocess.run([sys.executable, "-c", program, str(rows.path)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    limit, peak, gap, reason = json.loads(done.stdout)
    assert "do not fit" in reason
    assert peak <= limit
    assert gap <= 1e-4


def test_a_limit_below_one_block_says_how_much_is_missing(parquet: Path, tmp_path: Path) -> None:
    rows = convert(parquet, tmp_path / "a.rows", label="y")
    with pytest.raises(DataError, match=r"limit='1MB'.*raise the limit by"):
        LogisticRegression(limit="1MB").fit(rows)
    with pytest.raises(ValueError, match="limit='much'"):
        LogisticRegression(limit="much").fit(rows)
    assert ResidentSet().current() > 1 << 20


@pytest.mark.usefixtures("_small_blocks")
def test_a_limit_that_is_raised_as_the_error_says_is_enough(
    parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = convert(parquet, tmp_path / "a.rows", label="y")
    monkeypatch.setattr(bascule_glm.certified, "budget", lambda limit: Budget(str(limit), limit))
    with pytest.raises(DataError, match="raise the limit by") as refused:
        Ridge(limit=50_000).fit(rows)
    found = re.search(r"raise the limit by (.*) or more", str(refused.value))
    assert found is not None
    more = parse_size(found[1], "more")
    model = Ridge(limit=50_000 + more).fit(rows)
    assert "do not fit" in model.solver_.reason
    with pytest.raises(DataError, match="raise the limit by"):  # it asks for little more than is needed
        Ridge(limit=50_000 + int(more / 1.03)).fit(rows)


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("share", [0, 0.3, 1])
def test_a_pass_has_each_row_once_whatever_is_held_in_memory(parquet: Path, tmp_path: Path, share: float) -> None:
    rows = convert(parquet, tmp_path / "a.rows", label="y")
    holding = rows.hold(int(share * rows.nbytes), np.random.default_rng(0))
    assert holding.held is not None
    assert holding.nbytes < rows.nbytes

    def content(passed: Any) -> list[bytes]:
        return sorted(row.tobytes() for block in passed for row in np.column_stack([block.x, block.labels]))

    assert content(holding) == content(rows) == content(rows.load())


@pytest.mark.usefixtures("_small_blocks")
def test_a_sparse_sample_keeps_columns_of_four_bytes(
    arrays: tuple[Any, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump_svmlight_file(arrays[0][:2000], arrays[1][:2000], str(tmp_path / "a.svm"), zero_based=False)
    rows = convert(tmp_path / "a.svm")
    monkeypatch.setattr(bascule_glm.files, "WIDE", 40_000)
    monkeypatch.setattr(bascule_glm.budget, "WIDE", 40_000)
    drawn = rows.hold(rows.nbytes, np.random.default_rng(0)).held
    assert drawn is not None
    assert drawn.x.indices.dtype == np.int32
    assert 20_000 < drawn.x.nnz < 40_000
    assert not Budget("a test's", 1 << 40).holds(rows)
    with pytest.raises(DataError, match=rf"has {2000 * D} entries, too many rows to load"):
        rows.load()


@pytest.mark.usefixtures("_small_blocks")
def test_a_conversion_is_done_once_and_again_if_the_source_changes(parquet: Path, tmp_path: Path) -> None:
    source = tmp_path / "a.parquet"
    source.write_bytes(parquet.read_bytes())
    first = convert(source, label="y").path.stat()
    assert convert(source, label="y").path.stat().st_ino == first.st_ino
    assert convert(source, label="x0").path.stat().st_ino != first.st_ino
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.parquet", "a.parquet.rows"]


@pytest.mark.parametrize("suffix", ["parquet", "svm"])
@pytest.mark.usefixtures("_small_blocks")
def test_an_interrupted_conversion_goes_on_where_it_was(
    suffix: str, parquet: Path, arrays: tuple[Any, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, label = tmp_path / f"a.{suffix}", "y" if suffix == "parquet" else None
    if suffix == "parquet":
        source.write_bytes(parquet.read_bytes())
    else:
        dump_svmlight_file(arrays[0], arrays[1], str(source), zero_based=False)
    whole = convert(source, tmp_path / "whole.rows", label=label).path.read_bytes()
    monkeypatch.setattr(bascule_glm.sources, "_SAVE", 1)
    add, begun = bascule_glm.sources._Writer.add, list[int]()

    def interrupted(writer: Any, *chunk: Any) -> None:
        begun.append(writer.position)
        if len(begun) == 3:
            os.pwrite(writer._file.fileno(), b"half a block", writer._end)
            raise KeyboardInterrupt
        add(writer, *chunk)

    monkeypatch.setattr(bascule_glm.sources._Writer, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(source, label=label)
    assert not Path(f"{source}.rows").exists()
    rows = convert(source, label=label)
    assert begun[3] == begun[2] > 0
    assert rows.path.read_bytes() == whole


def test_a_conversion_that_another_version_began_starts_anew(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = convert(small, tmp_path / "whole.rows", label="even").path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(bascule_glm.sources, "_SAVE", 1)
        patch.setattr(bascule_glm.sources._Writer, "finish", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            convert(small, label="even")
    note = Path(f"{small}.rows.part.json")
    noted = json.loads(note.read_text())
    del noted["origin"]["format"]
    noted["blocks"] = [block[:3] for block in noted["blocks"]]
    note.write_text(json.dumps(noted))
    assert convert(small, label="even").path.read_bytes() == whole


@pytest.mark.timeout(300)
def test_a_killed_conversion_leaves_no_file_and_the_next_one_finishes(tmp_path: Path) -> None:
    source = tmp_path / "a.svm"
    source.write_text("".join(f"{i % 2} 1:{i} 2:1\n" for i in range(400_000)))
    program = "import sys, bascule_glm.sources as c; c._TEXT = c._SAVE = 4096; c.convert(sys.argv[1])"
    child = subprocess.Popen([sys.executable, "-c", program, str(source)])
    note = Path(f"{source}.rows.part.json")
    deadline = time.monotonic() + 200
    while not note.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert not Path(f"{source}.rows").exists()
    begun = json.loads(note.read_text())["position"]
    assert 0 < begun < source.stat().st_size
    rows = convert(source)
    assert rows.n_rows == 400_000
    np.testing.assert_array_equal(rows_of(rows)[0][:, 0], np.arange(400_000, dtype=np.float32))


@pytest.mark.usefixtures("_small_blocks")
def test_shares_hold_every_row_once(parquet: Path, arrays: tuple[Any, Any, Any], tmp_path: Path) -> None:
    rows = convert(parquet, tmp_path / "a.rows", label="y", weight="w")
    parts = [rows.share(rank, 3) for rank in range(3)]
    np.testing.assert_array_equal(np.concatenate([rows_of(part)[0] for part in parts]), arrays[0])
    assert max(part.n_rows for part in parts) < 1.2 * min(part.n_rows for part in parts)
    with pytest.raises(DataError, match="rank=3, size=3"):
        rows.share(3, 3)


def test_a_cut_file_is_told_from_a_whole_one(parquet: Path, tmp_path: Path) -> None:
    path = convert(parquet, tmp_path / "a.rows", label="y").path
    whole = path.read_bytes()
    path.write_bytes(whole[:-5000])
    with pytest.raises(FileError, match=rf"has {len(whole) - 5000} bytes and should have {len(whole)}"):
        open_rows(path)
    path.write_bytes(whole[:100])
    with pytest.raises(FileError, match="no whole file of row blocks"):
        open_rows(path)
    path.write_bytes(b"something else")
    with pytest.raises(FileError, match="no whole file of row blocks"):
        open_rows(path)
    with pytest.raises(FileError, match="cannot be read"):
        open_rows(tmp_path / "none.rows")


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("suffix", ["parquet", "svm"])
@pytest.mark.parametrize("place", ["features", "labels"])
def test_a_flipped_bit_of_a_block_is_an_error_however_it_is_read(
    place: str, suffix: str, parquet: Path, arrays: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    source, named = parquet, {"label": "y", "weight": "w"}
    if suffix == "svm":
        source, named = tmp_path / "a.svm", {}
        dump_svmlight_file(arrays[0][:1000], arrays[1][:1000], str(source), zero_based=False)
    rows = convert(source, tmp_path / "a.rows", **named)
    last = len(rows.about["blocks"]) - 1
    begin = rows.about["blocks"][last][0]
    looks: list[Any] = [list, FileRows.load, lambda rows: rows.hold(rows.nbytes, np.random.default_rng(0))]
    looks += [FileRows.labels] if place == "labels" else []
    content = bytearray(rows.path.read_bytes())
    content[begin + 6 + (rows.layout.labels_at(rows._parts(last)) if place == "labels" else 0)] ^= 0x40
    rows.path.write_bytes(content)
    for look in looks:
        with pytest.raises(FileError, match=rf"a\.rows is damaged: the block at byte {begin} .*Delete the file"):
            look(open_rows(rows.path))


@pytest.mark.usefixtures("_small_blocks")
@pytest.mark.parametrize("limit", [None, "1GB"])
@pytest.mark.parametrize("kind", [LogisticRegression, LinearSVC, Ridge])
def test_no_estimator_fits_a_damaged_file(kind: Any, limit: Any, parquet: Path, tmp_path: Path) -> None:
    rows = convert(parquet, tmp_path / "a.rows", label="y")
    with rows.path.open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff" * 8)
    with pytest.raises(FileError, match="is damaged: the block at byte 4096"):
        kind(limit=limit).fit(rows)


def test_a_damaged_index_is_an_error(small: Path) -> None:
    rows = convert(small, label="even")
    content = rows.path.read_bytes()
    rows.path.write_bytes(content.replace(b'"n_features": 3', b'"n_features": 2'))
    with pytest.raises(FileError, match=r"no whole file of row blocks \(its index is damaged\)"):
        open_rows(rows.path)


def test_a_file_of_another_version_is_refused_and_made_anew_from_its_source(small: Path) -> None:
    rows = convert(small, label="even")
    content = rows.path.read_bytes()
    rows.path.write_bytes(content.replace(b"BASCULE ROWS 2", b"BASCULE ROWS 1"))
    with pytest.raises(FileError, match=r"\(it is of another version\): convert its source again"):
        open_rows(rows.path)
    assert convert(small, label="even").path.read_bytes() == content


def test_a_file_that_is_cut_while_it_is_read_is_an_error(parquet: Path, tmp_path: Path) -> None:
    rows = convert(parquet, tmp_path / "a.rows", label="y")
    os.truncate(rows.path, 8192)
    with pytest.raises(FileError, match="was cut or replaced after it was opened"):
        list(rows)
    with pytest.raises(FileError, match="was cut or replaced after it was opened"):
        rows.labels()


def test_rows_whose_file_was_converted_anew_are_an_error(small: Path) -> None:
    rows = convert(small, label="even")
    convert(small, label="odd")  # as many bytes
    for look in (list, FileRows.labels):
        with pytest.raises(FileError, match="was cut or replaced after it was opened"):
            look(rows)


def test_the_same_file_touched_or_copied_is_read_on(small: Path) -> None:
    rows = convert(small, label="even")
    copied = rows.path.with_suffix(".copy")
    copied.write_bytes(rows.path.read_bytes())
    os.replace(copied, rows.path)
    os.utime(rows.path, (1, 1))
    assert rows_of(rows)[1].tolist() == [1, 0, 1, 0]
    assert rows.labels()[0].tolist() == [1, 0, 1, 0]


@pytest.mark.usefixtures("_small_blocks")
def test_short_reads_go_on_if_the_file_system_has_no_direct_ones(
    parquet: Path, arrays: tuple[Any, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = convert(parquet, tmp_path / "a.rows", label="y", weight="w")
    preadv = os.preadv
    monkeypatch.setattr(bascule_glm.files, "_open_direct", lambda path: path.open("rb", buffering=0))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [memoryview(views[0])[:6000]], offset))
    np.testing.assert_array_equal(rows_of(rows)[0], arrays[0])


def test_a_full_disk_is_named_and_the_conversion_goes_on_when_there_is_room(
    parquet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bascule_glm.sources, "_ROWS", 1 << 18)
    monkeypatch.setattr(bascule_glm.sources, "_SAVE", 1)
    whole = convert(parquet, tmp_path / "whole.rows", label="y").path.read_bytes()
    add, begun = bascule_glm.sources._Writer.add, list[int]()

    def noted(writer: Any, *chunk: Any) -> None:
        begun.append(writer.position)
        add(writer, *chunk)

    monkeypatch.setattr(bascule_glm.sources._Writer, "add", noted)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)  # a file that may not grow, like a disk that has no room
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) // 2, limits[1]))
    try:
        with pytest.raises(FileError, match=r"could not be converted to .*a\.rows: File too large. Put that right"):
            convert(parquet, tmp_path / "a.rows", label="y")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "a.rows").exists()
    failed = len(begun)
    assert convert(parquet, tmp_path / "a.rows", label="y").path.read_bytes() == whole
    assert begun[failed] == begun[failed - 1] > 0


@pytest.mark.parametrize(("text", "seconds"), [("1 1:3\n0 1:1\n1 1:2\n", 0), ("1 1:3\n0 1:1\n", 1)])
def test_a_source_that_changes_while_it_is_converted_is_refused(
    text: str, seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a.svm"
    source.write_text("1 1:2\n0 1:1\n")
    add, before = bascule_glm.sources._Writer.add, source.stat().st_mtime_ns

    def changed(writer: Any, *chunk: Any) -> None:
        add(writer, *chunk)
        source.write_text(text)
        os.utime(source, ns=(before, before + seconds * 10**9))

    with monkeypatch.context() as patch:
        patch.setattr(bascule_glm.sources._Writer, "add", changed)
        with pytest.raises(FileError, match="changed while it was converted"):
            convert(source)
    assert rows_of(convert(source))[0].ravel()[0] == 3


def test_a_target_that_is_no_rows_file_is_refused_and_the_source_stays(tmp_path: Path) -> None:
    source = tmp_path / "a.svm"
    source.write_text("1 1:2\n")
    with pytest.raises(DataError, match=r"target=.*ends in \.rows"):
        convert(source, source)
    assert source.read_text() == "1 1:2\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 1:2\n0 1:nan\n", "row 2: a feature is nan"),
        ("1 1:2\n0 1:inf\n", "row 2: a feature is inf"),
        ("nan 1:2\n", "row 1: the label is nan"),
        ("1 1:2\ncat 1:2\n", "line 2: .*labels and values must be numbers"),
        ("1 1:2\n0 1:2 0:1\n", "line 2: .*zero_based=True"),
        ("1 1:2\n0 1:1e60\n", "beyond float32: give dtype='float64'"),
        ("", "the source is empty"),
        ("# a comment\n\n", "the source is empty"),
        ("1 2:1 1:1\n", "line 1: .*sorted and unique\\.$"),
        ("1 1:1 1:1\n", "line 1: .*sorted and unique"),
        ("1 1:2\n1 2:1\n", "there is one class"),
        ("1 1:2\n1:2 3:1\n", "line 2: it has no label"),
        (f"{2**53} 1:2\n{2**53 + 1} 2:1\n0 1:1\n", "cannot tell apart"),
    ],
)
def test_a_bad_svmlight_file_is_refused_with_the_place(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.svm").write_text(text)
    with pytest.raises(DataError, match=words):
        LogisticRegression().fit(tmp_path / "a.svm")


@pytest.mark.parametrize(
    ("columns", "label", "words"),
    [
        ({"a": [1.0, None], "y": [0, 1]}, "y", "row 2, column 'a': a feature is nan"),
        ({"a": [1.0, 2.0], "y": ["cat", "dog"]}, "y", "column 'y' holds string"),
        ({"a": [1.0, 2.0], "y": [0, 1]}, "z", "has no column 'z'"),
        ({"a": [1.0, 2.0], "y": [0, 1]}, None, "holds the labels"),
        ({"a": [True, None], "y": [0, 1]}, "y", "row 2, column 'a': a feature is nan"),
        ({"y": [0, 1]}, "y", "no column of features"),
        ({"a": [1.0, 2.0], "y": [2**53, 2**53 + 1]}, "y", "labels of 2..53 or more"),
    ],
)
def test_a_bad_parquet_file_is_refused_with_the_place(
    columns: dict[str, Any], label: Any, words: str, tmp_path: Path
) -> None:
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=words):
        LogisticRegression().fit(tmp_path / "a.parquet", label)


def test_integer_targets_of_regression_may_be_as_large_as_nanoseconds_of_today(tmp_path: Path) -> None:
    times = 1_790_000_000_000_000_000 + np.arange(4) * 10**15
    pq.write_table(pa.table({"a": np.arange(4.0), "y": times}), tmp_path / "a.parquet")
    model = Ridge(alpha=1e-9).fit(tmp_path / "a.parquet", "y")
    assert model.coef_[0] == pytest.approx(1e15, rel=1e-6)


def test_a_column_beyond_the_number_that_was_given_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.svm").write_text("1 1:2\n0 3:1\n")
    with pytest.raises(DataError, match="line 2: n_features was set to 2"):
        convert(tmp_path / "a.svm", n_features=2)


def test_a_cut_parquet_file_is_refused(parquet: Path, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet.read_bytes()[:-100])
    with pytest.raises(FileError, match=r"a\.parquet cannot be read"):
        convert(tmp_path / "a.parquet", label="y")


def test_columns_of_very_different_scale_are_warned_of(tmp_path: Path) -> None:
    (tmp_path / "a.svm").write_text("".join(f"{i % 2} 1:{i % 3} 2:{i % 5}e6\n" for i in range(60)))
    with pytest.warns(ScaleWarning, match="column 1 .*MaxAbsScaler"):
        LogisticRegression(tol=0.5).fit(tmp_path / "a.svm")


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ends in \.rows, \.svm"):
        LogisticRegression().fit(tmp_path / "a.csv")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Two features and two columns that may be labels."""
    path = tmp_path / "small.parquet"
    pq.write_table(
        pa.table({"a": [0.0, 1, 0, 1], "b": [0.0, 0, 1, 2], "even": [1, 0, 1, 0], "odd": [0, 1, 0, 1]}), path
    )
    return path


def test_converted_rows_keep_their_label_and_weight(small: Path) -> None:
    rows = convert(small, label="even", weight="b")
    LogisticRegression().fit(rows, "even", "b")
    with pytest.raises(DataError, match="converted with label='even', not 'odd'"):
        LogisticRegression().fit(rows, "odd")
    with pytest.raises(DataError, match="converted with weight='b', not 'a'"):
        LogisticRegression().fit(rows.path, None, "a")


@pytest.mark.parametrize("kind", [LogisticRegression, Ridge])
def test_score_takes_a_label_with_a_source_and_none_with_converted_rows(kind: Any, small: Path) -> None:
    model = kind().fit(small, "even")
    assert model.score(small, "even") == model.score(convert(small, label="even"))
    for more in ({"y": np.ones(4)}, {"y": "odd"}, {"sample_weight": np.ones(4)}):
        with pytest.raises(DataError, match="with labels and weights in it"):
            model.score(convert(small, label="even"), **more)


def test_prediction_refuses_columns_in_another_order(small: Path, tmp_path: Path) -> None:
    table = pq.read_table(small)
    pq.write_table(table.select(["b", "a", "even"]), tmp_path / "turned.parquet")
    model = Ridge().fit(convert(small, tmp_path / "a.rows", label="even", weight="odd"))
    with pytest.raises(DataError, match=r"has the columns .'b', 'a'.; the fit had .'a', 'b'."):
        model.predict(convert(tmp_path / "turned.parquet", label="even"))


def test_prediction_says_what_to_do_about_another_number_of_features(tmp_path: Path) -> None:
    (tmp_path / "a.svm").write_text("0 1:1\n1 3:1\n")
    (tmp_path / "b.svm").write_text("0 1:1\n1 2:1\n")
    model = Ridge().fit(tmp_path / "a.svm")
    with pytest.raises(DataError, match=r"has 2 features; the fit had 3: .*n_features=3"):
        model.predict(tmp_path / "b.svm")
    assert len(model.predict(convert(tmp_path / "b.svm", n_features=3))) == 2


def test_prediction_from_a_source_of_columns_asks_for_converted_rows(small: Path) -> None:
    model = Ridge().fit(small, "even")
    before = sorted(small.parent.iterdir())
    with pytest.raises(DataError, match=r"to predict, give the rows that convert"):
        model.predict(small)
    assert sorted(small.parent.iterdir()) == before


def test_a_source_that_is_refused_leaves_nothing_behind(small: Path) -> None:
    with pytest.raises(DataError, match="holds the labels"):
        convert(small)
    assert list(small.parent.iterdir()) == [small]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    columns = [pa.array([0.0, 1.0]), pa.array([2.0, 3.0]), pa.array([0, 1])]
    pq.write_table(pa.table(columns, names=["a", "a", "y"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="several columns have the same name"):
        convert(tmp_path / "a.parquet", label="y")


@pytest.mark.usefixtures("_small_blocks")
def test_parameters_are_checked_before_passes_begin(parquet: Path, tmp_path: Path) -> None:
    rows = convert(parquet, tmp_path / "a.rows", label="y")
    for model, words in (
        (LogisticRegression(C=-1, limit="1GB"), "'C' parameter"),
        (LinearSVC(C=-1, limit="1GB"), "'C' parameter"),
        (Ridge(alpha=-1, limit="1GB"), "'alpha' parameter"),
        (LogisticRegression(solver="none", limit="1GB"), "'solver' parameter"),
    ):
        with pytest.raises(ValueError, match=words):
            model.fit(rows)


@pytest.mark.usefixtures("_small_blocks")
def test_no_steps_leave_the_solution_of_the_sample(parquet: Path, tmp_path: Path) -> None:
    rows = convert(parquet, tmp_path / "a.rows", label="y")
    with pytest.warns(ConvergenceWarning, match="raise max_iter"):
        model = LogisticRegression(max_iter=0, tol=1e-9, random_state=0, limit="1GB").fit(rows)
    assert len(model.history_) == 1
    assert model.coef_.any()


def test_ranks_on_one_host_share_the_memory_that_is_taken_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bascule_glm.budget, "memory_room", lambda share: 1000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert bascule_glm.budget.budget(None).work == 250
