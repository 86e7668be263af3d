"""The data layers: Data (LMDB), ImageData, HDF5Data and MemoryData, as sources that a net asks for batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from google.protobuf.message import Message
from numpy.typing import ArrayLike
from torch import Tensor

from bascule_caffe import layer as layers
from bascule_caffe.errors import CaffeError, FileError, NetError
from bascule_caffe.loader import Batches, Loader, Share
from bascule_caffe.log import Log
from bascule_caffe.messages import BlobProto, Datum, blob_array, read_binary
from bascule_caffe.records import LMDB, HDF5Files, ImageFiles, Records
from bascule_caffe.transform import Image, Transform


class Source(layers.Source, Protocol):
    """What the data layers of this module read."""

    def seek(self, batch: int) -> None:
        """Go on with batch number `batch`, from 0."""

    def close(self) -> None:
        """Stop reading."""


@dataclass
class Feed:
    """What a net hands to its data layers, and the sources that they have made of it."""

    share: Share = field(default_factory=Share)
    sources: list[Source] = field(default_factory=list)

    def seek(self, batch: int) -> None:
        """Let every layer go on with batch number `batch`."""
        for source in self.sources:
            source.seek(batch)


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
        batch, *image = self.shapes[0]
        if list(arrays[0].shape[1:]) != image or arrays[1].shape != arrays[0].shape[:1] or len(arrays[0]) % batch:
            raise ValueError(
                f"MemoryData got data {tuple(arrays[0].shape)} and labels {tuple(arrays[1].shape)}: give data "
                f"(n, {', '.join(map(str, image))}) and labels (n,), n a multiple of {batch}"
            )
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

    def close(self) -> None:
        """Nothing is open."""


def _data(layer: Any) -> tuple[Records, dict[str, Any]]:
    param = layer.data_param
    if param.backend == param.LEVELDB and not os.path.isfile(os.path.join(param.source, "data.mdb")):
        raise FileError(
            f"{param.source}: backend is LEVELDB, which is not read here: copy the records into an LMDB "
            "(docs/caffe.md has the program) and write backend: LMDB"
        )
    color = True if param.force_encoded_color or layer.transform_param.force_color else None
    color = False if layer.transform_param.force_gray else color
    return LMDB(param.source, Datum, color), {"skip": param.rand_skip, "ahead": param.prefetch}


def _image_data(layer: Any) -> tuple[Records, dict[str, Any]]:
    param = layer.image_data_param
    records = ImageFiles(param.source, param.root_folder, (param.new_height, param.new_width), param.is_color)
    return records, {"skip": param.rand_skip, "shuffle": param.shuffle}


def _hdf5_data(layer: Any) -> tuple[Records, dict[str, Any]]:
    param = layer.hdf5_data_param
    return HDF5Files(param.source, list(layer.top)), {"shuffle": param.shuffle}


def _from_records(
    open_records: Callable[[Any], tuple[Records, dict[str, Any]]], field_name: str
) -> Callable[[Message, str, object], Source]:
    def make(layer: Any, phase: str, data: object) -> Source:
        feed = data if isinstance(data, Feed) else Feed()
        where = f"{layer.location}: layer '{layer.name}' ({layer.type})".lstrip(": ")
        batch = getattr(layer, field_name).batch_size
        try:
            if batch < 1:
                raise ValueError(f"{field_name} needs a batch_size above 0")
            if open_records is _hdf5_data and layer.HasField("transform_param"):
                raise ValueError("transform_param: HDF5Data does not transform data: remove it, or use Data")
            records, options = open_records(layer)
            ahead = options.pop("ahead", 4)
            if options.get("skip"):
                options["skip"] = int(np.random.default_rng(feed.share.seed).integers(options["skip"]))
            transform = None
            if open_records is not _hdf5_data:
                transform = Transform(layer.transform_param, phase == "TRAIN", _mean(layer.transform_param))
            batches = Batches(records, batch, feed.share, layer.name, transform, **options)
        except FileError as error:
            raise FileError(f"{where}: {error}") from None
        except ValueError as error:
            raise NetError(str(error)) from None  # the net adds the place
        except ModuleNotFoundError as error:
            raise CaffeError(f"{where}: needs the package {error.name}: pip install 'bascule-caffe[data]'") from None
        source = Loader(batches.make, batches.shapes[: len(layer.top)], ahead)
        feed.sources.append(source)
        return source

    return make


def _memory_data(layer: Any, phase: str, data: object) -> Source:
    param = layer.memory_data_param
    source = MemorySource((param.batch_size, param.channels, param.height, param.width))
    if layer.HasField("transform_param"):
        rank = data.share.rank if isinstance(data, Feed) else 0
        where = f"{layer.location}: layer '{layer.name}' (MemoryData)".lstrip(": ")
        if rank == 0:
            Log().warn("memory_data_layer.cpp:97", f"{where}: transform_param has no effect on the arrays of reset()")
    if isinstance(data, Feed):
        data.sources.append(source)
    return source


def _mean(param: Any) -> Image | None:
    if not param.mean_file:
        return None
    mean = blob_array(read_binary(param.mean_file, BlobProto), param.mean_file)
    if mean.ndim == 4 and mean.shape[0] == 1:
        mean = mean[0]
    if mean.ndim != 3:
        raise ValueError(f"{param.mean_file} has shape {mean.shape}: a mean image is (channels, height, width)")
    return mean


layers.register_data("Data", _from_records(_data, "data_param"))
layers.register_data("ImageData", _from_records(_image_data, "image_data_param"))
layers.register_data("HDF5Data", _from_records(_hdf5_data, "hdf5_data_param"))
layers.register_data("MemoryData", _memory_data)
