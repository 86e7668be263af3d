"""An optimizer that averages gradients over all ranks before each step."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn, SupportsIndex, cast

import torch
from torch.nn import Parameter

from ddl.frontends.core.buckets import even_groups, limit_of
from ddl.frontends.core.ops import Average, Op, check_optimizer, checked_passes
from ddl.horovod.torch.averaging import Averager
from ddl.horovod.torch.compression import Compression, Compressor
from ddl.horovod.torch.process_sets import ProcessSet, global_process_set
from ddl.horovod.torch.starting import Reduction

_NOT_AGAIN = (
    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): over DDL it reduces "
    "nothing again, over Horovod it does; `with optimizer.skip_synchronize():` around the step means the same to both"
)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Distributed:
    """`optimizer` as one of its own class that reduces gradients over all ranks before each step.

    Reductions begin while the backward pass goes on, in buckets of up to HOROVOD_FUSION_THRESHOLD bytes (default 25
    MiB), or in `groups`: as many, or lists of parameters. Gradients of `backward_passes_per_step` passes add up before.
    With `gradient_predivide_factor` f an average is f / size times the sum of gradients over f. A parameter without a
    gradient on this rank counts as zeros. Every rank passes the same arguments; one that is not in `process_set` steps
    by its own gradients. As in Horovod, gradients that are None become zeros; `zero_grad()` makes them None again.

    Raises ValueError: an argument is wrong, or a parameter's name stands twice or is missing.
    """
    groups = num_groups if groups is None else groups
    factor = gradient_predivide_factor
    check_optimizer(op, factor, groups)
    if hasattr(optimizer, "_averager"):
        raise ValueError("the optimizer is one of DistributedOptimizer already: its gradients would be reduced twice")
    named = _named(optimizer, named_parameters)
    how = Reduction(op, 1 / factor, factor, process_set)
    numbered = _numbered(groups, named)
    passes = checked_passes(backward_passes_per_step)
    averager = Averager(named, how, compression, sparse_as_dense, passes, limit_of(os.environ), numbered)
    # Of the optimizer's class, as learning-rate schedulers and others check. It shares the optimizer's state, hooks
    # included: however a step is begun (a scheduler may have wrapped it), it reduces first.
    kind = type(optimizer)
    made = cast("Distributed", object.__new__(type(kind.__name__, (Distributed, kind), {})))
    made.__dict__ = optimizer.__dict__
    made._averager = averager
    made.register_step_pre_hook(_before_step)
    made.register_step_post_hook(_after_step)
    for _, parameter in named:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return made


class Distributed(torch.optim.Optimizer):
    """Added to an optimizer's class by DistributedOptimizer."""

    _averager: Averager

    @property
    def _parameter_names(self) -> dict[Parameter, str]:
        """As Horovod's optimizers have it: the names of parameters that are reduced."""
        return self._averager.names

    def synchronize(self) -> None:
        """Wait until all gradients are reduced: before they are clipped, say. `step` then reduces nothing again."""
        _synchronize(self)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A `step` in this context takes the gradients as they are."""
        self._averager.skips = True
        try:
            yield
        finally:
            self._averager.skips = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes add up to a gradient."""
        self._averager.passes = checked_passes(passes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients. Raises RuntimeError while they are on their way."""
        if self._averager.in_flight:
            raise RuntimeError(
                "zero_grad() between backward() and step(): gradients are on their way to the other ranks; call "
                "step() or synchronize() first"
            )
        super().zero_grad(set_to_none)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        # A copy would have the parameters' hooks of the one that was copied, and step by gradients that nobody reduces.
        raise TypeError(
            "an optimizer of DistributedOptimizer belongs to this job's ranks, and cannot be copied or pickled: "
            "take its state_dict(), and load that into an optimizer made the same way"
        )


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    averager: Averager = optimizer._averager  # type: ignore[attr-defined]
    positional = len(args) > 1  # the first is the optimizer
    closure = args[1] if positional else kwargs.get("closure")
    if closure is None and averager.synchronized and not averager.skips:
        warnings.warn(_NOT_AGAIN, stacklevel=3)
    if closure is None or averager.in_flight:
        _reduce(optimizer)
    if closure is None:
        return None

    def reduced() -> Any:
        loss = closure()
        _reduce(optimizer)
        return loss

    return ((args[0], reduced, *args[2:]), kwargs) if positional else (args, {**kwargs, "closure": reduced})


def _after_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    optimizer._averager.synchronized = False  # type: ignore[attr-defined]


def _reduce(optimizer: torch.optim.Optimizer) -> None:
    averager: Averager = optimizer._averager  # type: ignore[attr-defined]
    if not averager.skips and not averager.synchronized:
        _synchronize(optimizer)


def _synchronize(optimizer: torch.optim.Optimizer) -> None:
    averager: Averager = optimizer._averager  # type: ignore[attr-defined]
    # Those that came later, or were frozen at first.
    late = [pair for pair in _parameters(optimizer) if pair[1].requires_grad and pair[1] not in averager.names]
    averager.add(late)
    averager.synchronize()


def _parameters(optimizer: torch.optim.Optimizer) -> list[tuple[str, Parameter]]:
    """All of them, by their places."""
    return [
        (f"parameter {number} of group {index}", parameter)
        for index, group in enumerate(optimizer.param_groups)
        for number, parameter in enumerate(group["params"])
    ]


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Parameter]] | None
) -> list[tuple[str, Parameter]]:
    """The optimizer's parameters that need gradients, in its order, by their names."""
    parameters = _parameters(optimizer)
    if named_parameters is not None:
        named = list(named_parameters)
        if any(not isinstance(pair, tuple) for pair in named):
            raise ValueError("named_parameters: pairs of a name and a parameter, as model.named_parameters() gives")
        seen = [name for name, _ in named]
        if twice := sorted({name for name in seen if seen.count(name) > 1}):
            raise ValueError(f"named_parameters: names must differ, but these stand twice: {', '.join(twice)}")
        names = {parameter: name for name, parameter in named}
        if nameless := [place for place, parameter in parameters if parameter not in names]:
            raise ValueError(f"named_parameters has no name for {', '.join(nameless)} of the optimizer: pass all")
        parameters = [(names[parameter], parameter) for _, parameter in parameters]
    return [(name, parameter) for name, parameter in parameters if parameter.requires_grad]


def _numbered(groups: int | Sequence[Sequence[Parameter]], named: list[tuple[str, Parameter]]) -> list[list[int]]:
    if isinstance(groups, int):
        return even_groups(len(named), groups)
    number_of = {parameter: number for number, (_, parameter) in enumerate(named)}
    numbered = [[number_of[parameter] for parameter in group if parameter in number_of] for group in groups]
    every = [number for group in numbered for number in group]
    if len(set(every)) != len(every):
        raise ValueError("groups: a parameter stands in two of them, but can travel with one only")
    return numbered
