"""The data layers: Data (LMDB), ImageData, HDF5Data and MemoryData, as sources that a net asks for batches."""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from bascule_caffe.errors import CaffeError, FileError
from bascule_caffe.layer import DATA, place_of, require
from bascule_caffe.log import Log
from bascule_caffe.messages import BlobProto, blob_array, read_binary
from bascule_caffe.records import LMDB, HDF5Files, ImageFiles, Records
from bascule_caffe.transform import Image, Transform


@dataclass(frozen=True)
class Share:
    """Record i goes to rank i % size. `seed` is that of everything random in data, the same on all ranks."""

    rank: int = 0
    size: int = 1
    seed: int = 0


@dataclass
class Feed:
    """What a net hands to its data layers, and the sources that they have made of it."""

    share: Share = field(default_factory=Share)
    sources: list[Batches | MemorySource] = field(default_factory=list)

    def seek(self, batch: int) -> None:
        """Let every layer go on with batch number `batch`."""
        for source in self.sources:
            source.seek(batch)


class Batches:
    """The batches of one layer: which records, in which order, transformed how.

    A thread makes `ahead` of them while the training goes on. A batch depends on its number alone, so that a training
    that is resumed sees the batches it would have seen.
    """

    def __init__(
        self,
        records: Records,
        batch: int,
        share: Share,
        layer: str,
        transform: Transform | None = None,
        *,
        shuffle: bool = False,
        skip: int = 0,
        ahead: int = 4,
    ) -> None:
        self.records, self._batch, self._share, self._transform = records, batch, share, transform
        self._key = zlib.crc32(layer.encode())  # so that each layer has its own chance
        self._shuffle, self._skip, self._ahead = shuffle, skip, ahead
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))
        self._thread = ThreadPoolExecutor(1, "caffe-data")
        self._next = 0  # the first batch that nobody has asked for
        self._waiting: deque[Future[list[Tensor]]] = deque()
        self.shapes: Sequence[tuple[int, ...]] = [(batch, *array.shape) for array in self._record(0)]

    def __next__(self) -> list[Tensor]:
        """The next batch. Raises what making it raised."""
        while len(self._waiting) <= self._ahead:
            self._waiting.append(self._thread.submit(self.make, self._next))
            self._next += 1
        return self._waiting.popleft().result()

    def seek(self, batch: int) -> None:
        """Go on with batch number `batch`, from 0."""
        for future in self._waiting:
            future.cancel()
        self._waiting.clear()
        self._next = batch

    def close(self) -> None:
        """End the thread. Batches that were made ahead are dropped."""
        self._thread.shutdown(cancel_futures=True)

    def make(self, number: int) -> list[Tensor]:
        """Batch `number` of this rank: a tensor of float32 for each array of a record. Raises FileError."""
        columns = [np.empty(shape, np.float32) for shape in self.shapes]
        for row in range(self._batch):
            place = (number * self._batch + row) * self._share.size + self._share.rank + self._skip
            for column, array in zip(columns, self._record(place), strict=True):
                if array.shape != column.shape[1:]:
                    found = f"record {place % len(self.records)} has shape {array.shape}, and the first one"
                    way = "a batch needs one shape (use crop_size, or resize the images)"
                    raise FileError(f"{self.records.path}: {found} {column.shape[1:]}: {way}")
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
                first = self._transform.apply(first, lambda: self._generator(epoch, place))
            except ValueError as error:
                raise FileError(f"{self.records.path}: record {number}: {error}") from None
        return first, *others

    def _generator(self, *numbers: int) -> np.random.Generator:
        return np.random.default_rng([self._share.seed, self._key, *numbers])


class MemorySource:
    """MemoryData: arrays that the program gives with `reset`."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shapes: Sequence[tuple[int, ...]] = [shape, shape[:1]]
        self._arrays: list[Tensor] = []
        self._row = 0

    def reset(self, data: ArrayLike, labels: ArrayLike) -> None:
        """Read from `data` (n, C, H, W) and `labels` (n,) from now on.

        n is a multiple of the batch size. Raises ValueError.
        """
        arrays = [torch.as_tensor(np.asarray(array, dtype=np.float32)) for array in (data, labels)]
        (batch, *image), (shape, labelled) = self.shapes[0], (tuple(array.shape) for array in arrays)
        if shape[1:] != tuple(image) or labelled != shape[:1] or shape[0] % batch:
            wanted = f"data (n, {', '.join(map(str, image))}) and labels (n,), n a multiple of {batch}"
            raise ValueError(f"MemoryData got data {shape} and labels {labelled}: give {wanted}")
        self._arrays, self._row = arrays, 0

    def __next__(self) -> list[Tensor]:
        if not self._arrays:
            raise CaffeError("MemoryData has no data: call reset(data, labels) of its source before a forward")
        batch = self.shapes[0][0]
        row, self._row = self._row, (self._row + batch) % len(self._arrays[0])
        return [array[row : row + batch] for array in self._arrays]

    def seek(self, batch: int) -> None:
        """Go on with batch number `batch` of the arrays."""
        if self._arrays:
            self._row = batch * self.shapes[0][0] % len(self._arrays[0])


def _lmdb(layer: Any) -> Records:
    param, transform = layer.data_param, layer.transform_param
    if param.backend == param.LEVELDB and not os.path.isfile(os.path.join(param.source, "data.mdb")):
        way = "copy the records into an LMDB (docs/caffe.md has the program) and write backend: LMDB"
        raise FileError(f"{param.source}: backend is LEVELDB, which is not read here: {way}")
    color = True if param.force_encoded_color or transform.force_color else None
    return LMDB(param.source, False if transform.force_gray else color)


def _images(layer: Any) -> Records:
    param = layer.image_data_param
    return ImageFiles(param.source, param.root_folder, (param.new_height, param.new_width), param.is_color)


def _hdf5(layer: Any) -> Records:
    require(not layer.HasField("transform_param"), "HDF5Data does not transform data: remove transform_param")
    return HDF5Files(layer.hdf5_data_param.source, list(layer.top))


_RECORDS: dict[str, tuple[str, Callable[[Any], Records]]] = {
    "Data": ("data_param", _lmdb),
    "ImageData": ("image_data_param", _images),
    "HDF5Data": ("hdf5_data_param", _hdf5),
}


def _from_records(layer: Any, phase: str, data: object) -> Batches:
    feed = data if isinstance(data, Feed) else Feed()
    name, open_records = _RECORDS[layer.type]
    fields = getattr(layer, name)
    require(fields.batch_size > 0, f"{name} needs a batch_size above 0")
    transform = None
    try:
        records = open_records(layer)
        if layer.type != "HDF5Data":
            transform = Transform(layer.transform_param, phase == "TRAIN", _mean(layer.transform_param))
        skip = getattr(fields, "rand_skip", 0)
        skip = int(np.random.default_rng(feed.share.seed).integers(skip)) if skip else 0
        options: Any = {"shuffle": getattr(fields, "shuffle", False), "ahead": getattr(fields, "prefetch", 4)}
        source = Batches(records, fields.batch_size, feed.share, layer.name, transform, skip=skip, **options)
    except FileError as error:
        raise FileError(f"{place_of(layer)}: {error}") from None
    feed.sources.append(source)
    return source


def _memory_data(layer: Any, phase: str, data: object) -> MemorySource:
    feed, param = data if isinstance(data, Feed) else Feed(), layer.memory_data_param
    source = MemorySource((param.batch_size, param.channels, param.height, param.width))
    if layer.HasField("transform_param"):
        said = f"{place_of(layer)}: transform_param has no effect on the arrays of reset()"
        if feed.share.rank == 0:
            Log().warn("memory_data_layer.cpp:97", said)
    feed.sources.append(source)
    return source


def _mean(param: Any) -> Image | None:
    if not param.mean_file:
        return None
    mean = blob_array(read_binary(param.mean_file, BlobProto), param.mean_file)
    if mean.ndim == 4 and mean.shape[0] == 1:
        mean = mean[0]
    require(mean.ndim == 3, f"{param.mean_file} has shape {mean.shape}: a mean image is (channels, height, width)")
    return mean


DATA.update(dict.fromkeys(_RECORDS, _from_records), MemoryData=_memory_data)
