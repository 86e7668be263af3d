"""Moves the state of optimizers: it is away between steps, and comes back while its optimizer steps.

PyTorch's own optimizers treat each parameter by itself, so a step over all parameters is a step over one part of them
after another, bit for bit. The state of one part is on the device while the next comes back and the last one leaves.
Other optimizers get all of their state back, entry by entry as they read it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from lms.errors import LMSError
from lms.memory.transfer import Copy
from lms.torch.movable import is_plain, movable
from lms.torch.optimizer_state import (
    Away,
    OptimizerState,
    Parameter,
    Tier,
    bring_back,
    is_alone,
    places,
    start_back,
)

CHUNK = 32 << 20  # bytes of state that step together at least; one parameter may have more
_BY_PARAMETER = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop",
        "Rprop", "SGD", "SparseAdam",
    )
    if hasattr(torch.optim, name)
)  # fmt: skip

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
StepArguments = tuple[Arguments, Keywords]
Part = list[tuple[dict[str, Any], list[Parameter]]]  # parameters that step together, with their parameter groups


class Figures(NamedTuple):
    """Bytes of an optimizer's state: what may move, and what of it is on the device."""

    nbytes: int
    held: int


class StatePager:
    """Moves the state of optimizers between the device and `tier`, around their steps.

    Storages below `min_size` bytes stay, and so does what other code refers to, because that code could not be told
    that the tensor is away. About `part` bytes of state step together, or `CHUNK` if that is more. If there is more
    room than before, but no more than `slack` bytes, as much leaves as before.
    `before_part` is told of the parameters that are about to step, and `after_part` of those that have, with the state.
    """

    def __init__(
        self,
        tier: Tier,
        device: torch.device,
        *,
        min_size: int,
        part: int,
        slack: int,
        before_part: Callable[[Iterable[Parameter]], None],
        after_part: Callable[[Iterable[tuple[Parameter, dict[str, Any]]]], None],
    ) -> None:
        self.tier = tier
        self._before_part = before_part
        self._after_part = after_part
        self._device = device
        self._min_size = max(min_size, 1)
        self.part = max(part, CHUNK)
        self._slack = slack
        self._copies = True  # else a pager moves the state, and nothing is to be done but to step in parts
        self._stay = 0
        self._known: weakref.WeakKeyDictionary[Optimizer, Figures] = weakref.WeakKeyDictionary()
        self._stepping = False
        self._failed: LMSError | None = None  # of a copy out: the tensor stays on the device

    @property
    def figures(self) -> Figures:
        """Of all optimizers, after their last steps."""
        return Figures(*map(sum, zip((0, 0), *self._known.values(), strict=True)))

    def before_step(
        self, optimizer: Optimizer, args: Arguments, kwargs: Keywords, *, room: int | None
    ) -> StepArguments | None:
        """Before a step: PyTorch's own optimizers step here, part by part, and then once more over nothing.

        `room` bytes of all state may stay; None: all, because it can leave at its addresses. The arguments are a
        step's; returns others for the step to go on with.
        """
        self._stepping = True
        self._copies = room is not None
        if room is not None and not 0 <= room - self._stay <= self._slack:
            self._stay = room
        if not isinstance(optimizer.state, OptimizerState):
            optimizer.state = OptimizerState(optimizer.state.items())
        if type(optimizer) not in _BY_PARAMETER:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step(optimizer)
        return (_part_of(optimizer, []), (lambda: loss) if closure is not None else None), {}

    def after_step(self, optimizer: Optimizer) -> None:
        """After a step: what may not stay leaves. Raises the error of a copy out that failed, if one did.

        The step is complete then, and nothing is lost.
        """
        self._leave(optimizer)
        self._stepping = self.tier.strays = False
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def tidy(self) -> None:
        """Let leave again what came back between two steps because something read it: a checkpoint, a log."""
        if not self._stepping:
            for optimizer in list(self._known):
                self._leave(optimizer)
            self.tier.strays = False

    def _leave(self, optimizer: Optimizer) -> None:
        state = optimizer.state
        if isinstance(state, OptimizerState):  # else it was loaded since the step began
            if type(optimizer) not in _BY_PARAMETER:
                self._after_part((parameter, state.entry(parameter)) for parameter in state)
            departures, held, nbytes = self._trim(state, state, self._allowed(optimizer), 0)
            self._known[optimizer] = Figures(nbytes, held)
            self._wait(departures)

    def _allowed(self, optimizer: Optimizer) -> int:
        """Bytes of the state of `optimizer` that may stay."""
        return self._stay - sum(figures.held for other, figures in self._known.items() if other is not optimizer)

    def _step(self, optimizer: Optimizer) -> None:
        state, step = optimizer.state, type(optimizer).step.__wrapped__  # type: ignore[attr-defined]  # without hooks
        assert isinstance(state, OptimizerState)
        parts, allowed, held = self._parts(optimizer, state), self._allowed(optimizer), 0
        leaving: deque[list[Copy]] = deque([[], []])  # copies out of the last two parts
        for index, part in enumerate(parts):
            self._wait(leaving.popleft())
            try:
                for soon in parts[index : index + 2] if self._copies else ():
                    for parameter in _parameters(soon):
                        start_back(state.entry(parameter))
                for parameter in _parameters(part):
                    bring_back(state.entry(parameter))
            except LMSError as error:
                raise type(error)(
                    f"{error}; the optimizer has stepped {index} of the {len(parts)} parts of its parameters: go on "
                    "from a checkpoint, and do not repeat the step"
                ) from error
            self._before_part(_parameters(part))
            step(_part_of(optimizer, part))
            self._after_part((parameter, state.entry(parameter)) for parameter in _parameters(part))
            departures, held, _ = self._trim(state, _parameters(part), allowed, held)
            leaving.append(departures)
        for copies in leaving:
            self._wait(copies)

    def _trim(
        self, state: OptimizerState, parameters: Iterable[Parameter], allowed: int, held: int
    ) -> tuple[list[Copy], int, int]:
        """Let the state of `parameters` leave, except the first, which fill the `allowed` bytes beside `held` others.

        Returns the copies out, the bytes held then, and the bytes that may leave in all.
        """
        departures: list[Copy] = []
        total = 0
        for parameter in parameters if self._copies else ():
            entry = state.entry(parameter)
            nbytes = self._nbytes(entry)
            total += nbytes
            if held + nbytes <= allowed:
                held += nbytes
            else:
                departures += self._send_away(entry)
        return departures, held, total

    def _wait(self, departures: Iterable[Copy]) -> None:
        for copy in departures:
            try:
                self.tier.wait(copy)
            except LMSError as error:
                self._failed = self._failed or error

    def _parts(self, optimizer: Optimizer, state: OptimizerState) -> list[Part]:
        """The parameters that have a gradient, in parts of about `part` bytes of state."""
        parts: list[Part] = []
        room = 0
        for group in optimizer.param_groups:
            fresh, is_uniform = True, self._is_uniform(group["params"])
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                # No state yet: most optimizers keep two tensors of the parameter's size.
                nbytes = self._nbytes(state.entry(parameter)) or 2 * parameter.nbytes
                if not parts or (nbytes > room and (fresh or is_uniform)):
                    parts.append([])
                    room, fresh = self.part, True
                if fresh:
                    parts[-1].append((group, []))
                    fresh = False
                parts[-1][-1][1].append(parameter)
                room -= nbytes
        return parts

    def _is_uniform(self, parameters: Iterable[Parameter]) -> bool:
        """Whether a step over some of the parameters computes as one over all of them does.

        Optimizers that may choose between a loop and one call for many tensors look at all of them.
        """
        return all(
            is_plain(one) and one.device == self._device and (one.grad is None or one.grad.layout is torch.strided)
            for one in parameters
        )

    def _nbytes(self, entry: dict[str, Any]) -> int:
        """Bytes of the entry that are away, or that may leave."""
        total = 0
        for container, key in places(entry):
            value = container[key]
            if isinstance(value, Away):
                total += value.nbytes
            elif self._may_leave(value):
                total += value.untyped_storage().nbytes()
        return total

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        return (
            movable(tensor, self._device)
            and not tensor.requires_grad
            and tensor.untyped_storage().nbytes() >= self._min_size
        )

    def _send_away(self, entry: dict[str, Any]) -> list[Copy]:
        """The copies of what of the entry leaves."""
        copies = []
        for container, key in places(entry):
            if isinstance(container[key], Away) or not self._may_leave(container[key]) or not is_alone(container, key):
                continue
            try:
                container[key] = away = Away(self.tier, container[key])
            except LMSError as error:  # the tier takes no more
                self._failed = self._failed or error
            else:
                copies.append(away.departure)
        return copies


def _parameters(part: Part) -> Iterator[Parameter]:
    for _, parameters in part:
        yield from parameters


def _part_of(optimizer: Optimizer, part: Part) -> Optimizer:
    """The optimizer as if it had only these parameters. It shares all else: state, defaults, a scaler's marks."""
    alike = object.__new__(type(optimizer))
    alike.__dict__ = {**optimizer.__dict__, "param_groups": [{**group, "params": some} for group, some in part]}
    return alike
