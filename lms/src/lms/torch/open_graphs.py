"""Graphs that stay open when their step is over: their records, and who keeps them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from types import FrameType, ModuleType
from typing import cast

import torch

from lms.torch.records import LiveRecord
from lms.units import format_size
from lms.warn import warn_script

_OURS = ("lms", "torch", "importlib")  # their variables are no user's
_MOST = 3  # names that are told
_OURS_ALONE = 3  # references to a frame's copy of its variables: the frame's, ours and that of the call that counts
_MOST_ITEMS = 10_000  # of one container that are looked at


class OpenGraphs:
    """The live records of passes that are over, and the one warning about them."""

    def __init__(self) -> None:
        self.records: set[LiveRecord] = set()
        self.last_use = 0  # autograd's sequence number when a record was used last
        self._warning = ""  # the tensors that it is about
        self._warned = False

    def add(self, records: Sequence[LiveRecord], *, told: bool) -> None:
        """A pass has left these records behind. `told`: the user knows of them."""
        self.records.update(records)
        if not self._warned and not told:
            tensors = "a tensor" if len(records) == 1 else f"{len(records)} tensors"
            self._warning = f"{tensors} ({format_size(sum(record.nbytes for record in records))})"

    def warn(self) -> None:
        """Say once that a graph is kept, and by which variable."""
        if not self._warning:
            return
        tensors, self._warning, self._warned = self._warning, "", True
        names = " or ".join(holders(self.last_use)) or "a variable that LMS did not find"
        warn_script(
            f"an earlier step's graph is still open: {tensors} saved for it stay saved. It is kept by {names}. LMS "
            "plans without these tensors, and moves them if it needs room. If you do not need the graph, detach or "
            "delete the variable, and do not pass retain_graph=True"
        )


def sequence_number() -> int:
    """The number that autograd's next node on this thread will have."""
    return int(torch._C._autograd._get_sequence_nr())


def holders(before: int) -> list[str]:
    """Variables that hold a tensor with a graph from before sequence number `before`: at most three.

    Looked at are the variables of the running functions, of the main module (a notebook's too) and of the traceback of
    the last exception, with one level of containers and attributes below them.
    """
    found: dict[str, None] = {}
    for where, variables in _scopes():
        for name, value in variables:
            if _holds(value, before):
                found.setdefault(f"{name!r} in {where}", None)
        if len(found) >= _MOST:
            break
    return list(found)[:_MOST]


def _scopes() -> Iterator[tuple[str, list[tuple[str, object]]]]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if not _is_ours(frame) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # a function's, and no module's
            yield f"{frame.f_code.co_name}()", _variables(frame)
        frame = frame.f_back
    main = sys.modules.get("__main__")
    if main is not None:
        yield "the main module", list(vars(main).items())
    traceback = getattr(sys, "last_traceback", None)
    while traceback is not None:
        if not _is_ours(traceback.tb_frame):
            yield "the traceback of the last exception (sys.last_traceback)", _variables(traceback.tb_frame)
        traceback = traceback.tb_next


def _variables(frame: FrameType) -> list[tuple[str, object]]:
    variables = frame.f_locals
    items = list(variables.items())
    # Before Python 3.13 the frame keeps this copy until its function returns, and with it what the script deletes. If
    # the script has the copy too, from locals(), it is the script's.
    if sys.version_info < (3, 13) and sys.getrefcount(variables) <= _OURS_ALONE:
        variables.clear()
    return items


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OURS


def _holds(value: object, before: int) -> bool:
    # Nothing of the script's own may run here, so containers of other types are left out.
    items: Iterable[object] = (value,)
    if type(value) is dict:
        items = list(value.values())
    elif type(value) in (list, tuple, set):
        items = list(cast("Iterable[object]", value))
    elif not issubclass(type(value), (type, ModuleType, torch.Tensor)):
        with suppress(AttributeError):
            items = list(object.__getattribute__(value, "__dict__").values())
    return any(_is_old(item, before) for item in islice(items, _MOST_ITEMS))


def _is_old(value: object, before: int) -> bool:
    """Whether it is a tensor with a graph from before that sequence number."""
    if not issubclass(type(value), torch.Tensor):  # isinstance would ask the value itself
        return False
    node = cast("torch.Tensor", value).grad_fn
    return node is not None and node._sequence_nr() < before
