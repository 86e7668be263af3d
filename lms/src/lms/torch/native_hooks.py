"""Saved-tensor hooks in C++, for saved tensors that need no decision: `lms/native/saved_tensor_hooks.cc`.

`python -m lms.build torch` compiles them. Without them the hooks in Python do all the work, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import NamedTuple, Protocol, cast

import torch

from lms.build import HOOKS, built

Pack = Callable[[torch.Tensor], object]
Unpack = Callable[[object], torch.Tensor]


class Saved(Protocol):
    """Autograd keeps this instead of a tensor that C++ took."""

    alias: torch.Tensor  # until there is a handle
    version: int
    handle: object  # Python's, once it has taken the pass over


# A record that lives, or one that died while the backward worked on its storage: its number, its key, its storage, the
# tensor that its last use was given, and what autograd keeps of it (nothing if it died).
Open = tuple[int, tuple[int, int], torch.UntypedStorage | None, torch.Tensor | None, list[Saved]]


class Led(NamedTuple):
    """The facts of a pass that C++ led."""

    marks: list[float]  # entry and exit of each hook, if the pass is timed
    held: list[int]  # bytes held after each access, if the pass is timed
    tasks: list[int]  # for each access the number of its backward, -1 if it is no read
    freed: list[int]  # for each record the access before which it was freed, -1 if it lives
    owned: list[bool]  # for each record that does not move: the script had its storage when it was freed
    open: list[Open]  # without those that move
    last_use: int  # autograd's sequence number at the last read, 0 if there was none
    held_peak: int  # bytes
    pending: bool


class NativeHooks:
    """The interface of the hooks in C++. This class stands in for them if they are not compiled, and does nothing."""

    open = True  # they take new tensors
    leading = False  # a pass
    over = False  # that pass has ended
    pending = False  # its last access was noted, and `leave` not called since
    live = 0  # records of it that autograd holds, without those that move
    held = 0  # bytes of these records
    position = 0  # the number of its next access
    seconds = 0.0  # spent in C++. The reader of this or one of the next two sets it to zero
    small = 0  # bytes that were saved and stay
    parameters = 0
    pack: Pack
    unpack: Unpack

    def fall_back(self, pack: Pack, unpack: Unpack) -> None:
        """Give all else to these hooks."""
        self.pack, self.unpack = pack, unpack

    def lead(
        self,
        codes: Sequence[int],
        cap: Sequence[int],
        sizes: Sequence[int],
        pinned: Sequence[bool],
        moves: Sequence[bool],
        timed: bool,
        /,
    ) -> None:
        """Lead the pass that begins. `Guide` and `Course` say what the lists are."""

    # While C++ leads, Python attends some accesses, from `attend` to `leave`. One of the methods between them notes it.

    def wake(self) -> None:
        """The next access is Python's."""

    def attend(self) -> None:
        """The next access is Python's, and begins now."""

    def save(self, tensor: torch.Tensor, /) -> Saved | int | None:
        """If the access is the planned one: what autograd is to keep. If the record moves, its number."""
        return None

    def use(self, saved: Saved, /) -> torch.Tensor | None:
        """If the access is the planned one: the saved tensor. Its record does not move."""
        return None

    def use_record(self, record: int, /) -> bool:
        """Whether the access is the planned one, of a record that moves."""
        return False

    def leave(self, held: int, wake: int, /) -> None:
        """The access is over. From access `wake` on each one is Python's.

        The stepper holds `held` bytes: of records that move, and of copies in flight.
        """

    def free(self, record: int, held: int, /) -> None:
        """This record, which moves, is not needed any more. The stepper holds `held` bytes, as above."""
        raise NotImplementedError

    def take(self) -> Led:
        """Hand the pass over to Python. Only called while C++ leads one."""
        raise NotImplementedError


def native_hooks(
    device: torch.device, min_size: int, stays: Mapping[int, object], ended: Callable[[], None]
) -> NativeHooks:
    """Hooks for storages on `device`, for a session on the calling thread.

    Storages below `min_size` bytes never move, nor do those in `stays`, by address. `ended` is called when a pass that
    C++ leads is over.
    """
    module = find()
    if module is None:
        return NativeHooks()
    return cast("NativeHooks", module.Hooks(torch.empty(0, device=device), min_size, stays, ended))


def same_counter(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a change in place of one tensor is known to count as one of the other, too.

    True for a view and its base. False for two pieces by `unsafe_chunk`, and for all if the hooks are not compiled:
    Python cannot see the counters.
    """
    module = find()
    return module is not None and cast("bool", module.same_counter(one, other))


@cache
def find() -> ModuleType | None:
    """The compiled module; None if there is none for this PyTorch and this Python, or it cannot be loaded."""
    return built(torch.__version__, HOOKS, _imported)


def _imported(path: str) -> ModuleType:
    spec = spec_from_file_location("native_hooks", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
