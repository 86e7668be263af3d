"""What a module's forward may use and should not change, and how a change is noticed."""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Collection, Iterable

import numpy as np
import torch
from torch.nn import Module
from torch.utils._pytree import tree_flatten, tree_leaves

from lms.torch.movable import movable
from lms.torch.recompute.running_statistics import statistics_of

Traits = list[tuple[bool, bool]]
_PIECE = 1 << 20  # bytes that are summed at once
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)


class Surroundings:
    """What a forward may use and should not change: tensors, attributes of its modules, random numbers' state.

    With `values` buffers are compared by their bytes: `F.batch_norm` writes to them without a new version.
    """

    def __init__(self, module: Module, arguments: object, unusual: int, *, values: bool) -> None:
        leaves, spec = tree_flatten(arguments)
        values_of_parts = [value for part in module.modules() for value in attributes(part)]
        tensors = parameters_and_buffers(module)
        gradients = [one.grad for one in tensors if one.is_leaf]
        # References, so that no other object gets the same id.
        self._objects = [*leaves, *tensors, *gradients, *values_of_parts]
        statistics = statistics_of(module)
        self._values = sums_of([one for one in module.buffers() if id(one) not in statistics]) if values else []
        self._state = (
            [id(one) for one in self._objects],
            _versions(self._objects, statistics),
            random.getstate(),
            pickle.dumps(np.random.get_state(legacy=False)),
            spec,
            unusual,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Surroundings) or self._state != other._state:
            return False
        return all(map(torch.equal, self._values, other._values))

    __hash__ = None  # type: ignore[assignment]


def _versions(tensors: Iterable[object], left_out: Collection[int]) -> list[int]:
    """How often each of the tensors was written to, but for those with these ids."""
    return [
        one._version
        for one in tensors
        if isinstance(one, torch.Tensor) and not one.is_inference() and id(one) not in left_out
    ]


def attributes(module: Module) -> list[object]:
    """The values of the module's attributes, and the items of those that are containers, keys included."""
    values = list(vars(module).values())
    containers = [one for one in values if isinstance(one, _CONTAINERS)]
    items = [item for one in containers for item in one]
    return [*values, *items, *(item for one in containers if isinstance(one, dict) for item in one.values())]


def has_hooks(module: Module) -> bool:
    """Whether anything of the script's runs before or after the module's forward or backward."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def traits_of(module: Module) -> Traits:
    """What decides how the module's parts run, and may change at any time."""
    return [(part.training, has_hooks(part)) for part in module.modules()]


def are_plain(leaves: Iterable[object]) -> bool:
    """Whether these arguments or results are values, or tensors with memory of their own."""
    return all(
        movable(leaf, leaf.device) and not leaf.is_inference()
        if isinstance(leaf, torch.Tensor)
        else isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device, type(None)))
        for leaf in leaves
    )


def parameters_and_buffers(module: Module) -> list[torch.Tensor]:
    """Those of the module and of its parts."""
    return [*module.parameters(), *module.buffers()]


def state_of(module: Module) -> object:
    """What must not change between a forward and its repetition."""
    tensors = parameters_and_buffers(module)
    return traits_of(module), [id(one) for one in tensors], _versions(tensors, statistics_of(module))


def sums_of(result: object) -> list[torch.Tensor]:
    """For each tensor the sums of its bytes, piece by piece, each weighted by its place: their order counts."""
    tensors = [leaf.detach() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return [torch.stack([_sum(piece) for piece in _bytes(one).split(_PIECE)]) for one in tensors]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _sum(piece: torch.Tensor) -> torch.Tensor:
    return (piece * torch.arange(1, len(piece) + 1, device=piece.device)).sum()  # in int64, exact
