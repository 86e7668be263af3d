"""A process group that remembers its last calls, for ranks that make them later, with nothing of their own in them."""

from __future__ import annotations

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


Listener = Callable[[int, Call], None]


class LoggedGroup(ProcessGroup):
    """`listener` is given each call and its number in the group, from 0, in their order."""

    def __init__(
        self, comm: Communicator, name: str, listener: Listener, leave: Callable[[], None] | None = None
    ) -> None:
        super().__init__(None, comm, name, leave)
        self.calls = 0  #: how many were made
        self._last: deque[Call] = deque(maxlen=_REMEMBERED)
        self._listener = listener

    def log(self, call: Call) -> None:
        """Add one that this class does not make itself."""
        number, self.calls = self.calls, self.calls + 1
        self._last.append(call)
        self._listener(number, call)

    def since(self, number: int) -> list[tuple[int, Call]]:
        """The calls from this one on, with their numbers; without those that are forgotten."""
        first = self.calls - len(self._last)
        return [(at, self._last[at - first]) for at in range(max(first, number), self.calls)]

    def _begin(
        self, name: str, opts: Options | None, requests: Sequence[Request[None]], results: list[Tensor], *rest: object
    ) -> Work:
        work = super()._begin(name, opts, requests, results, *rest)  # type: ignore[arg-type]
        its = getattr(opts, "reduceOp", None)
        op = None if its is None else from_torch(its)
        kinds = tuple((tensor.dtype, tensor.numel()) for tensor in results)
        self.log(Call(name, op, kinds, any(tensor.is_cuda for tensor in results)))
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
