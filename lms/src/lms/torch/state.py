"""The state of a training that a session may move: optimizers' state, parameters and gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from lms.core.budget import Client
from lms.errors import UsageError
from lms.options import Options
from lms.runtime.paged_room import PagedRoom
from lms.runtime.planner import PassPlanner
from lms.runtime.state_room import StateRoom
from lms.torch.backend import make_pager
from lms.torch.cpu.engine import CpuEngine
from lms.torch.engine import Engine
from lms.torch.optimizer_state import Tier
from lms.torch.pager import Pager
from lms.torch.paging import Paging
from lms.torch.state_pager import Arguments, Keywords, StatePager, StepArguments

# The state that steps at once: a part of the limit, or bytes. More and smaller parts take more of Python's time.
_PARTS, _MOST = 64, 256 << 20


class Figures(NamedTuple):
    """Bytes of state that may move and that are on the device; bytes moved, and seconds waited, so far."""

    nbytes: int
    held: int
    out: int
    back: int
    waited: float


class State:
    """Moves the kinds of state that `options.swap` names."""

    def __init__(
        self,
        options: Options,
        planner: PassPlanner,
        engine: Engine,
        client: Client,
        *,
        lock: threading.Lock,
        models: Iterable[torch.nn.Module],
        never: Callable[[torch.Tensor], None],
    ) -> None:
        kinds = set(options.swap)
        self.moves = kinds != {"activations"}
        self._peaks = planner.peaks
        self._paging: Paging | None = None
        pager = _pager(options, engine) if self.moves else None
        if pager is not None:
            self._paging = self._page(options, planner, pager, models, never)
        self._optimizers = "optimizer" in kinds and self._paging is None  # which the StatePager moves then
        self.pager = StatePager(
            Tier(engine, lock),
            engine.device,
            min_size=options.min_size,
            part=min((planner.limit or 0) // _PARTS, _MOST) if self._optimizers else 0,
            slack=(planner.limit or 0) // 32,
            before_part=self._before_part,
            after_part=self._after_part,
        )
        self._room = StateRoom(planner, client, part=self.pager.part, passes="activations" in kinds)

    def _page(
        self,
        options: Options,
        planner: PassPlanner,
        pager: Pager,
        models: Iterable[torch.nn.Module],
        never: Callable[[torch.Tensor], None],
    ) -> Paging:
        self._paged = PagedRoom(planner, planner.device, least=0 if planner.limit is None else pager.least_room)
        pager.keep(self._paged.now)

        def on_growth() -> None:
            self._paged.begin(max(paging.nbytes, pager.usage().tracked))  # a former session's may be resident

        paging = Paging(pager, never, kinds=options.swap, min_size=options.min_size, on_growth=on_growth)
        try:
            paging.open(models)
            planner.device.measure_anew()
            on_growth()
        except BaseException:
            paging.close()
            self._paged.close()
            raise
        return paging

    def _before_part(self, parameters: Iterable[torch.Tensor]) -> None:
        if self._paging is not None:
            self._paging.before_part(parameters, self._paged.in_step(2 * self.pager.part))

    def _after_part(self, entries: Iterable[tuple[torch.Tensor, dict[str, Any]]]) -> None:
        if self._paging is not None:
            self._paging.after_part(entries)

    def before_step(self, optimizer: Optimizer, args: Arguments, kwargs: Keywords) -> StepArguments | None:
        """As the pager's. All passes are known."""
        return self.pager.before_step(optimizer, args, kwargs, room=self._room.now() if self._optimizers else None)

    def after_step(self, optimizer: Optimizer, *, counts: bool) -> None:
        """An optimizer has stepped, which ends a step of the training if it `counts`.

        Raises SpillError if the tier took no more; nothing is lost then.
        """
        self.pager.after_step(optimizer)
        if self._optimizers:
            self._room.after_step(*self.pager.figures)
        if self._paging is not None and counts:
            self._paging.count()
            self._paged.after_step(self._paging.nbytes)
            self._paging.after_step(self._paged.now)
            if not self._room.has_passes:
                self._peaks.after_a_step()

    def pause(self, paused: bool) -> None:
        """Ignore what uses parameters and gradients while `paused`."""
        if self._paging is not None:
            self._paging.paused = paused

    @property
    def strays(self) -> bool:
        """Whether something has brought an optimizer's state back since its last step."""
        return self.pager.tier.strays

    def tidy(self) -> None:
        """Between two passes: let that leave again."""
        self.pager.tidy()
        self._room.note(*self.pager.figures)

    def figures(self) -> Figures:
        """The state in figures."""
        (nbytes, held), tier = self.pager.figures if self._optimizers else (0, 0), self.pager.tier
        total = Figures(nbytes, held, tier.out, tier.back, tier.waited)
        if self._paging is None:
            return total
        paged = self._paging.usage()
        return Figures(
            total.nbytes + self._paging.nbytes,
            total.held + min(paged.resident, self._paging.nbytes),  # less what other sessions' models hold
            total.out + paged.out,
            total.back + paged.back,
            total.waited + paged.waited * 1e-9,
        )

    def close(self) -> None:
        """Nothing that is paged leaves any more."""
        if self._paging is not None:
            self._paging.close()
            self._paged.close()

    def abandon(self) -> None:
        """In a forked child: learn of nothing more."""
        if self._paging is not None:
            self._paging.leave()


def _pager(options: Options, engine: Engine) -> Pager | None:
    """The pager of what `options.swap` names; None if a StatePager copies an optimizer's state instead.

    Raises UsageError if parameters or gradients are named and cannot leave.
    """
    needed = {"parameters", "gradients"} & set(options.swap)
    if not needed and not isinstance(engine, CpuEngine):
        return None  # copies also go on to a file
    try:
        if options.verify:
            raise UsageError(
                f"verify=True, swap={','.join(options.swap)!r}: no checksum is kept of parameters and gradients; leave "
                "one of the two out"
            )
        return make_pager(engine)
    except UsageError:
        if needed:
            raise
        return None
