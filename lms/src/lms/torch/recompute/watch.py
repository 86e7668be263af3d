"""Watches the calls of modules in one pass: what each saves, how long it takes, and whether it could run again."""

from __future__ import annotations

import inspect
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch.nn import Module
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from lms.core.recompute import Call, Candidate
from lms.memory.device import Mark
from lms.runtime.recorder import Recorder
from lms.torch.hooks import SavedTensorHooks
from lms.torch.recompute.forward import Forward
from lms.torch.recompute.surroundings import (
    Surroundings,
    are_plain,
    attributes,
    has_hooks,
    parameters_and_buffers,
    traits_of,
)
from lms.torch.records import View
from lms.torch.swapper import SavedTensorSwapper

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def watchable(known: Iterable[Module]) -> list[Module]:
    """Those modules in which nothing runs but the forwards of the parts' own classes."""
    closed = {part for module in known if _is_transformed(module) for part in module.modules()}
    return [module for module in known if not any(part in closed or _is_special(part) for part in module.modules())]


def _is_transformed(module: Module) -> bool:
    """Whether it is compiled, or a copy of it runs."""
    kinds = (torch._dynamo.OptimizedModule, torch.nn.DataParallel)
    return isinstance(module, kinds) or module._compiled_call_impl is not None


def _is_special(module: Module) -> bool:
    return (
        isinstance(module, torch.jit.ScriptModule)
        or not isinstance(inspect.getattr_static(type(module), "forward"), FunctionType)
        or ("forward" in vars(module) and module.forward != MethodType(type(module).forward, module))
        or has_hooks(module)
        or any(isinstance(value, _GENERATORS) for value in attributes(module))
    )


@dataclass(eq=False)
class _Span:
    """One call of a module in the pass that is watched."""

    mark: Mark
    first: int  # the number of the next access when it began
    within: tuple[Module, ...]  # the calls that it lies in
    last: int = 0
    inputs: list[int] = field(default_factory=list)  # as in Call
    extra_inputs: list[int] = field(default_factory=list)
    views: list[View] = field(default_factory=list)  # of all inputs, to see whether they change
    state: list[torch.Tensor] = field(default_factory=list)  # parameters and buffers, to see whether they are the same


class Watch:
    """Watches module calls: what each saves, how long it takes, and whether it could run again unnoticed."""

    def __init__(self, swapper: SavedTensorSwapper, hooks: SavedTensorHooks) -> None:
        self._swapper = swapper
        self._hooks = hooks
        self._recorder: Recorder | None = None  # of the pass that the spans lie in, once it has begun
        self._spans: defaultdict[Module, list[_Span]] = defaultdict(list)
        self._open: list[Module] = []
        self._unfit: set[Module] = set()

    def __call__(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's forward, and note what it does."""
        module, recorder = forward.module, self._swapper.recorder
        if recorder is not self._recorder and self._recorder is not None:
            self._spans.clear()  # another pass
        self._recorder = recorder
        mark = self._swapper.planner.device.mark()
        span = _Span(mark, recorder.position if recorder is not None else 0, tuple(self._open))
        traits = traits_of(module)
        if module in self._spans and traits != forward.traits:
            self._unfit.add(module)
        forward.traits = traits
        leaves = tree_leaves((args, kwargs))
        # In the backward `parametrize.cached()` is over, and the forward would compute what it finds in the cache now.
        plain = are_plain(leaves) and not parametrize._cache_enabled
        before = Surroundings(module, (args, kwargs), self._hooks.unusual, values=True) if plain else None
        self._open.append(module)
        fit = False
        try:
            result = forward.plain(*args, **kwargs)
            fit = plain and before == Surroundings(module, (args, kwargs), self._hooks.unusual, values=True)
        finally:
            self._open.pop()
            if not fit:
                self._unfit.add(module)
        if not are_plain(tree_leaves(result)):
            self._unfit.add(module)
        recorder = self._swapper.recorder
        self._recorder = self._recorder or recorder
        self._swapper.slow()
        if module not in self._unfit and recorder is not None and recorder is self._recorder:
            span.last = recorder.position
            span.state = parameters_and_buffers(module)
            for leaf in {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values():
                self._note_input(span, leaf)
            self._spans[module].append(span)
        return result

    def _note_input(self, span: _Span, tensor: torch.Tensor) -> None:
        view = View(tensor)
        view.vacate()
        span.views.append(view)
        index = self._swapper.recorded_as(tensor)
        if index is not None:
            span.inputs.append(index)
        elif not isinstance(self._swapper.movable.storage(tensor), str):
            span.extra_inputs.append(tensor.untyped_storage().nbytes())

    def lose_sight(self) -> None:
        """Something is saved that LMS does not see: under a checkpoint, for example."""
        self._unfit.update(self._open)

    def candidates(self, names: Mapping[Module, str]) -> dict[Module, Candidate] | None:
        """The modules that can be recomputed, after a pass that the current plan is for; None if it was another."""
        recorder, planner = self._recorder, self._swapper.planner
        if recorder is None or not recorder.measure or planner.last is None or planner.last.recorder is not recorder:
            return None
        if planner.current is None or planner.current.keys != recorder.keys():
            return None
        fit = [
            module
            for module, spans in self._spans.items()
            if module not in self._unfit and self._repeatable(module, spans)
        ]
        numbers = {module: number for number, module in enumerate(fit)}
        trace = planner.undisturbed
        assert trace is not None
        found: dict[Module, Candidate] = {}
        for module, number in numbers.items():
            spans = self._spans[module]
            calls = [
                Call(
                    one.first,
                    one.last,
                    min(_seconds(one, recorder), sum(trace.times[one.first : one.last])),
                    tuple(one.inputs),
                    tuple(one.extra_inputs),
                )
                for one in spans
                if one.first < one.last
            ]
            within = {numbers[outer] for one in spans for outer in one.within if outer in numbers}
            name = names[module]
            if name in {one.name for one in found.values()}:
                name = f"{name} ({number})"  # modules of different models
            found[module] = Candidate(name, tuple(calls), frozenset(within))
        return found

    def _repeatable(self, module: Module, spans: Sequence[_Span]) -> bool:
        """Whether inputs, parameters and buffers are as they were, and no backward ran inside."""
        assert self._recorder is not None
        state = [id(one) for one in parameters_and_buffers(module)]
        return not any(
            any(view.changed for view in one.views)
            or "read" in self._recorder.kinds[one.first : one.last]
            or [id(tensor) for tensor in one.state] != state  # torch.func.functional_call
            for one in spans
        )


def _seconds(span: _Span, recorder: Recorder) -> float:
    """Computation from the call's begin to the last tensor that it saves."""
    marks = [span.mark, *recorder.marks[2 * span.first + 1 : 2 * span.last]]
    return sum(recorder.device.elapsed(marks)[::2])
