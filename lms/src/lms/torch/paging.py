"""Parameters, gradients and optimizer state below the device, at addresses that stay: they come back as they are used.

A device's pager brings back whatever is touched. This file tells it, from what the last step did, what will be used
next: a module's parameters before its forward, a parameter and its gradient as autograd has made the gradient, and both
with their state as an optimizer steps over them.
"""

from __future__ import annotations

import os
import weakref
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from lms.memory.pager import PagerUsage
from lms.torch.cpu.loaded import drop_pages, is_mapped, is_read
from lms.torch.movable import is_plain, movable
from lms.torch.optimizer_state import tensors
from lms.torch.pager import Block, Pager
from lms.torch.records import flat_bytes, use_count


class _Places(NamedTuple):
    """Blocks of tensors that live: a session goes on with those of former ones."""

    parameters: WeakIdKeyDictionary
    gradients: WeakIdKeyDictionary  # by parameter
    state: WeakIdKeyDictionary  # of an optimizer's tensors


def _no_places() -> _Places:
    return _Places(WeakIdKeyDictionary(), WeakIdKeyDictionary(), WeakIdKeyDictionary())


_places: defaultdict[type[Pager], _Places] = defaultdict(_no_places)
_MOST_USES = 1_000_000  # in a step; one that never ends is not remembered

Use = tuple[Block, ...]  # what one operation uses


class Paging:
    """Lets `kinds` of at least `min_size` bytes leave: "parameters", "gradients" of all modules, "optimizer" state."""

    def __init__(
        self,
        pager: Pager,
        never: Callable[[torch.Tensor], None],
        *,
        kinds: Iterable[str],
        min_size: int,
        on_growth: Callable[[], None],
    ) -> None:
        self.pager = pager
        self._on_growth = on_growth  # called when more may leave than before, ahead of the first pass that uses it
        self._places = _places[type(pager)]
        self._never = never  # marks a parameter as not to be moved as a saved tensor
        self._parameters, self._gradients, self._state = (
            kind in kinds for kind in ("parameters", "gradients", "optimizer")
        )
        # Only if passes are watched does the page pool's bound follow what is outside the pool.
        self._fills = "activations" in kinds
        self._min_size = max(min_size, pager.least)
        self.paused = False
        self._captured = False  # a CUDA graph was: it keeps the addresses of its tensors
        self._adopted = WeakIdKeyDictionary()  # parameters: their blocks, or None for one that stays
        self._watched = WeakIdKeyDictionary()  # parameters whose gradients are
        self._states = WeakIdKeyDictionary()  # parameters: the blocks of their optimizer's state
        self._called: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._hooks: list[RemovableHandle] = []
        self._course: list[Use] = []  # of the last step
        self._uses: dict[Use, list[int]] = {}  # their positions in it
        self._taken: list[Use] = []  # of this one
        self._at = 0  # the position in the course behind the last use
        self._left: defaultdict[tuple[int, bool], list[Block]] | None = defaultdict(list)  # blocks whose owner is gone
        self._before = pager.usage()
        self.nbytes = 0  # all that may leave, with freed gradients and state that is not used again

    def open(self, models: Iterable[torch.nn.Module]) -> None:
        """Begin, with the parameters of `models`. Others follow as their modules are called."""
        if self._parameters or self._gradients:
            before_forward = torch.compiler.disable(self._before_forward)

            def before_call(module: torch.nn.Module, _args: object) -> None:
                # Compiled code keeps its graph, and so its numbers: what it uses comes back as it is touched.
                if not torch.compiler.is_compiling():
                    before_forward(module)

            self._hooks.append(register_module_forward_pre_hook(before_call))
            for model in models:
                for parameter in model.parameters():
                    self._adopt(parameter)
        self.count()

    def leave(self) -> None:
        """Learn of no more uses."""
        for hook in self._hooks:
            hook.remove()

    def close(self) -> None:
        """Nothing leaves any more. What is away comes back as it is used."""
        self.leave()
        self.pager.stop()
        # Keep no blocks: the file is closed with the last of them.
        self._left = None
        for container in (self._course, self._taken, self._uses, self._adopted, self._states):
            container.clear()

    def before_part(self, parameters: Iterable[torch.Tensor], room: int) -> None:
        """An optimizer is about to step over these, with at least `room` bytes for all that may leave."""
        self.pager.keep(room, fill=self._fills and bool(self._course))  # nothing is known before the first step's end
        for parameter in parameters:
            self._adopt(parameter)  # if compiled code alone uses it, no module's call has told of it
            self._use(self._adopted.get(parameter), self._gradient(parameter), *self._states.get(parameter, ()))

    def after_part(self, entries: Iterable[tuple[Any, Mapping[str, Any]]]) -> None:
        """An optimizer has stepped over these parameters, and this is their state.

        Others than PyTorch's keep what they like under keys that are no parameters; that stays.
        """
        if self._state:
            for parameter, entry in entries:
                if not isinstance(parameter, torch.Tensor):
                    continue
                blocks = (self._settle(self._places.state, one) for one in tensors(entry))
                self._states[parameter] = tuple(block for block in blocks if block is not None)

    def count(self) -> None:
        """Set `nbytes` anew. In the first step the gradients are foreseen."""
        of_gradients = (self._gradient(parameter) for parameter in self._watched)
        blocks = (*self._adopted.values(), *of_gradients, *chain.from_iterable(self._states.values()))
        self.nbytes = sum(block.nbytes for block in blocks if block is not None)
        if not self._course:
            waiting = (one for one in self._watched if self._gradient(one) is None and self._may_leave(one))
            self.nbytes += sum(map(_nbytes, waiting))

    def usage(self) -> PagerUsage:
        """Figures since this session began, of all sessions."""
        now, before = self.pager.usage(), self._before
        return now._replace(out=now.out - before.out, back=now.back - before.back, waited=now.waited - before.waited)

    def after_step(self, room: int) -> None:
        """An optimizer has stepped: what comes next is taken to be like what came since its last step.

        From now on `room` bytes of all that may leave stay, and more while the page pool has room for them. Raises
        SpillError if the disk took no more.
        """
        self.pager.keep(room, fill=self._fills)
        for parameter in list(self._adopted):  # those whose storage was replaced
            self._track(parameter)
        if self._taken != self._course:
            self._course, self._uses = self._taken, defaultdict(list)
            for at, used in enumerate(self._course):
                self._uses[used].append(at)
            self.pager.expect(self._course)
        self._taken, self._at = [], 0
        self.pager.reach(0 if self._course else None, ())
        self.pager.check()

    # Uses

    def _before_forward(self, module: torch.nn.Module) -> None:
        if self._looks_away():
            return
        if module not in self._called:  # a whole model, before its first pass, which is measured
            self._called.add(module)
            before = len(self._adopted)
            for one in module.parameters():
                self._adopt(one)
            if len(self._adopted) > before:
                self.count()
                self._on_growth()
        for parameter in module._parameters.values():
            if parameter is not None:
                self._adopt(parameter)
                self._use(self._adopted.get(parameter))

    def _after_accumulation(self, parameter: torch.Tensor) -> None:
        if self._looks_away():
            return
        gradient = parameter.grad
        if gradient is not None and self._may_leave(gradient):
            block = self._block_of(self._places.gradients, parameter, _nbytes(gradient), transient=True)
            if not self._tracks(block, gradient) and not self.pager.is_origin and self._may_move(gradient, 2):
                self._move_to(block, gradient)
        self._use(self._adopted.get(parameter), self._gradient(parameter))

    def _looks_away(self) -> bool:
        captures = self.pager.capturing()
        self._captured |= captures
        return captures or self.paused

    def _gradient(self, parameter: torch.Tensor) -> Block | None:
        return self._places.gradients.get(parameter) if self._gradients else None

    def _use(self, *blocks: Block | None) -> None:
        used = tuple(block for block in blocks if block is not None)
        if not used:
            return
        if len(self._taken) < _MOST_USES:
            self._taken.append(used)
        found, at = self._uses.get(used), None
        if found is not None:  # the next such use, or after an evaluation the first
            next_one = bisect_left(found, self._at)
            at = found[next_one if next_one < len(found) else 0]
            self._at = at + 1
        self.pager.reach(at, used)

    # What may leave

    def _adopt(self, parameter: torch.Tensor) -> None:
        if is_lazy(parameter):
            return  # its module's next forward finds it
        if self._gradients and parameter.requires_grad and parameter.is_leaf and parameter not in self._watched:
            self._watched[parameter] = None
            hook = torch.compiler.disable(self._after_accumulation)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))
        if parameter not in self._adopted:
            self._adopted[parameter] = None
            self._track(parameter)

    def _track(self, parameter: torch.Tensor) -> None:
        if self._parameters:
            self._adopted[parameter] = self._settle(self._places.parameters, parameter)
            if self._adopted[parameter] is not None:
                self._never(parameter)

    def _block(self, owner: torch.Tensor, nbytes: int, *, transient: bool = False, fresh: bool = False) -> Block:
        """A block for `owner`: a `fresh` one, or one whose owner is gone."""
        assert self._left is not None
        block = None
        with suppress(IndexError):  # there is none, or another thread has taken the last
            block = self._left[nbytes, transient].pop() if not fresh else None
        block = block or self.pager.block(nbytes, transient=transient)
        weakref.finalize(owner, _leave, weakref.ref(self), block).atexit = False
        return block

    def _block_of(
        self, places: WeakIdKeyDictionary, owner: torch.Tensor, nbytes: int, *, transient: bool = False
    ) -> Block:
        block = places.get(owner)
        if block is None or block.nbytes != nbytes:
            block = places[owner] = self._block(owner, nbytes, transient=transient)
        return block

    def _settle(self, places: WeakIdKeyDictionary, tensor: torch.Tensor) -> Block | None:
        """Let the tensor's memory leave, as its block in `places`; None if it stays."""
        block = places.get(tensor)
        known = block is not None and is_plain(tensor) and block.nbytes == _nbytes(tensor)
        if known and self._tracks(block, tensor):
            return block
        if not self._may_leave(tensor):
            return None
        block = self._block_of(places, tensor, _nbytes(tensor))
        if self._tracks(block, tensor):
            return block
        # It was made elsewhere, such as before the page pool took over. It moves, unless others refer to the memory.
        if not self._may_move(tensor):
            return None
        if self.pager.is_origin:  # not a used block: its memory may live on elsewhere
            block = places[tensor] = self._block(tensor, block.nbytes, fresh=True)
        return block if self._move_to(block, tensor) else None

    def _may_move(self, tensor: torch.Tensor, references: int = 1) -> bool:
        return not self._captured and _is_alone(tensor, references)

    def _tracks(self, block: Block, tensor: torch.Tensor) -> bool:
        return self.pager.track(block, tensor.untyped_storage().data_ptr())

    def _move_to(self, block: Block, tensor: torch.Tensor) -> bool:
        """Move the tensor into memory of the pager's. Whether that leaves."""
        storage = tensor.untyped_storage()
        mapped = is_mapped(storage)
        twin = self.pager.memory(block)
        twin.copy_(flat_bytes(tensor))
        storage._swap_data_ptr_(twin.untyped_storage())  # type: ignore[attr-defined]
        if mapped:
            drop_pages(twin.untyped_storage())  # the file stays mapped as long as one of its tensors is
        return self._tracks(block, tensor)

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        return movable(tensor, self.pager.device) and _nbytes(tensor) >= self._min_size


def _leave(paging: weakref.ref[Paging], block: Block) -> None:
    """The owner of the block is gone."""
    found = paging()
    if found is not None and found._left is not None:
        found._left[block.nbytes, block.transient].append(block)


def _is_alone(tensor: torch.Tensor, references: int = 1) -> bool:
    """Whether no other tensor, array or process refers to the tensor's memory, as far as PyTorch can tell.

    `references`: how many to the tensor PyTorch itself holds.
    """
    storage = tensor.untyped_storage()
    if use_count(storage._cdata) > 2:  # another tensor, or `tensor.numpy()`
        return False
    if tensor.device.type == "cpu" and storage.is_shared():  # with another process; of a GPU's, PyTorch says it of all
        return False
    # DLPack refers to the tensor. Autograd does, too, if the tensor needs a gradient; DLPack refuses that.
    if not tensor.requires_grad and tensor._use_count() > references:  # type: ignore[attr-defined]
        return False
    return storage.resizable() or is_mapped(storage) or is_read(storage)  # else NumPy's, or another library's


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


os.register_at_fork(after_in_child=_places.clear)  # the parent goes on writing to them
