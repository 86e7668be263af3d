"""The lane: saved-tensor hooks in C++ for what needs no decision, `lms/native/lane.cc`. Here its Python side.

`python -m lms.build torch` compiles it. Without it the hooks in Python do all the work, with the same results.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType
from typing import NamedTuple, Protocol, cast

import torch

from lms.build import LANE, library_path


class Saved(Protocol):
    """What autograd keeps instead of a saved tensor that took the lane."""

    alias: torch.Tensor  # until there is a handle
    version: int
    handle: object  # Python's, once it has taken the pass over


class Rest(NamedTuple):
    """A record that lives, or one about which it is not known whether the script keeps its storage."""

    record: int
    key: tuple[int, int]  # address of the storage, version
    storage: torch.UntypedStorage | None
    handed: torch.Tensor | None  # what its last use was given
    saved: list[Saved]  # none if it is freed


class Taken(NamedTuple):
    """What the lane knows of a pass when Python takes it over."""

    marks: list[float]  # entry and exit of each hook, if the pass is timed
    held: list[int]  # bytes held after each access; the same
    tasks: list[int]  # by access: the number of the backward that it was for, -1 if it is no read
    freed: list[int]  # by record: the access before which it was freed, -1 if it lives
    kept: list[bool]  # by record: the script had the storage when it was freed
    rest: list[tuple[object, ...]]  # fields of Rest
    last_use: int  # sequence number at the last read, 0 if there was none
    held_peak: int  # bytes


class Lane(Protocol):
    """What the swapper and its hooks ask of the lane."""

    open: bool  # whether new tensors are taken
    seconds: float  # in the lane's hooks; who reads this and the next two sets them to zero
    small: int  # bytes that were saved and stay
    parameters: int
    leading: bool  # a pass: Python knows nothing yet of what has happened in it
    over: bool  # that pass has ended
    live: int  # its records that autograd holds
    held: int  # their bytes
    pack: Callable[[torch.Tensor], object]
    unpack: Callable[[object], torch.Tensor]

    def fall_back(self, pack: Callable[[torch.Tensor], object], unpack: Callable[[object], torch.Tensor]) -> None:
        """Give all else to these hooks."""

    def lead(self, codes: list[int], cap: list[int], sizes: list[int], pinned: list[bool], timed: bool, /) -> None:
        """Lead a pass. See Guide for the lists."""

    def begin(self, tensor: torch.Tensor) -> Saved | None:
        """What autograd is to keep of the first tensor of that pass; None if the lane cannot take it."""

    def take(
        self,
    ) -> tuple[list[float], list[int], list[int], list[int], list[bool], list[tuple[object, ...]], int, int]:
        """The fields of Taken. The pass is Python's from now on."""


class NoLane:
    """Stands in for a lane that was not compiled, or has no place: Python's hooks do all the work."""

    def __init__(self) -> None:
        self.open = True
        self.seconds, self.small, self.parameters = 0.0, 0, 0
        self.leading = self.over = False
        self.live = self.held = 0

    def fall_back(self, pack: Callable[[torch.Tensor], object], unpack: Callable[[object], torch.Tensor]) -> None:
        """These are the hooks."""
        self.pack, self.unpack = pack, unpack


def make_lane(device: torch.device, min_size: int, stays: Mapping[int, object], ended: Callable[[], None]) -> Lane:
    """The lane for the calling thread, for storages on `device` of which those in `stays`, by address, never move.

    `ended` is called when a pass that the lane leads is over.
    """
    module = find()
    if module is None:
        return cast("Lane", NoLane())
    return cast("Lane", module.Lane(torch.empty(0, device=device), min_size, stays, ended))


@cache
def find() -> ModuleType | None:
    """The compiled module; None if there is none for this PyTorch and this Python, or it cannot be loaded."""
    path = library_path(torch.__version__, LANE)
    if not path.exists():
        return None
    loader = ExtensionFileLoader("lane", str(path))
    spec = spec_from_loader("lane", loader)
    assert spec is not None
    try:
        module = module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        warnings.warn(
            f"the lane cannot be loaded ({error}): remove {path.name} and compile it again with "
            "`python -m lms.build torch`",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return module
