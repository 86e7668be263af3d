"""What data layers read: records by number. Reading upwards is cheap, and so is starting again."""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from bascule_caffe.errors import FileError
from bascule_caffe.messages import Datum
from bascule_caffe.transform import Image, decode, resize


class Records(ABC):
    """Numbered records. One thread reads at a time."""

    path: str

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, number: int) -> tuple[NDArray[Any], ...]:
        """The arrays of record `number`, one for each top. Raises FileError, which names the record."""

    def order(self, generator: np.random.Generator) -> NDArray[np.int64]:
        """The numbers of all records, shuffled."""
        return generator.permutation(len(self))


class LMDB(Records):
    """An LMDB of Datums: an image (C, H, W) and a label. Raises FileError if it cannot be opened or is truncated."""

    def __init__(self, path: str, color: bool | None = None) -> None:
        self.path, self._color = path, color
        file = Path(path, "data.mdb") if os.path.isdir(path) else Path(path)
        if not file.is_file():
            found = "no such folder" if not os.path.exists(path) else "the folder has no data.mdb"
            raise FileError(f"{path}: {found}; source must be the folder of an LMDB")
        self._environment = _environment(os.path.realpath(path), file.stat().st_ino, file.stat().st_size)
        self._count = int(self._environment.stat()["entries"])
        if not self._count:
            raise FileError(f"{path}: the LMDB has no records")
        self._cursor = self._environment.begin(buffers=True).cursor()
        self._place = -1

    def __len__(self) -> int:
        return self._count

    def read(self, number: int) -> tuple[NDArray[Any], ...]:
        """Image and label. Raises FileError for what is no image."""
        self._move_to(number)
        try:
            datum: Any = Datum.FromString(bytes(self._cursor.value()))
            return self._image(datum), np.array(datum.label, np.float32)
        except (ValueError, DecodeError) as error:
            key = bytes(self._cursor.key())
            raise FileError(f"{self.path}: record {number} (key {key!r}) is no image: {error}") from None

    def _move_to(self, number: int) -> None:
        try:
            if self._place < 0 or number < self._place:
                self._cursor.first()
                self._place = 0
            while self._place < number:
                self._cursor.next()
                self._place += 1
        except lmdb.Error as error:
            raise FileError(f"{self.path} is damaged near record {self._place} ({error}): copy it again") from None

    def _image(self, datum: Any) -> Image:
        if datum.encoded:
            return decode(datum.data, self._color)
        shape = (datum.channels, datum.height, datum.width)
        pixels = np.frombuffer(datum.data, np.uint8) if datum.data else np.array(datum.float_data, np.float32)
        if not pixels.size:
            raise ValueError("it has no pixels")
        if min(shape) < 1:  # NumPy would work out a negative number from the others
            raise ValueError(f"its channels, height and width are {shape}, but must be above 0")
        return pixels.reshape(shape)


@functools.cache
def _environment(path: str, inode: int, nbytes: int) -> Any:
    """An LMDB may be open once in a process, so layers share it. `inode` and `nbytes` tell a new file apart."""
    try:
        environment = lmdb.open(path, subdir=os.path.isdir(path), readonly=True, lock=False, readahead=False)
        needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    except lmdb.Error as error:
        raise FileError(f"{path} is no LMDB, or a damaged one ({error}): write it again") from None
    if nbytes < needed:  # reading a page behind the end of the file would end the process
        environment.close()
        raise FileError(f"{path} is truncated: its pages need {needed} bytes, the file has {nbytes}. Copy it again")
    return environment


class ImageFiles(Records):
    """A text file with a path and a label on each line. Images get `size` (height, width), unless it is (0, 0)."""

    def __init__(self, path: str, root: str, size: tuple[int, int], color: bool) -> None:
        self.path, self._root, self._size, self._color = path, root, size, color
        self._lines: list[tuple[str, float]] = []
        for number, line in enumerate(_lines_of(path), 1):
            name, _, label = line.rpartition(" ")
            try:
                self._lines.append((name.strip(), float(label)))
            except ValueError:
                raise FileError(f"{path}, line {number}: {line!r} is not a path and a label") from None

    def __len__(self) -> int:
        return len(self._lines)

    def read(self, number: int) -> tuple[NDArray[Any], ...]:
        """Image and label. Raises FileError for a file that is missing or no image."""
        name, label = self._lines[number]
        try:
            image = decode(Path(self._root + name).read_bytes(), self._color)
        except (OSError, ValueError) as error:
            raise FileError(f"{self.path}, image {number} ({self._root + name}): {error}") from None
        return resize(image, *self._size) if any(self._size) else image, np.array(label, np.float32)


class HDF5Files(Records):
    """A text file with the path of an HDF5 file on each line, whose data sets have the names of the tops.

    A record is a row of each. One file is held in memory at a time, as Caffe did.
    """

    def __init__(self, path: str, names: Sequence[str]) -> None:
        self.path, self._names = path, names
        self._files = _lines_of(path)
        self._ends = np.cumsum([len(self._load(file)[0]) for file in self._files])
        self._held: tuple[int, list[NDArray[Any]]] = (-1, [])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, number: int) -> tuple[NDArray[Any], ...]:
        """A row of each data set. Raises FileError."""
        file = int(np.searchsorted(self._ends, number, side="right"))
        if self._held[0] != file:
            self._held = (file, [array[:] for array in self._load(self._files[file])])
        row = number - (int(self._ends[file - 1]) if file else 0)
        return tuple(array[row] for array in self._held[1])

    def order(self, generator: np.random.Generator) -> NDArray[np.int64]:
        """Files are shuffled, and the rows within each file."""
        starts = np.concatenate([[0], self._ends[:-1]])
        files = generator.permutation(len(self._files))
        return np.concatenate([starts[f] + generator.permutation(self._ends[f] - starts[f]) for f in files])

    def _load(self, file: str) -> list[Any]:
        try:
            opened = h5py.File(file)
        except OSError as error:
            raise FileError(f"{self.path}: {file} cannot be read ({error})") from None
        missing = [name for name in self._names if name not in opened]
        if missing:
            raise FileError(f"{file} has no data set {', '.join(missing)}; it has {', '.join(opened)}")
        arrays = [opened[name] for name in self._names]
        for name, array in zip(self._names, arrays, strict=True):
            if (fault := _fault(array)) is not None:
                raise FileError(f"{file}: data set {name!r} {fault}")
        if len({len(array) for array in arrays}) != 1:
            lengths = ", ".join(f"{name}: {len(array)}" for name, array in zip(self._names, arrays, strict=True))
            raise FileError(f"{file}: the data sets have different numbers of rows ({lengths})")
        return arrays


def _fault(array: Any) -> str | None:
    """Why this is no data set with rows of numbers; None if it is one."""
    if not isinstance(array, h5py.Dataset):
        return "is a group, but must be a data set"
    if array.dtype.kind not in "biuf":
        other = "complex numbers" if array.dtype.kind == "c" else f"values of type {array.dtype}"
        found = "text" if h5py.check_string_dtype(array.dtype) else other
        return f"has {found}, but must have real numbers"
    if not array.shape:
        return "has no axes, but the first one must be the rows"
    return None if len(array) else "has no rows"


def _lines_of(path: str) -> list[str]:
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"source {path} cannot be read as text: {error}") from None
    if not lines:
        raise FileError(f"source {path} is empty")
    return lines
