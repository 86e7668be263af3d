"""Who keeps a graph open: names of variables, for the warning that its saved tensors stay."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import FrameType, ModuleType

import torch

_OURS = ("lms", "torch", "importlib")  # whose variables are no user's
_MOST = 3  # names that are told
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
        for name, value in list(variables.items()):
            if _holds(value, before):
                found.setdefault(f"{name!r} in {where}", None)
        if len(found) >= _MOST:
            break
    return list(found)[:_MOST]


def _scopes() -> Iterator[tuple[str, Mapping[str, object]]]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if not _is_ours(frame) and frame.f_code.co_name != "<module>":
            yield f"{frame.f_code.co_name}()", frame.f_locals
        frame = frame.f_back
    main = sys.modules.get("__main__")
    if main is not None:
        yield "the main module", vars(main)
    traceback = getattr(sys, "last_traceback", None)
    while traceback is not None:
        if not _is_ours(traceback.tb_frame):
            yield "the traceback of the last exception (sys.last_traceback)", traceback.tb_frame.f_locals
        traceback = traceback.tb_next


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OURS


def _holds(value: object, before: int) -> bool:
    if isinstance(value, torch.Tensor):
        return _is_old(value, before)
    if isinstance(value, (type, ModuleType)):
        return False
    items: Iterable[object]
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (list, tuple, set)):
        items = value
    else:
        items = getattr(value, "__dict__", {}).values()
    return any(isinstance(item, torch.Tensor) and _is_old(item, before) for item in islice(items, _MOST_ITEMS))


def _is_old(tensor: torch.Tensor, before: int) -> bool:
    node = tensor.grad_fn
    return node is not None and node._sequence_nr() < before
