"""Parameters and gradients below the device, at addresses that stay: they come back as they are used.

A CPU's only. The pager in C++ brings back whatever is touched. This file tells it, from what the last step did, what
will be used next: a module's parameters before its forward, a parameter and its gradient as autograd has made the
gradient, and both as an optimizer steps over them.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from lms.memory.page_pool import LEAST
from lms.memory.pager import Block, Pager, PagerUsage
from lms.torch.cpu.page_pool import pages
from lms.torch.movable import movable
from lms.torch.records import flat_bytes, use_count

# A parameter that a session has let leave stays with the pager: later sessions go on with its place in the file.
_places: WeakIdKeyDictionary = WeakIdKeyDictionary()
_CPU = torch.device("cpu")
_MOST_USES = 1_000_000  # in a step; one that never ends is not remembered

Use = tuple[Block, ...]  # what one operation uses


class Paging:
    """Lets parameters and gradients of at least `min_size` bytes leave, of all modules that are called."""

    def __init__(
        self,
        pager: Pager,
        never: Callable[[torch.Tensor], None],
        *,
        parameters: bool,
        gradients: bool,
        min_size: int,
    ) -> None:
        self.pager = pager
        self._never = never  # have a parameter not count as a saved tensor
        self._parameters = parameters
        self._gradients = gradients
        self._min_size = max(min_size, LEAST)
        self._known: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._adopted = WeakIdKeyDictionary()  # parameters: their blocks, or None for one that stays
        self._of_gradients = WeakIdKeyDictionary()  # parameters: the blocks of their gradients
        self._hooks: list[RemovableHandle] = []
        self._course: list[Use] = []  # of the last step
        self._uses: dict[Use, list[int]] = {}  # their positions in it
        self._taken: list[Use] = []  # of this one
        self._at = 0  # the position in the course behind the last use
        self._before = pager.usage()

    def open(self, models: Iterable[torch.nn.Module]) -> None:
        """Begin, with the parameters of `models`. Others follow as their modules are called."""
        self._hooks.append(register_module_forward_pre_hook(torch.compiler.disable(self._before_forward)))
        for model in models:
            self._learn(model)

    def close(self) -> None:
        """Nothing leaves any more. What is away comes back as it is used."""
        for hook in self._hooks:
            hook.remove()
        self.pager.stop()

    def before_part(self, parameters: Iterable[torch.Tensor], room: int) -> None:
        """An optimizer is about to step over these, with `room` bytes for all that may leave."""
        self.pager.keep(room)
        for parameter in parameters:
            self._use(parameter)

    @property
    def nbytes(self) -> int:
        """All bytes that may leave, of gradients that were freed too."""
        blocks = (*self._adopted.values(), *self._of_gradients.values())
        return sum(block.nbytes for block in blocks if block is not None)

    def usage(self) -> PagerUsage:
        """Figures of this session. Raises SpillError if a write failed since the last call."""
        now, before = self.pager.usage(), self._before
        return now._replace(out=now.out - before.out, back=now.back - before.back, waited=now.waited - before.waited)

    def after_step(self, room: int) -> None:
        """An optimizer has stepped: what comes next is taken to be like what came since its last step.

        At most `room` bytes of all that may leave stay from now on. Raises SpillError if the disk took no more.
        """
        self.pager.keep(room)
        for parameter in list(self._adopted):  # those whose memory is another's now
            self._track(parameter)
        if self._taken != self._course:
            self._course, self._uses = self._taken, defaultdict(list)
            for at, used in enumerate(self._course):
                self._uses[used].append(at)
            self.pager.expect(self._course)
        self._taken, self._at = [], 0
        self.pager.reach(0)
        self.usage()

    # Uses

    def _before_forward(self, module: torch.nn.Module, _args: object) -> None:
        if module not in self._known:
            self._learn(module)
        for parameter in module._parameters.values():
            if parameter is not None:
                self._use(parameter, gradient=False)

    def _after_accumulation(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if self._gradients and gradient is not None and self._may_leave(gradient):
            block = self._of_gradients.get(parameter)
            if block is None:
                block = self._of_gradients[parameter] = self.pager.block(_nbytes(gradient), transient=True)
            self.pager.track(block, gradient.untyped_storage().data_ptr())
        self._use(parameter)

    def _use(self, parameter: torch.Tensor, *, gradient: bool = True) -> None:
        of_gradient = self._of_gradients.get(parameter) if gradient else None
        used = tuple(block for block in (self._adopted.get(parameter), of_gradient) if block is not None)
        if not used:
            return
        if len(self._taken) < _MOST_USES:
            self._taken.append(used)
        found = self._uses.get(used)
        if found is not None:  # the next such use, or after an evaluation the first
            next_one = bisect_left(found, self._at)
            at = found[next_one if next_one < len(found) else 0]
            self._at = at + 1
            self.pager.reach(at)

    # What may leave

    def _learn(self, module: torch.nn.Module) -> None:
        for part in module.modules():
            self._known.add(part)
        for parameter in module.parameters():
            if parameter in self._adopted:
                continue
            self._adopted[parameter] = None
            self._never(parameter)
            if parameter.requires_grad and parameter.is_leaf:
                hook = torch.compiler.disable(self._after_accumulation)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
            self._track(parameter)

    def _track(self, parameter: torch.Tensor) -> None:
        if not self._parameters or not self._may_leave(parameter):
            return
        nbytes = _nbytes(parameter)
        block: Block | None = _places.get(parameter)
        if block is None or block.nbytes != nbytes:
            block = _places[parameter] = self.pager.block(nbytes)
        storage = parameter.untyped_storage()
        tracked = self.pager.track(block, storage.data_ptr())
        if not tracked and use_count(storage._cdata) <= 2:  # the parameter's and `storage`
            # It was made before the page pool took over. Memory that others refer to stays where it is.
            twin = pages(nbytes)
            twin.copy_(flat_bytes(parameter))
            storage._swap_data_ptr_(twin.untyped_storage())  # type: ignore[attr-defined]
            tracked = self.pager.track(block, storage.data_ptr())
        self._adopted[parameter] = block if tracked else None

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        return movable(tensor, _CPU) and _nbytes(tensor) >= self._min_size


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()
