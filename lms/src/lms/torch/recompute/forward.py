"""What stands in for the forward of a module that is watched or recomputed."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from types import MethodType
from typing import Any

import torch
from torch.nn import Module

from lms.torch.recompute.surroundings import Traits


class Forward:
    """Stands in for a module's forward. `run` is called with it and the arguments while the session `acts`."""

    def __init__(self, module: Module, name: str, run: Run, acts: Callable[[], bool], traits: Traits) -> None:
        self.module, self.name = module, name
        self.plain = MethodType(type(module).forward, module)
        self.traits = traits  # the module's when it was watched
        self.proven = False  # it gave the same bytes again
        self._run = run
        self._acts = acts
        update_wrapper(self, self.plain)  # trainers look at signatures

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result."""
        if torch.compiler.is_compiling() or not self._acts():
            return self.plain(*args, **kwargs)
        return self._run(self, args, kwargs)

    def __reduce__(self) -> tuple[object, ...]:
        """A copy of the module, or what is read from a file, has its own forward."""
        return getattr, (self.module, "forward")


Run = Callable[[Forward, tuple[Any, ...], dict[str, Any]], Any]
