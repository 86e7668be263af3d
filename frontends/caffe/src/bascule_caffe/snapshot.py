"""Snapshots: a model (.caffemodel, .caffemodel.h5) and the state of its solver (.solverstate, .solverstate.h5).

Files are written aside and renamed, so that the last good snapshot stays if a write fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
import torch
from numpy.typing import NDArray

from bascule_caffe.errors import FileError
from bascule_caffe.messages import (
    LateFile,
    SolverState,
    array_blob,
    blob_array,
    read_binary,
    write_binary,
    writing,
)
from bascule_caffe.net import Net
from bascule_caffe.optimizers import CaffeOptimizer


@dataclass(frozen=True)
class Progress:
    """How far a solver is: its iteration, how often the rate has fallen, and the model that was written with it.

    Files of 2014 and before do not say how often the rate has fallen (None).
    """

    iteration: int
    current_step: int | None
    model: str = ""


def save_model(path: str, net: Net) -> None:
    """Write the net's blobs, as HDF5 if the name ends with .h5. Raises FileError."""
    if path.endswith(".h5"):
        with _writing(path) as file:
            seen: set[int] = set()
            for layer in net.layers:
                data = file.require_group(f"data/{layer.name}")
                for number, blob in enumerate(layer.blobs):
                    if id(blob) not in seen:  # a shared blob is in its first layer only, as in Caffe's files
                        seen.add(id(blob))
                        data[str(number)] = _array(blob)
    else:
        write_binary(path, net.to_parameter())


def load_model(path: str, net: Net) -> list[str]:
    """Take the blobs of layers with the same names, and return these. Raises FileError, and NetError for another
    net's.
    """
    if not path.endswith(".h5"):
        return net.load_caffemodel(path)
    with _reading(path) as file:
        blobs = dict(_layers(file["data"]))
    return net.load_blobs(blobs, path)


def save_state(path: str, optimizer: CaffeOptimizer, progress: Progress) -> None:
    """Write what the solver needs to go on, as HDF5 if the name ends with .h5. Raises FileError."""
    histories = [_array(history) for history in optimizer.histories()]
    if path.endswith(".h5"):
        with _writing(path) as file:
            file["iter"] = np.array([progress.iteration], np.int32)
            file["current_step"] = np.array([progress.current_step], np.int32)
            file["learned_net"] = np.bytes_(progress.model)
            for number, history in enumerate(histories):
                file[f"history/{number}"] = history
        return
    state = SolverState(iter=progress.iteration, current_step=progress.current_step, learned_net=progress.model)
    state.history.extend(array_blob(history) for history in histories)
    write_binary(path, state)


def load_state(path: str, optimizer: CaffeOptimizer) -> Progress:
    """Set the optimizer's histories and iteration. Raises FileError if they are of another solver or net."""
    histories: Iterable[NDArray[Any]]
    if path.endswith(".h5"):
        with _reading(path) as file:
            group = file["history"]
            histories = [np.asarray(group[str(number)]) for number in range(len(group))]
            model = np.asarray(file["learned_net"]).item().decode() if "learned_net" in file else ""
            progress = Progress(int(file["iter"][0]), int(file["current_step"][0]), model)
    else:
        state: Any = read_binary(path, SolverState)
        if not state.HasField("iter"):
            raise FileError(f"{path}: is no solver state: it has no iteration")
        histories = [blob_array(blob, path) for blob in state.history]
        step = state.current_step if state.HasField("current_step") else None
        progress = Progress(state.iter, step, state.learned_net)
    _set_histories(path, optimizer, list(histories))
    optimizer.iteration = progress.iteration
    return progress


def _set_histories(path: str, optimizer: CaffeOptimizer, found: list[NDArray[Any]]) -> None:
    wanted = optimizer.histories()
    shapes = [
        (_short(array.shape), _short(tuple(history.shape))) for array, history in zip(found, wanted, strict=False)
    ]
    differs = next((i for i, (one, other) in enumerate(shapes) if one != other), None)
    if len(found) != len(wanted) or differs is not None:
        counts = f"it has {len(found)} histories, and {type(optimizer).__name__} has {len(wanted)} for this net"
        place = "" if differs is None else f"; number {differs} is {shapes[differs][0]}, not {shapes[differs][1]}"
        raise FileError(
            f"{path}: is the state of another net or solver: {counts}{place}. Give one that this solver wrote"
        )
    with torch.no_grad():
        for history, array in zip(wanted, found, strict=True):
            history.copy_(torch.from_numpy(array.reshape(history.shape).copy()))


def _short(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Old files have four dimensions: the first ones are 1 for what has fewer."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


def _layers(group: Any, name: str = "") -> Iterator[tuple[str, list[NDArray[Any] | None]]]:
    """The names and blobs of the layers in a group; None for a blob that another layer has, because it is shared.

    A slash in a name makes groups within groups: conv1 holds its own blobs and the group of conv1/bn.
    """
    arrays = {int(key): np.asarray(member) for key, member in group.items() if isinstance(member, h5py.Dataset)}
    if arrays:
        yield name, [arrays.get(number) for number in range(max(arrays) + 1)]
    for key, member in group.items():
        if isinstance(member, h5py.Group):
            yield from _layers(member, f"{name}/{key}" if name else key)


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    return array


@contextmanager
def _writing(path: str) -> Iterator[Any]:
    with writing(path) as part, LateFile(part, "w+b") as content:
        try:
            with h5py.File(content, "w") as file:
                yield file
        except (OSError, TypeError, ValueError, RuntimeError) as error:  # such as two layers of one name
            raise FileError(f"{path}: cannot be written as HDF5: {error}") from error


@contextmanager
def _reading(path: str) -> Iterator[Any]:
    try:
        with h5py.File(path, "r") as file:
            yield file
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        raise FileError(f"{path}: cannot be read, is cut, or is another kind of file ({error})") from error
