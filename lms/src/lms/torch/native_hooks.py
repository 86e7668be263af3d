"""Saved-tensor hooks in C++, for saved tensors that need no decision: `lms/native/saved_tensor_hooks.cc`.

`python -m lms.build torch` compiles them. Without them the hooks in Python do all the work, with the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    owned: list[bool]  # for each record: the script had its storage when it was freed
    open: list[Open]
    last_use: int  # autograd's sequence number at the last read, 0 if there was none
    held_peak: int  # bytes


class NativeHooks:
    """The interface of the hooks in C++. This class stands in for them if they are not compiled, and does nothing."""

    open = True  # they take new tensors
    leading = False  # a pass: Python knows nothing yet of what has happened in it
    over = False  # that pass has ended
    live = 0  # records of it that autograd holds
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
        tensor: torch.Tensor,
        codes: list[int],
        cap: list[int],
        sizes: list[int],
        pinned: list[bool],
        timed: bool,
        /,
    ) -> Saved | None:
        """Lead the pass that begins with `tensor`: what autograd is to keep of it. None if the pass is not for C++.

        `Guide` and `Course` say what the lists are.
        """
        return None

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
