"""An optimizer's state, partly below the device: what is read comes back."""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch

from lms.errors import LMSError
from lms.memory.transfer import Copy
from lms.torch.engine import Engine
from lms.torch.records import View, flat_bytes, use_count

Parameter = torch.Tensor


class Tier:
    """The engine, shared with the saved tensors, and what the state's copies cost: bytes, and seconds of waiting.

    `lock` is held for each call of the engine. After `close` it ends with the last tensor that is away.
    """

    def __init__(self, engine: Engine, lock: threading.Lock) -> None:
        self.engine = engine
        self.lock = lock
        self.out = self.back = 0
        self.waited = 0.0
        self.strays = False  # something came back since the last step
        self._away = 0
        self._then: Callable[[], None] | None = None

    def wait(self, copy: Copy) -> None:
        """Wait for a copy. Raises its error if it failed."""
        began = time.perf_counter()
        try:
            copy.wait()
        finally:
            self.waited += time.perf_counter() - began

    def close(self, then: Callable[[], None]) -> None:
        """Call `then` as soon as nothing is away."""
        self._then = then
        self.count(0)

    def count(self, more: int) -> None:
        """So many more tensors are away."""
        self._away += more
        if not self._away and self._then is not None:
            then, self._then = self._then, None
            then()


class Away:
    """Stands in the place of a tensor that is away. PyTorch's functions refuse it."""

    __slots__ = ("_arrival", "_flat", "_slot", "_tier", "_view", "departure", "nbytes")

    def __init__(self, tier: Tier, tensor: torch.Tensor) -> None:
        self._tier = tier
        self.nbytes = tensor.untyped_storage().nbytes()
        self._view = View(tensor)
        with tier.lock:
            self._slot, self.departure = tier.engine.offload(flat_bytes(tensor))
        tier.count(1)
        tier.out += self.nbytes
        self._view.vacate()
        self._flat: torch.Tensor | None = None
        self._arrival: Copy | None = None

    def start(self) -> None:
        """Start the copy back, unless it was started."""
        if self._flat is None:
            if self._tier.engine.capturing():
                raise LMSError(
                    "optimizer state that LMS has swapped out is used while a CUDA graph is captured; close the "
                    "session, step once, and capture then"
                )
            with self._tier.lock:
                self._flat, self._arrival = self._tier.engine.reload(self._slot)

    def tensor(self) -> torch.Tensor:
        """The tensor, bit for bit; waits for its copy. Raises the copy's error; the tensor is not lost by it."""
        self.start()
        assert self._arrival is not None
        try:
            self._tier.wait(self._arrival)
        except LMSError:
            self._flat = self._arrival = None
            if self.departure.failed is None:
                raise
            self._flat = cast(torch.Tensor, self.departure.keep)  # it never left
        assert self._flat is not None
        self._view.fill(self._flat)
        self._flat = None
        self._tier.back += self.nbytes
        self._tier.strays = True
        return self._view.alias

    def __del__(self) -> None:
        if hasattr(self, "_arrival"):  # else it never left
            self._tier.engine.discard(self._slot)
            self._tier.count(-1)

    def __repr__(self) -> str:
        return f"<{self.nbytes} bytes of state that LMS has swapped out: read optimizer.state[parameter] anew>"


class OptimizerState(defaultdict[Parameter, dict[str, Any]]):
    """`optimizer.state`, partly away. To read a parameter's entry brings its tensors back."""

    def __init__(self, plain: Iterable[tuple[Parameter, dict[str, Any]]]) -> None:
        super().__init__(dict, plain)

    def entry(self, parameter: Parameter) -> dict[str, Any]:
        """The entry as it is, with what is away left away; an empty one if there is none, or no dict."""
        entry = super().get(parameter)
        return entry if isinstance(entry, dict) else {}

    def __getitem__(self, parameter: Parameter) -> dict[str, Any]:
        bring_back(self.entry(parameter))
        return super().__getitem__(parameter)

    def __iter__(self) -> Iterator[Parameter]:
        return super().__iter__()  # with this, dict(state) reads each entry as above

    def get(self, parameter: Parameter, default: Any = None) -> Any:
        """As a dict's."""
        bring_back(self.entry(parameter))
        return super().get(parameter, default)

    def values(self) -> Any:
        """As a dict's, in a list: everything is back."""
        return [self[parameter] for parameter in self]

    def items(self) -> Any:
        """As a dict's, in a list: everything is back."""
        return [(parameter, self[parameter]) for parameter in self]

    def pop(self, parameter: Parameter, *default: Any) -> Any:
        """As a dict's."""
        bring_back(self.entry(parameter))
        return super().pop(parameter, *default)

    def popitem(self) -> Any:
        """As a dict's."""
        parameter = next(reversed(self))
        return parameter, self.pop(parameter)

    def setdefault(self, parameter: Parameter, default: Any = None) -> Any:
        """As a dict's."""
        bring_back(self.entry(parameter))
        return super().setdefault(parameter, default)

    def copy(self) -> Any:
        """A plain one, with everything back."""
        return defaultdict(dict, self.items())

    __copy__ = copy

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


def bring_back(entry: dict[str, Any]) -> None:
    """Bring back what of a parameter's state is away. Raises the error of a copy that failed."""
    for container, key in start_back(entry):
        container[key] = container[key].tensor()


def start_back(entry: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Start the copies back of what of a parameter's state is away: its places."""
    away = [(container, key) for container, key in places(entry) if isinstance(container[key], Away)]
    for container, key in away:
        container[key].start()
    return away


def tensors(entry: Any) -> Iterator[torch.Tensor]:
    """The tensors of a parameter's state that are on the device."""
    found = (container[key] for container, key in places(entry))
    return (one for one in found if isinstance(one, torch.Tensor))


def places(entry: Any) -> Iterator[tuple[Any, Any]]:
    """Where an entry has a tensor or an `Away`: container and key. It refers to neither meanwhile."""
    for key in list(entry) if isinstance(entry, dict) else range(len(entry)):
        kind = type(entry[key])
        if kind in (dict, list):
            yield from places(entry[key])
        elif kind in (torch.Tensor, Away):
            yield entry, key


def _references(container: Any, key: Any) -> int:
    return sys.getrefcount(container[key])


_ALONE = _references([torch.empty(0)], 0)  # what is counted if nothing but the container refers to an object


def is_alone(container: Any, key: Any) -> bool:
    """Whether no other code has the tensor, or another over the same storage."""
    if _references(container, key) > _ALONE:
        return False
    storage = container[key].untyped_storage()
    return use_count(storage._cdata) <= 2  # the tensor's and `storage`
