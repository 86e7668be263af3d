"""Who keeps a graph open: names of variables, for the warning that its saved tensors stay."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from types import FrameType, ModuleType
from typing import TypeGuard, cast

import torch

_OURS = ("lms", "torch", "importlib")  # whose variables are no user's
_MOST = 3  # names that are told
_OURS_ALONE = 3  # references to a frame's copy of its variables: the frame's, ours and that of the call that counts
_MOST_ITEMS = 10_000  # of one container that are looked at


def sequence_number() -> int:
    """The number that autograd's next node on this thread will have."""
    return int(torch._C._autograd._get_sequence_nr())


def holders(before: int) -> list[str]:
    """Variables that hold a tensor whose graph was made before sequence number `before`: at most three.

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
    if _is_tensor(value):
        return _is_old(value, before)
    # Nothing of the script's own may run here, so containers of other types are left out.
    items: Iterable[object] = ()
    if type(value) is dict:
        items = list(value.values())
    elif type(value) in (list, tuple, set):
        items = list(cast("Iterable[object]", value))
    elif not issubclass(type(value), (type, ModuleType)):
        with suppress(AttributeError):
            items = list(object.__getattribute__(value, "__dict__").values())
    return any(_is_tensor(item) and _is_old(item, before) for item in islice(items, _MOST_ITEMS))


def _is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    return issubclass(type(value), torch.Tensor)  # isinstance would ask the value itself


def _is_old(tensor: torch.Tensor, before: int) -> bool:
    node = tensor.grad_fn
    return node is not None and node._sequence_nr() < before
