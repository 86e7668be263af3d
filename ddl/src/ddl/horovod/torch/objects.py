"""The state of models, optimizers and other Python objects, from one rank to all."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from ddl.horovod.torch import starting
from ddl.horovod.torch.process_sets import ProcessSet, global_process_set

ObjectT = TypeVar("ObjectT")


def broadcast_parameters(
    params: Mapping[str, Tensor] | Iterable[tuple[str, Tensor] | Tensor],
    root_rank: int,
    prefix: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy the root's parameters over everyone's: a model's `state_dict()`, `named_parameters()` or `parameters()`.

    `prefix` is ignored. Raises ValueError: something in it is no tensor.
    """
    listed = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    # A parameter could be unpacked, too: into its rows.
    named = [its if isinstance(its, tuple) else (f"parameter {number}", its) for number, its in enumerate(listed)]
    for name, tensor in named:
        if tensor is not None and not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}, not a tensor: use broadcast_object for it")
    tensors = [tensor for _, tensor in named if tensor is not None]
    starting.broadcast_in_place(tensors, root_rank, process_set).wait()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give every rank the root's optimizer state: options, and what it keeps for each parameter. `model` is ignored."""
    state = broadcast_object(optimizer.state_dict(), root_rank, process_set=process_set)
    if process_set.number_of(root_rank) != process_set.rank():
        optimizer.load_state_dict(state)


def broadcast_object(
    obj: ObjectT, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> ObjectT:
    """The root's object, on every rank; anything that can be pickled."""
    is_root = process_set.number_of(root_rank) == process_set.rank()
    content = _pickled(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([content.numel()])
    starting.broadcast_in_place([length], root_rank, process_set).wait()
    if not is_root:
        content = torch.empty(int(length), dtype=torch.uint8)
    starting.broadcast_in_place([content], root_rank, process_set).wait()
    if is_root:
        return obj
    received: ObjectT = pickle.loads(content.numpy().tobytes())
    return received


def allgather_object(
    obj: ObjectT, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[ObjectT]:
    """Everyone's object, in the order of ranks."""
    content = _pickled(obj)
    lengths = starting.gather([torch.tensor([content.numel()])], process_set).wait()[0].tolist()
    every = starting.gather([content], process_set).wait()[0]
    return [pickle.loads(its.numpy().tobytes()) for its in every.split(lengths)]


def _pickled(obj: object) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
