"""Whose steps count: the optimizers of a session, given or added, or the first that steps."""

from __future__ import annotations

import sys
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, cast

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

_STEP = Optimizer.profile_hook_step(len).__code__  # of what PyTorch puts around the step of each class
_MOST_OTHERS = 64  # steps of one other optimizer after which the one that counts has done its work


class Optimizers:
    """Calls hooks before and after each step of the optimizers that are known; of all, as long as none is."""

    def __init__(self, given: Iterable[Optimizer]) -> None:
        self._known: list[Optimizer] = []
        self._counting: weakref.ref[Optimizer] | None = None  # the one that counts
        self._others: Counter[int] = Counter()  # steps of each other one, by number, since it stepped last
        self._hooks: list[RemovableHandle] = []
        self._after_step: Callable[[Optimizer], None] | None = None
        self._before_step: Callable[..., Any] | None = None
        self._before: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()
        self.add(given)

    def add(self, more: Iterable[Optimizer]) -> None:
        """Know `more` optimizers. If none was known so far, the first to step from now on counts."""
        if not self._known:
            self._counting = None
        for one in map(_unwrapped, more):
            if not any(one is known for known in self._known):
                self._known.append(one)
        if self._after_step is not None:
            self.listen(self._after_step, self._before_step)

    def listen(self, after_step: Callable[[Optimizer], None], before_step: Callable[..., Any] | None = None) -> None:
        """Have steps told until `leave`. `before_step` is a pre-hook of PyTorch's, which may replace the arguments."""
        self.leave()
        self._after_step = after_step

        def hook(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
            if not _is_nested(optimizer):
                after_step(optimizer)

        hook = torch.compiler.disable(hook)  # as the session's other hooks
        if self._known:
            self._hooks = [one.register_step_post_hook(hook) for one in self._known]
        else:
            self._hooks = [register_optimizer_step_post_hook(hook)]
        if before_step is not None:
            self._before_step = torch.compiler.disable(before_step)
            self._hooks.append(register_optimizer_step_pre_hook(torch.compiler.disable(self._come_last)))

    def leave(self) -> None:
        """Have nothing told any more."""
        self._after_step = self._before_step = None
        for handle in (*self._hooks, *self._before.values()):
            handle.remove()
        self._hooks = []
        self._before.clear()

    def _come_last(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        """Put `before_step` behind the optimizer's other hooks, which have not begun: they may change gradients."""
        if self._known and not any(optimizer is known for known in self._known):
            return
        assert self._before_step is not None
        if optimizer not in self._before:
            self._before[optimizer] = optimizer.register_step_pre_hook(self._before_step)
        hooks = cast("OrderedDict[int, object]", optimizer._optimizer_step_pre_hooks)
        hooks.move_to_end(self._before[optimizer].id)

    def counts(self, optimizer: Optimizer) -> bool:
        """Whether the step that `optimizer` has taken is one of the training's. To be asked once a step.

        Of several optimizers the first that steps counts. If it is gone, or has not stepped for long, the next one
        does: a script may train two models one after the other.
        """
        counting = self._counting() if self._counting is not None else None
        if optimizer is not counting:
            self._others[id(optimizer)] += 1
            if counting is not None and self._others[id(optimizer)] <= _MOST_OTHERS:
                return False
            self._counting = weakref.ref(optimizer)
        self._others.clear()
        return True


def _is_nested(optimizer: Optimizer) -> bool:
    """Whether the step that ends is part of another: a subclass's `step` may call its base's, and both run hooks."""
    frame: FrameType | None = sys._getframe()
    steps = 0
    while frame is not None:
        steps += frame.f_code is _STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps > 1


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer that steps. Accelerate's wrapper is an Optimizer by its class, and has no hooks."""
    while not hasattr(optimizer, "_optimizer_step_post_hooks") and isinstance(
        inner := getattr(optimizer, "optimizer", None), Optimizer
    ):
        optimizer = inner
    return optimizer
