"""Sources of rows (svmlight, Parquet, Arrow) converted to a file of row blocks, once.

The conversion streams. What it has written is noted beside the unfinished file, so that after an interrupt the same
call goes on from there. The finished file gets its name in one step.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_svmlight_file

from bascule_glm.errors import DataError, FileError, GLMError
from bascule_glm.files import MAGIC, PAGE, FileRows, Layout
from bascule_glm.rows import Block, MemoryRows, extremes

_TEXT = 8 << 20  # bytes of text that are parsed at once
_ROWS = 8 << 20  # bytes of columns that are decoded at once
_SAVE = 128 << 20  # bytes that are written between two notes of where the conversion is
_HINTS = {
    "convert": "; labels and values must be numbers",
    "literal": "; columns must be numbers",
    "index": "; columns count from 1 (else: zero_based=True)",
}
TEXT = (".svm", ".svmlight", ".libsvm", ".txt")
COLUMNS = (".parquet", ".pq", ".arrow", ".feather", ".ipc")


_Chunk = tuple[MemoryRows, int]  # some rows of a source, in order, and the position of the next ones


def open_rows(source: Any, **options: Any) -> FileRows:
    """The rows of a file: of row blocks, or of a source, which is converted first if it was not.

    `options` are those of `convert`. Raises DataError, also if the rows were converted with another label or weight,
    and FileError.
    """
    if not is_converted(source):
        return convert(source, **options)
    rows = source if isinstance(source, FileRows) else FileRows(source)
    for name in ("label", "weight"):
        asked, had = options.get(name), rows.about["origin"][name]
        if asked not in (None, had):
            raise DataError(f"{rows.path} was converted with {name}={had!r}, not {asked!r}: convert its source again")
    return rows


def is_converted(source: Any) -> bool:
    """Whether these are row blocks, or the path of a file of row blocks."""
    return isinstance(source, FileRows) or Path(source).suffix == ".rows"


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    label: str | None = None,
    weight: str | None = None,
    dtype: Any = None,
    n_features: int | None = None,
    zero_based: bool = False,
) -> FileRows:
    """Convert an svmlight, Parquet or Arrow file to row blocks in `target` (by default the source's name and `.rows`).

    label, weight: columns of a Parquet or Arrow file; all others are features, and must be numbers.
    dtype: of the features, float32 or float64. By default float32 for svmlight; else float32 if no column needs more.
    n_features: for svmlight, if not every column occurs. zero_based: whether its first column is 0 and not 1.

    The name of `target` must end in `.rows`. Does nothing if it was made from this source with these options. Raises
    DataError for NaN, infinities and words, with their place; FileError if the source cannot be read or the target not
    be written.
    """
    path = Path(source)
    made = Path(target) if target is not None else path.with_name(path.name + ".rows")
    options = {
        "label": label, "weight": weight, "dtype": None if dtype is None else np.dtype(dtype).name,
        "n_features": n_features, "zero_based": zero_based,
    }  # fmt: skip
    if options["dtype"] not in (None, "float32", "float64"):
        raise DataError(f"dtype={dtype!r}: expected float32 or float64")
    if path.suffix not in TEXT + COLUMNS:
        raise DataError(f"{path}: expected a name that ends in .rows, {', '.join(TEXT + COLUMNS)}")
    if made.suffix != ".rows":
        raise DataError(f"target={made}: expected a name that ends in .rows")
    try:
        status = path.stat()
        origin = {"format": MAGIC.decode(), "size": status.st_size, "changed": status.st_mtime_ns, **options}
        if _is_made(made, origin):
            return FileRows(made)
        reader = _Svmlight(path, options) if path.suffix in TEXT else _Columns(path, options)
        with _locked(_part(made)) as file:
            if _is_made(made, origin):  # by a process that held the lock
                _part(made).unlink()
                return FileRows(made)
            writer = _Writer(file, made, origin, reader)
            for rows, position in reader.chunks(writer.position):
                writer.add(rows, position)
            now = path.stat()
            if (now.st_size, now.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
                raise FileError(f"{path} changed while it was converted: convert it again when it is complete")
            writer.finish()
    except GLMError:
        raise
    except OSError as error:
        why = error.strerror or error
        raise FileError(f"{path} could not be converted to {made}: {why}. Put that right, and call again") from error
    return FileRows(made)


def _part(target: Path) -> Path:
    return target.with_name(target.name + ".part")


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """The file, open and locked. Who held the lock may have renamed it meanwhile: then it is another one."""
    held = False
    while not held:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                held = os.path.samestat(os.fstat(file.fileno()), path.stat())
            if held:
                yield file


def _is_made(target: Path, origin: dict[str, Any]) -> bool:
    try:
        return bool(FileRows(target).about["origin"] == origin)
    except FileError:
        return False


class _Svmlight:
    """Lines of text: a label, then column:value pairs. The position is a byte of the file."""

    sparse, names, weighted = True, None, False

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self._path, self._options = path, options
        self.dtype = np.dtype(options["dtype"] or "float32")
        if options["label"] or options["weight"]:
            raise DataError(f"{path}: svmlight has its labels in it and no weights: give label=None, weight=None")

    def chunks(self, position: int) -> Iterator[_Chunk]:
        """The rows from a byte on."""
        with self._path.open("rb") as file:
            file.seek(position)
            while text := file.read(_TEXT):
                text += file.readline()
                try:
                    x, labels = self._parse(text)
                except (ValueError, OverflowError) as error:
                    raise DataError(self._place(text, position, str(error))) from None
                position += len(text)
                if len(labels):  # not blank lines and comments alone
                    yield MemoryRows(x, labels), position

    def _parse(self, text: bytes) -> Any:
        """Rows and labels. The number of columns is known at the end of the file; here any number does."""
        options = {name: self._options[name] for name in ("n_features", "zero_based")}
        return load_svmlight_file(io.BytesIO(text), dtype=np.float64, **options)

    def _place(self, text: bytes, position: int, why: str) -> str:
        """Which line cannot be parsed."""
        before = 0
        with self._path.open("rb") as file:
            while position > 0 and (part := file.read(min(_TEXT, position))):
                before, position = before + part.count(b"\n"), position - len(part)
        for number, line in enumerate(text.splitlines(), before + 1):
            try:
                self._parse(line)
            except (ValueError, OverflowError) as error:
                words = "it has no label" if b":" in line.split()[0] else str(error)
                hint = next((hint for part, hint in _HINTS.items() if part in words), "")
                return f"{self._path}, line {number}: {words}{hint}"
        return f"{self._path}: {why}"


class _Columns:
    """Parquet and Arrow, by pyarrow. The position is a row."""

    sparse = False

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise GLMError(f"{path}: reading it needs pyarrow ({error}): pip install pyarrow") from error
        self._pa, self._path = pa, path
        try:
            parquet = path.suffix in (".parquet", ".pq")
            self._file: Any = pq.ParquetFile(path) if parquet else pa.ipc.open_file(pa.memory_map(str(path)))
            schema = self._file.schema_arrow if parquet else self._file.schema
        except (pa.ArrowInvalid, OSError) as error:
            raise FileError(f"{path} cannot be read ({error}): write it again") from None
        self._label, self._weight = options["label"], options["weight"]
        if self._label is None:
            raise DataError(
                f"{path}: which of {schema.names} holds the labels? Give its name as y or label (to predict, give the "
                "rows that convert(..., label=...) returned)"
            )
        for name in filter(None, (self._label, self._weight)):
            if name not in schema.names:
                raise DataError(f"{path} has no column {name!r}; it has {schema.names}")
        if len(set(schema.names)) < len(schema.names):
            raise DataError(f"{path}: several columns have the same name: rename or drop all but one: {schema.names}")
        for name, kind in zip(schema.names, schema.types, strict=True):
            if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
                raise DataError(f"{path}: column {name!r} holds {kind}, and numbers are needed: encode or drop it")
        self.names: list[str] = [name for name in schema.names if name not in (self._label, self._weight)]
        if not self.names:
            raise DataError(f"{path} has no column of features beside {schema.names}: add one")
        self.weighted = self._weight is not None
        narrow = all(np.can_cast(schema.field(name).type.to_pandas_dtype(), np.float32) for name in self.names)
        self.dtype = np.dtype(options["dtype"] or ("float32" if narrow else "float64"))

    def chunks(self, position: int) -> Iterator[_Chunk]:
        """The rows from a row on."""
        step = max(1, _ROWS // (8 * (len(self.names) + 2)))
        done = 0
        try:
            for batch in self._batches(step):
                for start in range(max(position - done, 0), batch.num_rows, step):
                    yield self._chunk(batch.slice(start, step), done + start)
                done += batch.num_rows
        except self._pa.ArrowInvalid as error:
            raise FileError(f"{self._path} is damaged ({error}): write it again") from None
        finally:
            self._pa.default_memory_pool().release_unused()  # what it keeps would count against a fit's limit

    def _batches(self, step: int) -> Iterator[Any]:
        if hasattr(self._file, "iter_batches"):
            return iter(self._file.iter_batches(batch_size=step))
        return (self._file.get_batch(number) for number in range(self._file.num_record_batches))

    def _chunk(self, batch: Any, before: int) -> _Chunk:
        def column(name: str) -> NDArray[Any]:
            return np.asarray(batch.column(name).to_numpy(zero_copy_only=False))

        x = np.empty((batch.num_rows, len(self.names)), dtype=np.float64)
        for number, name in enumerate(self.names):
            x[:, number] = column(name)
        weights = None if self._weight is None else column(self._weight)
        return MemoryRows(x, column(self._label).astype(np.float64), weights), before + batch.num_rows


class _Writer:
    """The unfinished file, and the note beside it of what it holds and where the source goes on."""

    def __init__(self, file: BinaryIO, target: Path, origin: dict[str, Any], reader: _Svmlight | _Columns) -> None:
        self._file, self._target, self._origin, self._reader = file, target, origin, reader
        self._note = target.with_name(target.name + ".part.json")
        self._layout = Layout(reader.dtype, reader.sparse, reader.weighted)
        self.position, self._end, self._blocks = 0, PAGE, list[list[int]]()  # a row of the index each
        self._largest = np.zeros(origin["n_features"] or 0)  # absolute value of each column
        try:
            noted = json.loads(self._note.read_text())
        except (OSError, ValueError):
            noted = {}
        if noted.get("origin") == origin and os.fstat(file.fileno()).st_size >= noted["end"]:
            self.position, self._end, self._blocks = noted["position"], noted["end"], noted["blocks"]
            self._largest = np.array(noted["largest"])
        os.ftruncate(file.fileno(), self._end)
        self._saved = self._end

    def add(self, rows: MemoryRows, position: int) -> None:
        """Append rows. Raises DataError for what is no finite number, with its place."""
        self._check(rows)
        largest = rows.largest()
        if largest.max() > np.finfo(self._layout.dtype).max:
            raise DataError(
                f"{self._target.name}: a value is beyond float32: give dtype='float64', or scale the columns"
            )
        width = max(len(self._largest), len(largest))
        self._largest = np.maximum(*(np.pad(one, (0, width - len(one))) for one in (self._largest, largest)))
        for block in MemoryRows(rows.x.astype(self._layout.dtype), rows.labels, rows.weights):
            self._write(block)
        self.position = position
        if self._end - self._saved > _SAVE:
            self._save()

    def finish(self) -> None:
        """Write the index and the header, and give the file its name."""
        if not self._blocks:
            raise DataError(f"{self._target} would have no rows: the source is empty")
        about = {
            "origin": self._origin, "dtype": self._layout.dtype.name, "sparse": self._layout.sparse,
            "weighted": self._layout.weighted, "n_features": len(self._largest), "names": self._reader.names,
            "blocks": self._blocks, "scale": extremes(self._largest),
        }  # fmt: skip
        index = json.dumps(about).encode()
        self._put(index, self._end)
        place = {"index": self._end, "nbytes": self._end + len(index), "checksum": zlib.crc32(index)}
        os.fsync(self._file.fileno())
        self._put((MAGIC + json.dumps(place).encode()).ljust(PAGE, b"\0"), 0)
        os.fsync(self._file.fileno())
        os.replace(_part(self._target), self._target)
        self._note.unlink(missing_ok=True)

    def _check(self, rows: MemoryRows) -> None:
        parts: dict[str, Any] = {"a feature": rows.x, "the label": rows.labels, "the weight": rows.weights}
        for what, values in parts.items():
            sparse = self._layout.sparse and values is rows.x
            numbers = values.data if sparse else values
            bad = ~np.isfinite(numbers)
            if values is rows.weights:
                bad |= numbers < 0
            if bad.any():
                row, *column = np.argwhere(bad)[0].tolist()
                if sparse:
                    row = int(np.searchsorted(rows.x.indptr, row, side="right")) - 1
                row += 1 + sum(count for _, count, *_ in self._blocks)
                place = f", column {self._reader.names[column[0]]!r}" if column and self._reader.names else ""
                raise DataError(
                    f"{self._target.name}: row {row}{place}: {what} is {numbers[bad][0]}: drop the "
                    "row or fill in a finite number (a weight: of zero or more)"
                )

    def _write(self, block: Block) -> None:
        x, entries = block.x, block.x.nnz if self._layout.sparse else 0
        arrays = [x.data, x.indices, x.indptr] if self._layout.sparse else [x]
        arrays += [block.labels, block.weights] if self._layout.weighted else [block.labels]
        parts = self._layout.parts(x.shape[0], x.shape[1], entries)
        nbytes = parts[-1][0]
        memory = np.zeros(nbytes, dtype=np.uint8)
        for array, (offset, count, dtype) in zip(arrays, parts[:-1], strict=True):
            content = np.ascontiguousarray(array, dtype=dtype).view(np.uint8).ravel()
            memory[offset : offset + count * dtype.itemsize] = content
        self._put(memory.data, self._end)
        self._blocks.append([self._end, x.shape[0], entries, *self._layout.checksums(memory, parts)])
        self._end += nbytes

    def _put(self, content: Any, offset: int) -> None:
        view = memoryview(content).cast("B")
        while view:
            done = os.pwrite(self._file.fileno(), view, offset)
            view, offset = view[done:], offset + done

    def _save(self) -> None:
        os.fsync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        noted = {
            "origin": self._origin, "position": self.position, "end": self._end, "blocks": self._blocks,
            "largest": self._largest.tolist(),
        }  # fmt: skip
        aside = self._note.with_name(self._note.name + ".new")
        aside.write_text(json.dumps(noted))
        os.replace(aside, self._note)
        self._saved = self._end
