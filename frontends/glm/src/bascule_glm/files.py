"""Files of row blocks: their format, and passes over them that read ahead past the page cache.

A file is a header of one page, blocks that each begin on a page, and an index in JSON. A block holds its rows' features
(dense and row-major, or CSR as data, column numbers and row starts), then labels, then weights if the file has any. The
index has two checksums of each block, of its features and of the rest. The header has a checksum of the index, which
says what was converted, so it tells a file from any other. It is written last, so a file that was cut, or never
finished, is told from a whole one.
"""

from __future__ import annotations

import copy
import fcntl
import json
import os
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from itertools import cycle, islice
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from bascule_glm.errors import DataError, FileError
from bascule_glm.rows import Block, MemoryRows, nbytes_of
from lms.memory.file import page_memory

PAGE = 4096
MAGIC = b"BASCULE ROWS 2\n"  # version 1 had no checksums of blocks
MOST_CLASSES = 1000
_GROUP = 4 << 20  # bytes of one read: consecutive blocks
_DRAWS = 256  # a sample is drawn from at least this many places, if there are as many blocks
_BUFFERS = 3  # one is computed on, two are read ahead
READ_AHEAD = _GROUP * _BUFFERS
WIDE = 1 << 31  # entries of a CSR matrix from which its columns would be int64: fewer are held in memory


@dataclass(frozen=True)
class Layout:
    """Where the arrays of a block lie, in bytes from its start: features, labels, weights, and the whole."""

    dtype: np.dtype[Any]
    sparse: bool
    weighted: bool

    def parts(self, rows: int, columns: int, entries: int) -> list[tuple[int, int, np.dtype[Any]]]:
        """(offset, count, type) of each array; the last one's offset is the block's size, in whole pages."""
        double = np.dtype(np.float64)
        shapes: list[tuple[int, np.dtype[Any]]] = [(entries if self.sparse else rows * columns, self.dtype)]
        if self.sparse:
            shapes += [(entries, np.dtype(np.int32)), (rows + 1, np.dtype(np.int64))]
        shapes += [(rows, double)] * (2 if self.weighted else 1)
        found, offset = [], 0
        for count, dtype in shapes:
            found.append((offset, count, dtype))
            offset += -(-count * dtype.itemsize // 8) * 8
        return [*found, (-(-offset // PAGE) * PAGE, 0, double)]

    def checksums(self, block: Any, parts: list[tuple[int, int, np.dtype[Any]]]) -> list[int]:
        """Of the features, and of the labels and weights, which are also read alone."""
        labels = self.labels_at(parts)
        return [zlib.crc32(block[:labels]), zlib.crc32(block[labels:])]

    def labels_at(self, parts: list[tuple[int, int, np.dtype[Any]]]) -> int:
        """Where the labels begin; weights follow, then the block ends."""
        return parts[-3 if self.weighted else -2][0]


class FileRows:
    """The rows of a finished file, block by block. Raises FileError if it is none, or cut.

    `n_rows`, `n_features`, `dtype`, `sparse`, `entries` of CSR, `nbytes` that a pass reads, `names` of the columns if
    the source had any, and `held`, the rows that are in memory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.about, self._identity = _read_index(self.path)
        self.dtype, self.sparse = np.dtype(self.about["dtype"]), bool(self.about["sparse"])
        self.layout = Layout(self.dtype, self.sparse, self.about["weighted"])
        self.n_features: int = self.about["n_features"]
        self.names: list[str] | None = self.about["names"]
        self._weights: NDArray[np.float64] | None = None  # the caller's, one for each row
        self.held: MemoryRows | None = None
        self._sound = set[int]()  # where blocks begin whose checksums were right; shared with copies of this object
        self._take(np.array(self.about["blocks"], dtype=np.int64).reshape(-1, 5))

    def _take(self, index: NDArray[np.int64]) -> None:
        """Hold these blocks alone: (offset, rows, entries, checksum of features, checksum of the rest) each."""
        self._index = index
        self._unheld: Sequence[int] = range(len(index))  # the numbers of the blocks that a pass reads
        self.n_rows, self.entries = (int(one) for one in index[:, 1:3].sum(axis=0))
        self._starts = np.concatenate([[0], np.cumsum(index[:, 1])])
        self._sizes = [self._parts(number)[-1][0] for number in range(len(index))]
        self.nbytes = sum(self._sizes)
        self.largest_block = max(self._sizes, default=0)

    def share(self, rank: int, size: int) -> FileRows:
        """The blocks of one of `size` ranks, about equal in bytes. Each block is one rank's."""
        if not 0 <= rank < size:
            raise DataError(f"rank={rank}, size={size}: expected 0 <= rank < size")
        before = np.cumsum([0, *self._sizes[:-1]])
        mine = (before * size // max(self.nbytes, 1)) == rank
        other = copy.copy(self)
        other._take(self._index[mine])
        if self._weights is not None:
            other._weights = self._weights[np.repeat(mine, self._index[:, 1])]
        return other

    def weighted(self, weights: Any) -> FileRows:
        """The same rows with these weights (n_rows,), times the file's own."""
        given = np.asarray(weights, dtype=np.float64)
        if given.shape != (self.n_rows,) or not np.isfinite(given).all() or (given < 0).any():
            wanted = f"{self.n_rows} finite numbers of zero or more"
            raise DataError(f"sample_weight: expected {wanted}, found {given} of shape {given.shape}")
        other = copy.copy(self)
        other._weights = given
        return other

    def __iter__(self) -> Iterator[Block]:
        # Blocks in memory and blocks that are read alternate, so that reading goes on while the former are computed on.
        held = iter(self.held or ())
        ratio = self.held.nbytes / max(self.nbytes, 1) if self.held else 0.0
        due = 0.0
        for block in self._read(self._unheld):
            yield block
            due += ratio * nbytes_of(block.x)
            while due > 0 and (one := next(held, None)) is not None:
                yield one
                due -= nbytes_of(one.x)
        yield from held

    def hold(self, nbytes: int, generator: np.random.Generator) -> FileRows:
        """The same rows, with whole blocks of up to `nbytes` in memory: passes do not read these again.

        They are drawn without replacement, so those of a sorted file come from everywhere. Blocks of one read are drawn
        together: single ones would split the rest into short, slow reads.
        """
        groups = self._groups(range(len(self._index)), min(_GROUP, self.nbytes // _DRAWS))
        order = np.concatenate([groups[number] for number in generator.permutation(len(groups))])
        fit = np.cumsum(np.array(self._sizes)[order]) <= nbytes
        if self.sparse:
            fit &= np.cumsum(self._index[order, 2]) < WIDE
        drawn = max(1, int(fit.sum()))
        other = copy.copy(self)
        other.held = self._gather(np.sort(order[:drawn]).tolist())
        other._unheld = np.sort(order[drawn:]).tolist()
        other.nbytes = sum(self._sizes[number] for number in other._unheld)
        return other

    def load(self) -> MemoryRows:
        """All rows, in memory. Raises DataError if sparse ones have `WIDE` entries or more."""
        if self.sparse and self.entries >= WIDE:
            raise DataError(f"{self.path} has {self.entries} entries, too many rows to load: fit the FileRows itself")
        return self._gather(range(len(self._index)))

    def _gather(self, numbers: Sequence[int]) -> MemoryRows:
        """Copies of these blocks, as rows in memory. No row is there twice meanwhile."""
        n_rows, entries = (int(one) for one in self._index[list(numbers), 1:3].sum(axis=0))
        labels, weights = np.empty(n_rows), np.empty(n_rows)
        x: Any
        if self.sparse:
            data, columns = np.empty(entries, dtype=self.dtype), np.empty(entries, dtype=np.int32)
            starts = np.zeros(n_rows + 1, dtype=np.int32)  # SciPy's routines take the columns' type
        else:
            x = np.empty((n_rows, self.n_features), dtype=self.dtype)
        row = entry = 0
        for block in self._read(numbers):
            rows = slice(row, row + len(block.labels))
            labels[rows], weights[rows] = block.labels, block.weights
            if self.sparse:
                part = slice(entry, entry + block.x.nnz)
                data[part], columns[part] = block.x.data, block.x.indices
                starts[row + 1 : rows.stop + 1] = entry + block.x.indptr[1:]
                entry = part.stop
            else:
                x[rows] = block.x
            row = rows.stop
        if self.sparse:
            x = scipy.sparse.csr_matrix((data, columns, starts), shape=(n_rows, self.n_features), copy=False)
        return MemoryRows(x, labels, weights)

    def labels(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Labels and weights of all rows, (n,) each."""
        labels, weights = (np.concatenate(parts) for parts in zip(*self._label_blocks(), strict=True))
        return labels, weights

    def label_counts(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The distinct labels, and the weight of all rows of each.

        Stops beyond `MOST_CLASSES` labels, if they have any weight.
        """
        names = np.empty(0)
        counts: NDArray[Any] = np.empty(0)
        for labels, weights in self._label_blocks():
            names, codes = np.unique(np.concatenate([names, labels]), return_inverse=True)
            counts = np.bincount(codes, np.concatenate([counts, weights]))
            if len(names) > MOST_CLASSES and counts.any():
                break
        return names, counts

    def _label_blocks(self) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """Labels and weights of each block, read without its features."""
        with self.path.open("rb") as file:
            self._check(file.fileno())
            for number, (begin, rows, _, _, checksum) in enumerate(self._index.tolist()):
                labels = self.layout.labels_at(self._parts(number))
                file.seek(begin + labels)
                found = np.fromfile(file, count=(self._sizes[number] - labels) // 8)
                if found.nbytes < self._sizes[number] - labels:
                    raise self._changed()
                if zlib.crc32(found.data) != checksum:
                    raise self._damaged(number)
                yield found[:rows], self._weights_of(number, found[rows : 2 * rows])

    def _weights_of(self, number: int, own: NDArray[np.float64]) -> NDArray[np.float64]:
        """A block's weights: the file's own if it has any, times the caller's."""
        weights = own if self.layout.weighted else np.ones(self._index[number, 1])
        given = self._weights
        return weights if given is None else weights * given[self._starts[number] : self._starts[number + 1]]

    def _parts(self, number: int) -> list[tuple[int, int, np.dtype[Any]]]:
        _, rows, entries, *_ = self._index[number].tolist()
        return self.layout.parts(rows, self.n_features, entries)

    def _check(self, fd: int) -> None:
        """Raise FileError if another file has taken the place of the one that was opened."""
        if _identity(fd) != self._identity:
            raise self._changed()

    def _changed(self) -> FileError:
        return FileError(f"{self.path} was cut or replaced after it was opened: open it again, or convert its source")

    def _damaged(self, number: int) -> FileError:
        where = f"the block at byte {self._index[number, 0]} has another checksum than when it was written"
        return FileError(f"{self.path} is damaged: {where}. Delete the file, and convert its source again")

    def _read(self, numbers: Iterable[int]) -> Iterator[Block]:
        """These blocks, while a thread reads the next ones. A later block may overwrite this one's memory."""
        groups = self._groups(numbers, _GROUP)
        if not groups:
            return
        size = max(sum(self._sizes[number] for number in group) for group in groups)
        buffers = [page_memory(size) for _ in groups[:_BUFFERS]]
        with _open_direct(self.path) as file, ThreadPoolExecutor(1) as reader:
            self._check(file.fileno())
            reads = (  # taking one starts its read; its buffer is free by then
                (group, buffer, reader.submit(self._fill, file, group, buffer))
                for group, buffer in zip(groups, cycle(buffers), strict=False)
            )
            ahead = deque(islice(reads, _BUFFERS))
            while ahead:
                group, buffer, read = ahead.popleft()
                read.result()
                offset = 0
                for number in group:
                    yield self._block(number, memoryview(buffer)[offset : offset + self._sizes[number]])
                    offset += self._sizes[number]
                ahead.extend(islice(reads, 1))

    def _groups(self, numbers: Iterable[int], most: int) -> list[list[int]]:
        """Neighbours together, of up to `most` bytes."""
        groups: list[list[int]] = []
        nbytes = 0
        for number in numbers:
            if groups and groups[-1][-1] == number - 1 and nbytes + self._sizes[number] <= most:
                groups[-1].append(number)
                nbytes += self._sizes[number]
            else:
                groups.append([number])
                nbytes = self._sizes[number]
        return groups

    def _fill(self, file: FileIO, group: list[int], buffer: mmap) -> None:
        """Read neighbouring blocks. Raises FileError if the file ends before, or for another checksum."""
        offset, nbytes = int(self._index[group[0], 0]), sum(self._sizes[number] for number in group)
        view, done = memoryview(buffer)[:nbytes], 0
        fd = file.fileno()  # raises if the file is closed
        direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        while done < nbytes:
            got = os.preadv(fd, [view[done:]], offset + done)
            if got <= 0 or (direct and got % PAGE):  # blocks are whole pages
                raise self._changed()
            done += got
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)  # if the page cache was not avoided
        for number in group:
            block, view = view[: self._sizes[number]], view[self._sizes[number] :]
            self._verify(number, block)

    def _verify(self, number: int, block: memoryview) -> None:
        """Compare a block's checksums when it is first read: in each pass they took a fifth of a fit's CPU time."""
        begin, _, _, *checksums = self._index[number].tolist()
        if begin not in self._sound:
            if self.layout.checksums(block, self._parts(number)) != checksums:
                raise self._damaged(number)
            self._sound.add(begin)

    def _block(self, number: int, memory: memoryview) -> Block:
        arrays = [
            np.frombuffer(memory, dtype=dtype, count=count, offset=offset)
            for offset, count, dtype in self._parts(number)[:-1]
        ]
        rows = int(self._index[number, 1])
        x: Any
        if self.sparse:
            x = scipy.sparse.csr_matrix((rows, self.n_features), dtype=self.dtype)
            x.data, x.indices, x.indptr = arrays[0], arrays[1], arrays[2].astype(np.int32)
        else:
            x = arrays[0].reshape(rows, self.n_features)
        return Block(x, arrays[3 if self.sparse else 1], self._weights_of(number, arrays[-1]))


def _open_direct(path: Path) -> FileIO:
    """The file, read past the page cache if the file system allows it."""
    file = path.open("rb", buffering=0)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_DIRECT)
        _identity(file.fileno())
    except OSError:
        fcntl.fcntl(file, fcntl.F_SETFL, 0)
    return file


def _identity(fd: int) -> tuple[int, bytes]:
    """What tells a file from another one of the same name: its size and header. A copy of it is the same."""
    with page_memory(PAGE) as page:
        os.preadv(fd, [page], 0)
        return os.fstat(fd).st_size, page[:]


def _read_index(path: Path) -> tuple[dict[str, Any], tuple[int, bytes]]:
    """The index of a finished file, and which file it is. Raises FileError."""
    try:
        with path.open("rb") as file:
            nbytes, head = identity = _identity(file.fileno())
            if not head.startswith(MAGIC):
                known = head.startswith(MAGIC[: MAGIC.rindex(b" ")])
                raise ValueError("it is of another version" if known else "it begins otherwise")
            place = json.loads(head[len(MAGIC) :].rstrip(b"\0"))
            if nbytes != place["nbytes"]:
                raise ValueError(f"it has {nbytes} bytes and should have {place['nbytes']}")
            file.seek(place["index"])
            index = file.read(place["nbytes"] - place["index"])
            if zlib.crc32(index) != place["checksum"]:
                raise ValueError("its index is damaged")
            return json.loads(index), identity
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}; give a file of row blocks, or a source") from error
    except (ValueError, KeyError) as error:
        raise FileError(f"{path} is no whole file of row blocks ({error}): convert its source again") from error


Rows = FileRows | MemoryRows  # a data set that can be passed over any number of times, in blocks
