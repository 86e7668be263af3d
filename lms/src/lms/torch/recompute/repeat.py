"""Runs a module's forward, and has it run again in the backward. Raises if it would not give the same."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lms.errors import LMSError
from lms.torch.recompute.forward import Forward
from lms.torch.recompute.running_statistics import Buffers, running_statistics, statistics_as_they_were
from lms.torch.recompute.surroundings import Surroundings, are_plain, state_of, sums_of, traits_of


def repeat(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the module's forward, and have it run again in the backward."""
    leaves, spec = tree_flatten((args, kwargs))
    if traits_of(forward.module) != forward.traits or not are_plain(leaves):
        return forward.plain(*args, **kwargs)  # it is not as it was when it was watched
    # What is given twice, such as query and key, is one object in the second run, too.
    distinct = {id(one): one for one in leaves}
    places = {key: place for place, key in enumerate(distinct)}
    call = _Call(forward, spec, [places[id(one)] for one in leaves])
    # The first time it runs again to its end, so that the results can be compared.
    with nullcontext() if forward.proven else set_checkpoint_early_stop(False):
        return checkpoint(call, *distinct.values(), use_reentrant=False, preserve_rng_state=True)


class _Call:
    """One call of a module: it runs now, and again whenever a backward first needs what it would have saved."""

    def __init__(self, forward: Forward, spec: TreeSpec, places: list[int]) -> None:
        self._forward = forward
        self._spec = spec
        self._places = places  # of each leaf among the arguments of the call
        self._state: object = None
        self._statistics: list[tuple[Buffers, Buffers]] = []  # running ones, and what they were
        self._sums: list[torch.Tensor] | None = None  # of the result's bytes, while the module is not proven

    def __call__(self, *arguments: object) -> Any:
        """The result. Raises LMSError if the module has changed meanwhile, or gives something else now."""
        forward = self._forward
        args, kwargs = tree_unflatten([arguments[place] for place in self._places], self._spec)
        again, before = self._state is not None, state_of(forward.module)
        if again and before != self._state:
            raise self._error(
                "its parameters, buffers or mode have changed since its forward, and plain training would "
                "have used what was saved before"
            )
        around = None if again else self._around(args, kwargs)
        if not again:
            self._statistics = running_statistics(forward.module)
        with statistics_as_they_were(self._statistics) if again else nullcontext():
            result = forward.plain(*args, **kwargs)
        if not again:
            self._state = before
            if self._around(args, kwargs) != around:
                raise self._error(
                    "its forward has changed an argument, a parameter, a gradient, a buffer, an attribute or the state "
                    "of random numbers, which it did not when it was watched"
                )
            self._sums = None if forward.proven else sums_of(result)
        elif self._sums is not None:
            sums = sums_of(result)
            if len(sums) != len(self._sums) or not all(map(torch.equal, self._sums, sums)):
                raise self._error("its forward gave another result the second time")
            forward.proven = True
        return result

    def _around(self, args: object, kwargs: object) -> Surroundings:
        return Surroundings(self._forward.module, (args, kwargs), 0, values=not self._forward.proven)

    def _error(self, why: str) -> LMSError:
        return LMSError(f"module {self._forward.name!r} cannot be recomputed: {why}; train with recompute=False")
