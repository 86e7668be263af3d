"""A process group that remembers its last calls, for ranks that make them later, with nothing of their own in them."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ddl.communicator import Communicator
from ddl.horovod.torch.ops import Op, from_torch
from ddl.request import Request
from ddl.torch.process_group import Options, ProcessGroup
from ddl.torch.work import Work

_REMEMBERED = 10_000  # calls; as many could be in flight when a rank asks for them


class Call(NamedTuple):
    """What another rank needs to know to make the same call."""

    name: str
    op: Op | None = None  # of a reduction
    kinds: Sequence[tuple[torch.dtype, int]] = ()  # of its tensors: type, and number of elements
    on_gpu: bool = False

    def neutral(self, device: torch.device) -> list[Tensor]:
        """Tensors for a reduction that leave the others' results as they are: zeros for a sum."""
        assert self.op is not None
        return [
            torch.full((count,), _neutral(self.op, dtype), dtype=dtype, device=device) for dtype, count in self.kinds
        ]


_call = functools.lru_cache(1024)(Call)  # a training's calls come again: each is kept once

Listener = Callable[[int, Call], None]


class CallLog:
    """The last calls of a group, numbered from 0."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._count = 0
        self._last: deque[tuple[int, Call]] = deque(maxlen=remembered)

    def add(self, call: Call) -> int:
        """Returns the call's number."""
        number, self._count = self._count, self._count + 1
        self._last.append((number, call))
        return number

    def since(self, number: int) -> list[tuple[int, Call]]:
        """The calls from this one on, with their numbers; without those that are forgotten. Any thread may ask."""
        return [(at, call) for at, call in list(self._last) if at >= number]  # the copy is made in one go


class LoggedGroup(ProcessGroup):
    """`listener` is given each call and its number, in their order."""

    def __init__(
        self, comm: Communicator, name: str, listener: Listener, leave: Callable[[], None] | None = None
    ) -> None:
        super().__init__(None, comm, name, leave)
        self.calls = CallLog()  #: of this rank
        self._listener = listener

    def log(self, call: Call) -> None:
        """Add one that this class does not make itself."""
        self._listener(self.calls.add(call), call)

    def _begin(
        self, name: str, opts: Options | None, requests: Sequence[Request[None]], results: list[Tensor], *rest: object
    ) -> Work:
        # Every call comes here when it is begun, and before anybody waits for it: none of Horovod's names asks for the
        # form (asyncOp=False) that waits first.
        work = super()._begin(name, opts, requests, results, *rest)  # type: ignore[arg-type]
        its = getattr(opts, "reduceOp", None)
        op = None if its is None else from_torch(its)
        kinds = tuple((tensor.dtype, tensor.numel()) for tensor in results)
        self.log(_call(name, op, kinds, any(tensor.is_cuda for tensor in results)))
        return work


def _neutral(op: Op, dtype: torch.dtype) -> float:
    if op is Op.Product:
        return 1
    if op not in (Op.Min, Op.Max):
        return 0
    if dtype.is_floating_point:
        return float("inf") if op is Op.Min else float("-inf")
    if dtype is torch.bool:
        return op is Op.Min
    return torch.iinfo(dtype).max if op is Op.Min else torch.iinfo(dtype).min
