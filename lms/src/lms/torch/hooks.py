"""A session's saved-tensor hooks: set on one thread, and taken off while PyTorch allows none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import graph

from lms.torch.native_hooks import NativeHooks, Pack, Unpack
from lms.torch.records import View

# Their kernel writes to a tensor after autograd has saved it, and the tensor's version stays. A copy that has begun by
# then has other bytes.
_WRITE_TO_WHAT_IS_SAVED = ("rrelu", "rrelu_")


class SavedTensorHooks:
    """The native hooks with `pack` and `unpack` behind them, from `set` to `remove`, both called on the same thread.

    The transforms of torch.func (grad, vjp, jacrev, hessian) refuse to run while any hooks are set. They ask for that
    with `torch.autograd.graph.disable_saved_tensors_hooks`, and PyTorch offers nothing that is called before it
    refuses. So this one public function is replaced from `set` to `remove`: if these hooks are the innermost ones of
    the calling thread, they are taken off for as long as the context is open, and what is saved meanwhile stays.
    """

    def __init__(self, native: NativeHooks, pack: Pack, unpack: Unpack) -> None:
        # Inside a compiled region Dynamo would compile our own code too, and write into what autograd saves.
        native.fall_back(torch.compiler.disable(pack), torch.compiler.disable(unpack))
        self._pack = native.pack
        self._hooks = graph.saved_tensors_hooks(self._pack, native.unpack)
        self._disable = graph.disable_saved_tensors_hooks
        self._set = False
        self._aside = False
        self.unusual = 0  # calls for which no other hooks can stand in

    def set(self) -> None:
        """Set the hooks on this thread."""
        self._hooks.__enter__()
        self._set = True
        disable = self._disable

        @contextmanager
        def disable_saved_tensors_hooks(error_message: str) -> Iterator[None]:
            with self._put_aside(), disable(error_message):
                yield

        graph.disable_saved_tensors_hooks = disable_saved_tensors_hooks
        self._plain = {name: getattr(torch, name) for name in _WRITE_TO_WHAT_IS_SAVED}
        for name, function in self._plain.items():
            setattr(torch, name, self._staying(function))

    def remove(self) -> None:
        """Take the hooks off."""
        graph.disable_saved_tensors_hooks = self._disable
        for name, function in self._plain.items():
            setattr(torch, name, function)
        self._set = False
        if not self._aside:
            self._hooks.__exit__()

    @contextmanager
    def _put_aside(self) -> Iterator[None]:
        if not self.are_innermost():
            yield
            return
        self.unusual += 1
        self._hooks.__exit__()
        self._aside = True
        try:
            yield
        finally:
            self._aside = False
            if self._set:
                self._hooks.__enter__()

    def are_innermost(self) -> bool:
        """Whether what is saved now, on this thread, comes to these hooks."""
        innermost = torch._C._autograd._top_saved_tensors_default_hooks(True)  # no public name tells
        return innermost is not None and innermost[0] is self._pack

    def _staying(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """The function, with all that it saves left where it is."""

        @functools.wraps(function)
        def staying(*args: Any, **kwargs: Any) -> torch.Tensor:
            if not self.are_innermost():
                return function(*args, **kwargs)
            self.unusual += 1
            with graph.saved_tensors_hooks(View, _checked):
                return function(*args, **kwargs)

        return staying


def _checked(view: View) -> torch.Tensor:
    view.check()
    return view.alias
