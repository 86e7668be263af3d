"""Which module is running: for names in traces, reports and errors."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from types import CodeType, FrameType

from torch.nn import Module

_CALL: CodeType = Module.__call__.__code__  # what Python runs when any module is called


class ModuleNames:
    """Names of modules, found on the Python stack when they are asked for.

    No hook is installed on modules: a module call costs what it costs without LMS, and compiled code, which checks the
    hooks that it was compiled with, is not compiled again.

    The qualified names are those of `models`. Other modules are named as parts of the root that is running: the
    outermost module call when the first of its parts is asked for.
    """

    def __init__(self, models: Iterable[Module] = ()) -> None:
        self.known: weakref.WeakKeyDictionary[Module, str] = weakref.WeakKeyDictionary()  # those met so far
        for model in models:
            self._learn(model)

    def running(self) -> str:
        """The qualified name of the innermost module that is running; the class of a root, which has no name.

        Empty if none is running.
        """
        frame = _next_call(sys._getframe(1))
        if frame is None:
            return ""
        module = root = _module(frame)
        name = self.known.get(module)
        if name is None:
            while (frame := _next_call(frame.f_back)) is not None:
                root = _module(frame)
            self._learn(root)
            # A module that is no registered part of its root, such as one in a plain list, has its class.
            name = self.known.setdefault(module, type(module).__name__)
        return name

    def _learn(self, root: Module) -> None:
        for name, module in root.named_modules():
            self.known[module] = name or type(module).__name__


def _next_call(frame: FrameType | None) -> FrameType | None:
    """The innermost module call at or above `frame`."""
    while frame is not None and frame.f_code is not _CALL:
        frame = frame.f_back
    return frame


def _module(frame: FrameType) -> Module:
    module = frame.f_locals[_CALL.co_varnames[0]]
    assert isinstance(module, Module)
    return module
