"""The state of models, optimizers and other Python objects, from one rank to all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ddl.frontends.core import objects
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

    `prefix` is ignored. Raises ValueError: something in it is no tensor; MismatchError: ranks have other ones.
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
    """Give every rank the root's optimizer state: options, and what it keeps for each parameter. `model` is ignored.

    Tensors go one by one, each to the device of its parameter, or to the CPU if the root has it there while its
    parameter is on a GPU. Raises MismatchError: the ranks' optimizers have other numbers of parameters.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    counts = [len(group["params"]) for group in optimizer.param_groups]
    process_set.meet("broadcast_optimizer_state", f"root {root_rank}, parameters of each group {counts}")
    tensors: list[Tensor] = []

    def outline_of(value: object, number: object) -> object:
        if not isinstance(value, Tensor):
            return value
        tensors.append(value)
        near = parameters[number] if isinstance(number, int) else parameters[0]
        return _Outline(value.dtype, value.shape, value.device.type == near.device.type)

    def filled(value: object, number: object) -> object:
        if not isinstance(value, _Outline):
            return value
        near = parameters[number] if isinstance(number, int) else parameters[0]
        tensors.append(torch.empty(value.shape, dtype=value.dtype, device=near.device if value.beside else "cpu"))
        return tensors[-1]

    is_root = process_set.number_of(root_rank) == process_set.rank()
    outline = _mapped_state(optimizer.state_dict(), outline_of) if is_root else {}
    outline = broadcast_object(outline, root_rank, process_set=process_set)
    state = None if is_root else _mapped_state(outline, filled)
    for tensor in tensors:
        starting.broadcast_in_place([tensor], root_rank, process_set).wait()
    if state is not None:
        optimizer.load_state_dict(state)


class _Outline(NamedTuple):
    """The type and shape from which another rank makes a tensor of a parameter's state."""

    dtype: torch.dtype
    shape: torch.Size
    beside: bool  # its parameter, on the same kind of device


def broadcast_object(
    obj: ObjectT, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> ObjectT:
    """The root's object, on every rank; anything that can be pickled."""

    def copy_from_root(array: np.ndarray, part: str | None) -> None:
        starting.broadcast_in_place([torch.from_numpy(array)], root_rank, process_set, part).wait()

    is_root = process_set.number_of(root_rank) == process_set.rank()
    return objects.broadcast(obj, is_root, name, copy_from_root)


def allgather_object(
    obj: ObjectT, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[ObjectT]:
    """Everyone's object, in the order of ranks."""

    def gathered(array: np.ndarray, part: str | None) -> np.ndarray:
        every: np.ndarray = starting.gather([torch.from_numpy(array)], process_set, part).wait()[0].numpy()
        return every

    return objects.allgather(obj, name, gathered)


def _mapped_state(state: dict[str, Any], step: Callable[[object, object], object]) -> dict[str, Any]:
    """An optimizer's `state_dict()`, each value replaced by `step(value, number of its parameter)`."""

    def mapped(value: object, number: object) -> object:
        if isinstance(value, dict):
            return {name: mapped(its, number) for name, its in value.items()}
        if type(value) is list:
            return [mapped(its, number) for its in value]
        if type(value) is tuple:
            return tuple(mapped(its, number) for its in value)
        return step(value, number)

    states = {number: mapped(its, number) for number, its in state["state"].items()}
    groups = [
        {name: its if name == "params" else mapped(its, None) for name, its in group.items()}
        for group in state["param_groups"]
    ]
    return {**state, "state": states, "param_groups": groups}
