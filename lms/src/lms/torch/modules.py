"""Which module is running: for names in traces, reports and errors."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle


class ModuleStack:
    """The modules whose forward is under way, outermost first, while it is watching.

    It watches for as long as its session is open: compiled code is compiled again when global hooks come or go.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self.thread = threading.get_ident()
        self._names = {module: name for model in models for name, module in model.named_modules() if name}
        self._stack: list[torch.nn.Module] = []
        self._handles: list[RemovableHandle] = []
        self._warned = False

    def watch(self) -> None:
        """Begin."""
        self.stop()
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._exit, always_call=True),
        ]

    def stop(self) -> None:
        """End."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stack.clear()

    def name(self) -> str:
        """The innermost module's qualified name, or its class where no model that has it was given."""
        if not self._stack:
            return ""
        module = self._stack[-1]
        return self._names.get(module) or type(module).__name__

    def _enter(self, module: torch.nn.Module, _args: object) -> None:
        if torch.compiler.is_compiling():
            return
        if threading.get_ident() != self.thread:
            self.warn_of_thread("a forward")
        else:
            self._stack.append(module)

    def _exit(self, module: torch.nn.Module, _args: object, _result: object) -> None:
        if not torch.compiler.is_compiling() and self._stack and self._stack[-1] is module:
            self._stack.pop()

    def warn_of_thread(self, what: str) -> None:
        """Say once that saved-tensor hooks belong to a thread."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{what} runs on thread {threading.current_thread().name!r}, but LMS acts on the thread that enabled "
                "it (saved-tensor hooks are thread-local), so what is saved there stays: enable LMS on that thread.",
                RuntimeWarning,
                stacklevel=3,
            )
