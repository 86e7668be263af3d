"""LMS at work on one training: what autograd saves comes here, and so do the optimizers' steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch.optim.optimizer import Optimizer

from lms.core.budget import Budget, Client
from lms.core.plan import Plan
from lms.errors import LMSError
from lms.memory.device import Device
from lms.options import Options
from lms.runtime.planner import PassPlanner
from lms.stats import Stats
from lms.torch.engine import Engine
from lms.torch.figures import figures
from lms.torch.hooks import SavedTensorHooks
from lms.torch.modules import ModuleNames
from lms.torch.optimizers import Optimizers
from lms.torch.recompute.recomputation import Recomputation
from lms.torch.records import View
from lms.torch.state import State
from lms.torch.state_pager import Arguments, Keywords, StepArguments
from lms.torch.swapper import SavedTensorSwapper
from lms.warn import warn_script

_TRIM_EVERY = 8  # steps: the first ones, for which there is no plan yet, need more host memory than others


class Training:
    """Swaps, from when it is made until `close`, on the thread that makes it.

    It joins the parts: the saved tensors (`swapper`), the state (`state`), the `planner` of both, and the optimizers.
    """

    def __init__(
        self,
        options: Options,
        device: Device,
        engine: Engine,
        models: Iterable[torch.nn.Module],
        optimizers: Optimizers,
        *,
        limit: int | None,
        on_plan: Callable[[Plan], None] | None,
    ) -> None:
        self.thread = threading.get_ident()
        self.engine = engine
        self._on_plan = on_plan
        self._on_gpu = engine.device.type == "cuda"
        self._is_on = True
        self._records = "activations" in options.swap  # saved tensors may move, so passes are recorded
        saved, state = Client(priority=1, most=options.budget), Client(priority=0)
        self.planner = PassPlanner(
            device,
            engine,
            Budget(limit, saved, state),
            saved,
            state,
            prefetch=options.prefetch,
            write_ahead=options.write_ahead,
            write_early=options.host_limit is None,  # what is written early takes its room for longer
            facts={"torch": torch.__version__, "threads": str(torch.get_num_threads())},
        )
        names = ModuleNames(models)
        self.swapper = SavedTensorSwapper(
            engine.device, engine, self.planner, min_size=options.min_size, module=names.running
        )
        never = self.swapper.movable.never
        for model in models:
            for tensor in (*model.parameters(), *model.buffers()):
                never(tensor)
        device.reset_peak()
        self._warned = False
        self._last_stalled = (0.0, 0.0)
        self._pauses = 0  # that are open, one inside another
        self.state = State(options, self.planner, engine, state, lock=self.swapper.lock, models=models, never=never)
        self._hooks = SavedTensorHooks(self.swapper.native, self._pack, self._unpack)
        if self._records:
            self._hooks.set()
        self._recomputation = Recomputation(names, self.swapper, self._hooks, wanted=options.recompute)
        self._optimizers = optimizers
        optimizers.listen(self._after_step, self._before_step if self.state.moves else None)

    def close(self) -> None:
        """Switch off. The engine closes with the last tensor that is still saved or away."""
        self._is_on = False
        self._recomputation.close()
        if self._records:
            self._hooks.remove()
        self._optimizers.leave()
        self.planner.peaks.close()
        self.state.close()
        self.swapper.stop(partial(self.state.pager.tier.close, self.engine.close))

    def abandon(self) -> None:
        """In a forked child: the threads that copy stayed in the parent."""
        self._is_on = False
        self.swapper.abandon()
        self.state.abandon()

    # Figures

    def learn(self) -> None:
        """Take the last pass into account, if it is over."""
        self.swapper.learn()
        self._tell()

    def figures(self, *, wait: bool = True) -> Stats:
        """The training in figures. Without `wait` no GPU is asked: its stalls are those of the last answer."""
        stalled = self._stalled() if wait else self._last_stalled
        return figures(self.planner, self.swapper, self.state.figures(), self.engine.usage(), stalled, wait=wait)

    def _stalled(self) -> tuple[float, float]:
        """Seconds that the computation has waited for copies out, and for copies back."""
        # On a GPU a stream waits and no thread does, so the engine's events say how long.
        counters = self.swapper.counters
        self._last_stalled = self.engine.stalled() if self._on_gpu else (counters.stall_out, counters.stall_in)
        return self._last_stalled

    def _own_seconds(self) -> float:
        """Seconds that LMS has added to the training so far."""
        # On a GPU the host's work runs beside the device's.
        hooks = self.swapper.counters.hook if not self._on_gpu else 0.0
        return hooks + sum(self._stalled())

    def _tell(self) -> None:
        # Outside the swapper's lock: the function that is told may well close the session.
        while self.planner.news:
            plan = self.planner.news.pop(0)
            if self._on_plan is not None:
                self._on_plan(plan)

    # Saved tensors

    def _pack(self, tensor: torch.Tensor) -> object:
        if self._pauses:
            return View(tensor)
        if self.state.strays and self.swapper.between_passes:
            self.state.tidy()
        packed = self.swapper.pack(tensor)
        if self.planner.news:
            self._tell()
        return packed

    def _unpack(self, packed: object) -> torch.Tensor:
        # A GPU's backward runs on threads of autograd's own; only a thread that Python started was the script's choice.
        if threading.get_ident() != self.thread and not isinstance(threading.current_thread(), threading._DummyThread):
            self._warn_of_thread(f"a backward runs on thread {threading.current_thread().name!r}")
        return self.swapper.unpack(packed)  # type: ignore[arg-type]

    def _warn_of_thread(self, what: str) -> None:
        """Say once that saved-tensor hooks belong to a thread."""
        if not self._warned:
            self._warned = True
            warn_script(
                f"{what}: LMS acts on the thread that enabled it, because saved-tensor hooks are thread-local, and "
                "what is saved elsewhere stays. Enable LMS on the thread that runs the forward"
            )

    # Steps

    def _before_step(self, optimizer: Optimizer, args: Arguments, kwargs: Keywords) -> StepArguments | None:
        if not self._is_on:
            return None
        if self.engine.capturing():
            raise LMSError(
                "an optimizer steps while a CUDA graph is captured, and LMS may move its state before the graph runs "
                "again; close the session, step once, and capture then"
            )
        if self._pauses:
            return None
        self.swapper.learn()
        return self.state.before_step(optimizer, args, kwargs)

    def _after_step(self, optimizer: Optimizer) -> None:
        if self._pauses or not self._is_on:
            return
        counts = self._optimizers.counts(optimizer)
        if self.state.moves:
            self.state.after_step(optimizer, counts=counts)
        self.swapper.step(id(optimizer))
        self.swapper.judge()  # while the script still has what it had during the backward
        if not counts:
            return
        own_thread, progress = threading.get_ident() == self.thread, self.planner.progress
        if not own_thread:
            self._warn_of_thread(f"an optimizer steps on thread {threading.current_thread().name!r}")
        elif progress.steps == 1 and self._records and self.swapper.saw_nothing:
            # The first step may be one without a training, to make the optimizer's state.
            self._warn_of_thread("an optimizer steps again, and nothing was saved for a backward on this thread")
        clocked = own_thread and not self.engine.capturing()
        progress.step(self._own_seconds() if clocked else 0.0, self.swapper.recorded, clocked=clocked)
        if clocked:
            self._recomputation.after_step()
            if progress.steps % _TRIM_EVERY == 0:
                self.engine.trim()

    # Pauses

    def begin_pause(self) -> bool:
        """Take on nothing until `end_pause`, which gets the answer: whether the pause lies between two passes."""
        between = not self._pauses and self.swapper.between_passes
        if between:
            self.swapper.learn()
            self.planner.peaks.pause()
        self._pauses += 1
        self.state.pause(True)
        self.swapper.native.open = False
        return between

    def end_pause(self, between: bool) -> None:
        """Go on, unless another pause is open."""
        self._pauses -= 1
        self.state.pause(self._pauses > 0)
        self.swapper.native.open = self._is_on and not self._pauses and self.swapper.active
        if between and self._is_on:
            self.planner.peaks.resume()
