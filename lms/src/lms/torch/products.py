"""Products: results of matrix products, convolutions and attention, which a recomputed module may keep.

They take most of a module's time and often less than half of what it saves, so its other operations can run again
without them (selective recomputation: Korthikanti et al., arXiv:2205.05198, section 5). A kept product is a saved
tensor like any other: it may be swapped.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from lms.errors import LMSError
from lms.memory.device import Mark
from lms.torch.records import View
from lms.torch.swapper import SavedTensorSwapper

_BELOW_AUTOGRAD = torch._C.DispatchKey.ADInplaceOrView


def _is_product(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the operation is one whose floating-point operations PyTorch counts, and draws no random numbers.

    If such an operation did not run again, what runs after it would draw other numbers than before.
    """
    if operation._overloadpacket not in flop_registry:
        return False
    names = [one.name for one in operation._schema.arguments]
    if "dropout_p" not in names:
        return torch.Tag.nondeterministic_seeded not in operation.tags
    at = names.index("dropout_p")
    default = operation._schema.arguments[at].default_value
    return not kwargs.get("dropout_p", args[at] if at < len(args) else default)


def _with_versions() -> AbstractContextManager[object]:
    """Tensors that are detached inside share their version counter, as they do above autograd."""
    return torch._C._SetExcludeDispatchKeyGuard(_BELOW_AUTOGRAD, False)


class Result:
    """One tensor that a product gave. The record that has its bytes is known once something has saved it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        with _with_versions():
            self.view = View(tensor)  # without the bytes: to see whether it changes
        self.view.vacate()
        self.nbytes = storage.nbytes()
        self.record: int | None = None
        self._storage = weakref.ref(storage)

    def look_up(self, swapper: SavedTensorSwapper) -> bool:
        """Find the record, as long as the storage lives; whether there is no need to look again."""
        storage = self._storage()
        if storage is not None:
            self.record = swapper.record_of(storage, self.view.version)
        return storage is None or self.record is not None


class Operation(NamedTuple):
    """One operation of the pass that is watched."""

    position: int  # of the next access before it ran
    marks: tuple[Mark, Mark]  # around it
    results: list[Result] | None  # of a product; None: it is none


class Watching(TorchDispatchMode):
    """Notes all operations, in their order. Their times leave out what the device waits for between them."""

    def __init__(self, swapper: SavedTensorSwapper) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self._unknown: list[Result] = []
        self._swapper = swapper
        self._device = swapper.planner.device

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        kwargs = kwargs or {}
        recorder = self._swapper.recorder
        before = self._device.mark()
        results = operation(*args, **kwargs)
        marks = before, self._device.mark()
        noted = None
        if _is_product(operation, args, kwargs):
            noted = [Result(one) for one in tree_leaves(results) if isinstance(one, torch.Tensor)]
            self._unknown += noted
        self.operations.append(Operation(recorder.position if recorder is not None else 0, marks, noted))
        return results

    def look_up(self) -> None:
        """Find out which records have the results. Some are saved only after the module that has made them."""
        self._unknown = [one for one in self._unknown if not one.look_up(self._swapper)]

    def forget(self) -> None:
        """Begin anew."""
        self.operations.clear()
        self._unknown.clear()


class Keeping(TorchDispatchMode):
    """In a module's forward: keeps the products with these `numbers`, in the order of the forward."""

    def __init__(self, swapper: SavedTensorSwapper, numbers: Collection[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept: dict[int, tuple[Any, Any]] = {}  # by number: the operation and what stands for its results
        self._swapper = swapper
        self._numbers = numbers
        self._number = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        kwargs = kwargs or {}
        results = operation(*args, **kwargs)
        if _is_product(operation, args, kwargs):
            if self._number in self._numbers:
                with _with_versions():
                    self.kept[self._number] = operation, tree_map(self._pack, results)
            self._number += 1
        return results

    def _pack(self, leaf: object) -> object:
        return _Kept(self._swapper.pack(leaf)) if isinstance(leaf, torch.Tensor) else leaf


class _Kept(NamedTuple):
    packed: Any


class Giving(TorchDispatchMode):
    """As the module runs again: gives the products that were kept, and has the others computed."""

    def __init__(self, keeping: Keeping) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeping = keeping

    def __enter__(self) -> Giving:
        """From the forward's begin."""
        self._number = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, or give what it gave."""
        kwargs = kwargs or {}
        if not _is_product(operation, args, kwargs):
            return operation(*args, **kwargs)
        number = self._number
        self._number += 1
        if number not in self._keeping.kept:
            return operation(*args, **kwargs)
        known, results = self._keeping.kept[number]
        if known is not operation:
            raise LMSError(f"a recomputed forward calls {operation} where it called {known} before")
        with _with_versions():
            return tree_map(self._unpack, results, is_leaf=lambda leaf: isinstance(leaf, _Kept))

    def _unpack(self, leaf: object) -> object:
        return self._keeping._swapper.unpack(leaf.packed).detach() if isinstance(leaf, _Kept) else leaf


def contexts(swapper: SavedTensorSwapper, numbers: Collection[int]) -> tuple[Keeping, Giving]:
    """For `torch.utils.checkpoint`: what is around the forward, and around what runs again."""
    keeping = Keeping(swapper, numbers)
    return keeping, Giving(keeping)
