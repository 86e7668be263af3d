"""Batches that a thread makes ahead of the training."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bascule_caffe.errors import FileError
from bascule_caffe.records import Records
from bascule_caffe.transform import Transform


@dataclass(frozen=True)
class Share:
    """Record i goes to rank i % size. `seed` is that of everything random in data, the same on all ranks."""

    rank: int = 0
    size: int = 1
    seed: int = 0


class Loader:
    """The batches of one layer, in order. A thread makes `ahead` of them while the training goes on.

    A batch depends on its number alone, so that a training that is resumed sees the batches it would have seen.
    """

    def __init__(self, make: Callable[[int], list[Tensor]], shapes: Sequence[tuple[int, ...]], ahead: int = 4) -> None:
        self.shapes: Sequence[tuple[int, ...]] = list(shapes)  # of the first arrays of what `make` returns
        self._make = make
        self._ahead = ahead
        self._thread = ThreadPoolExecutor(1, "caffe-data")
        self._next = 0  # the first batch that nobody has asked for
        self._waiting: deque[Future[list[Tensor]]] = deque()

    def __next__(self) -> list[Tensor]:
        """The next batch. Raises what making it raised."""
        while len(self._waiting) <= self._ahead:
            self._waiting.append(self._thread.submit(self._make, self._next))
            self._next += 1
        return self._waiting.popleft().result()[: len(self.shapes)]

    def seek(self, batch: int) -> None:
        """Go on with batch number `batch`, from 0."""
        for future in self._waiting:
            future.cancel()
        self._waiting.clear()
        self._next = batch

    def close(self) -> None:
        """End the thread. Batches that were made ahead are dropped."""
        self._thread.shutdown(cancel_futures=True)


class Batches:
    """Makes the batches of a layer from its records: which record, in which order, transformed how."""

    def __init__(
        self,
        records: Records,
        batch: int,
        share: Share,
        layer: str,
        transform: Transform | None = None,
        shuffle: bool = False,
        skip: int = 0,
    ) -> None:
        self.records, self._batch, self._share, self._transform = records, batch, share, transform
        self._key = zlib.crc32(layer.encode())  # so that each layer has its own chance
        self._shuffle, self._skip = shuffle, skip
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))
        self.shapes = [(batch, *array.shape) for array in self._record(0)]

    def make(self, number: int) -> list[Tensor]:
        """Batch `number` of this rank: a tensor of float32 for each array of a record. Raises FileError."""
        columns = [np.empty(shape, np.float32) for shape in self.shapes]
        for row in range(self._batch):
            place = (number * self._batch + row) * self._share.size + self._share.rank + self._skip
            for column, array in zip(columns, self._record(place), strict=True):
                if array.shape != column.shape[1:]:
                    raise FileError(
                        f"{self.records.path}: record {place % len(self.records)} has shape {array.shape}, and the "
                        f"first one {column.shape[1:]}: a batch needs one shape (use crop_size, or resize the images)"
                    )
                column[row] = array
        return [torch.from_numpy(column) for column in columns]

    def _record(self, place: int) -> tuple[np.ndarray, ...]:
        epoch, number = divmod(place, len(self.records))
        if self._shuffle:
            if self._order[0] != epoch:
                self._order = (epoch, self.records.order(self._generator(epoch)))
            number = int(self._order[1][number])
        first, *others = self.records.read(number)
        if self._transform is not None:
            try:
                self._transform.shape(first.shape)
            except ValueError as error:
                raise FileError(f"{self.records.path}: record {number}: {error}") from None
            first = self._transform.apply(first, lambda: self._generator(epoch, place))
        return first, *others

    def _generator(self, *numbers: int) -> np.random.Generator:
        return np.random.default_rng([self._share.seed, self._key, *numbers])
