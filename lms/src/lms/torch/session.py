"""A session: LMS switched on for the models of one process, from `with lms.LMS(...)` or `lms.enable(...)`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Unpack

import torch
from torch.optim.optimizer import Optimizer

from lms.advice import advice, as_figure
from lms.core.link import Link
from lms.core.plan import Plan
from lms.core.timeline import Timeline
from lms.errors import UsageError
from lms.memory import resident
from lms.metrics import Outputs, Watch, watch
from lms.metrics.families import Figure
from lms.options import Given, Options
from lms.ranks import sharing
from lms.runtime import planner
from lms.runtime.progress import Progress
from lms.torch import (
    dtensor,
    hooks,
    led_passes,
    live_records,
    movable,
    mover,
    optimizer_state,
    paging,
    records,
    state,
    state_pager,
    storages,
    swapper,
)
from lms.torch.arguments import listed, training_device
from lms.torch.backend import device_for, make_engine
from lms.torch.cuda import pager as cuda_pager
from lms.torch.interrupts import Shield
from lms.torch.optimizers import Optimizers
from lms.torch.training import Training
from lms.trace import Trace
from lms.units import format_size
from lms.warn import warn_script

# Code that Ctrl-C must not leave half done, or that destructors run, which swallow it.
_UNINTERRUPTED = (
    cuda_pager,
    dtensor,
    hooks,
    led_passes,
    live_records,
    movable,
    mover,
    optimizer_state,
    paging,
    planner,
    records,
    resident,
    state,
    state_pager,
    storages,
    swapper,
)

_open: Session | None = None  # hooks are one per thread and the device is one per process, so sessions do not nest
_claiming = threading.Lock()  # held to look at `_open` and take its place


class Session:
    """Large model support for one training run.

    Args:
        model: the module or modules that train; None finds parameters by what they are (leaves that require grad).
        optimizer: the optimizer or optimizers; their steps are counted. None counts the first that steps.
            `add_optimizer` adds one that is made later.
        limit: most bytes that the device may hold, such as 12_000_000_000, "12GB" or "12GiB". On CUDA the allocator's
            allocated bytes, on a CPU the process's resident set.
        frac: the same as a share of the device's capacity, in (0, 1]; 0.9 when none of limit, frac and budget is given.
        budget: most bytes of saved tensors that may stay on the device, whatever else it holds; 0 is allowed.
        min_size: storages smaller than this stay.
        swap: what may move: any of "activations", "optimizer", "parameters" and "gradients". They
            are away between their uses, as far as the limit asks for it. Under a budget all that can leaves.
        spill_dir: folder of the file tier; on a CPU the first usual folder on a disk by default.
        host_limit: most pinned host memory on CUDA; past it the file tier, or an error.
        recompute: also choose modules whose forward runs again in the backward, so that less is saved and swapped.
        prefetch: accesses that a copy back may start ahead of its use; the plan's choice by default.
        write_ahead: copies out that may be in flight; the plan's choice by default.
        verify: compare a checksum of everything that is swapped when it comes back.
        tensorboard: folder that TensorBoard's event files are written to, once a second, from a thread of its own.
        metrics_port: TCP port that Prometheus finds the same figures on; the ranks of a host share it.
        metrics_address: IP address that the port is opened at, 127.0.0.1 by default.
        device: the device of the training; by default that of the model's parameters.
        on_plan: called with each new plan before it is first followed.

    Acts on the thread that opens it. Raises UsageError for a wrong argument and for a session inside another.
    """

    def __init__(
        self,
        model: torch.nn.Module | Iterable[torch.nn.Module] | None = None,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        *,
        device: str | torch.device | None = None,
        on_plan: Callable[[Plan], None] | None = None,
        **options: Unpack[Given],
    ) -> None:
        self.options = Options.parse(**options)
        self._models = listed(model, torch.nn.Module, "model")
        self._optimizers = Optimizers(listed(optimizer, Optimizer, "optimizer"))
        self.torch_device = training_device(device, self._models)
        self._on_plan = on_plan
        self._is_open = False
        self._opened = False
        self._outputs = Outputs(self.options.tensorboard, self.options.metrics_port, self.options.metrics_address)
        self._outputs.check()
        self._watch: Watch | None = None

    # Life

    def __enter__(self) -> Session:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> Session:
        """Switch LMS on, on this thread."""
        global _open
        self._shield = Shield(frozenset(module.__file__ or "" for module in _UNINTERRUPTED), _UNINTERRUPTED_CODES)
        self._shield.put_up()
        try:
            self._claim()
            self._acquire()
            self._is_open = True
            if self._outputs:
                self._watch = watch("lms", self._sampled, self._outputs)
        except BaseException:
            if _open is self:
                _open = None
            self._shield.take_down()
            raise
        return self

    def _claim(self) -> None:
        global _open
        with _claiming:
            if _open is not None:
                raise UsageError("a session is open already, and sessions do not nest: close it first (lms.disable())")
            if self._opened:
                raise UsageError("this session was closed: make a new one")
            self._opened = True
            _open = self

    def _acquire(self) -> None:
        self.device = device_for(self.torch_device)
        options = self.options
        self.limit = options.limit_of(self.device.capacity())
        self.engine = make_engine(
            self.torch_device, spill_dir=options.spill_dir, host_limit=options.host_limit, verify=options.verify
        )
        try:
            if (warning := self.device.prepare(self.limit)) is not None:
                warn_script(warning)
            self._training = Training(
                options,
                self.device,
                self.engine,
                self._models,
                self._optimizers,
                limit=self.limit,
                on_plan=self._on_plan,
            )
        except BaseException:  # a warning that the user made an error, to begin with
            self.device.release()
            self.engine.close()
            raise
        self._planner, self._swapper, self._state = (
            self._training.planner,
            self._training.swapper,
            self._training.state,
        )

    def close(self) -> None:
        """Switch LMS off. Tensors that are still saved stay usable; their memory goes back with the last of them.

        So does an optimizer's state that is away: it comes back as it is read.
        """
        global _open
        if not self._is_open:
            return
        if threading.get_ident() != self._training.thread:
            raise UsageError("close the session on the thread that opened it: saved-tensor hooks are thread-local")
        self._is_open = False
        if _open is self:
            _open = None
        try:
            self._training.close()
        finally:
            if self._watch is not None:
                self._watch.close()
            self.device.release()
            self._shield.take_down()

    # While it is open

    def add_optimizer(self, optimizer: Optimizer | Iterable[Optimizer]) -> None:
        """Count the steps of `optimizer`, one or several, as if it had been given to the session.

        For trainers that open the session before there is an optimizer. Steps of optimizers that were not given count
        no longer. Raises UsageError for what is no optimizer, and if the session is closed.
        """
        added = listed(optimizer, Optimizer, "optimizer")
        if self._opened and not self._is_open:
            raise UsageError("add_optimizer: this session was closed")
        self._optimizers.add(added)

    def pause(self) -> Pause:
        """A context in which LMS takes on nothing: what is saved inside stays, and steps inside do not count.

        For an evaluation, a log, a second model. Tensors saved before are used as always and keep their plan. Memory
        that a pause between two steps needs counts in the peak, and ends no training; inside a step it is the step's.
        Pauses may nest. Raises UsageError if the session is not open, or is another thread's.
        """
        if not self._is_open:
            raise UsageError("pause: the session is not open")
        if threading.get_ident() != self._training.thread:
            raise UsageError("pause the session on the thread that opened it: saved-tensor hooks are thread-local")
        return Pause(self._training)

    # Results

    def stats(self) -> dict[str, float | int | None]:
        """The session in figures: seconds and bytes. `docs/python.md` says what each is."""
        self._training.learn()
        if self._is_open:
            self._planner.peaks.after_the_last_pass()
        return asdict(self._training.figures())

    def _sampled(self) -> dict[str, Figure]:
        """The figures and the advice, for the sampler's thread: it may not plan, so the last pass may be missing.

        That thread asks a GPU nothing: any question would spoil the capture of a CUDA graph on another thread. It gets
        what the training's own thread found out at its last step.
        """
        training = self._training
        found = training.figures(wait=self.torch_device.type == "cpu" or threading.get_ident() == training.thread)
        return {**asdict(found), "advice": as_figure(advice(found))}

    @property
    def trace(self) -> Trace | None:
        """The recorded pass that the current plan was made for, and the cycle that it is part of.

        None before the first complete pass.
        """
        self._training.learn()
        trace = self._planner.trace
        if trace is None:
            return None
        # With less room, state that moves would leave before the optimizer's step: no limit needs what it had.
        between = 0 if self._state.moves else self._planner.peaks.between
        return Trace.of(replace(self._planner.progress.cycled(trace), between=between))

    @property
    def plan(self) -> Plan | None:
        """The decisions and their reasons; None before the first complete pass."""
        self._training.learn()
        return self._planner.plan

    @property
    def timeline(self) -> Timeline | None:
        """The last complete pass that was timed, as it ran; None before there is one."""
        self._training.learn()
        last = self._planner.last_timed
        return last.recorder.timeline() if last is not None else None

    @property
    def timed(self) -> tuple[Trace, Timeline, Plan | None] | None:
        """The last complete pass that was timed: what it did, how it ran, and the plan that it followed, if it had one.

        None before there is one.
        """
        self._training.learn()
        found = self._planner.timed
        return (Trace.of(found[0]), *found[1:]) if found is not None else None

    @property
    def progress(self) -> Progress:
        """How far the training is."""
        self._training.learn()
        return self._planner.progress

    @property
    def peak_where(self) -> str:
        """When the device's peak, or nearly that, was held first, and in which module if that was measured."""
        return self._planner.peaks.where

    @property
    def over_limit(self) -> int:
        """Bytes by which the device's peak went over the limit, from the second step on; 0 if the limit held."""
        return self._planner.peaks.over

    def link(self) -> Link:
        """The link to the tier below, measured on past copies, or by copying something now."""
        return self._planner.maker.link()

    def describe(self) -> str:
        """One line: what is swapped, to which tier, under which bound."""
        options = self.options
        if options.budget is not None:
            bound = f"{format_size(options.budget)} of saved bytes stay"
        else:
            assert self.limit is not None
            bound = f"limit {format_size(self.limit)} of {format_size(self.device.capacity())}"
            ranks = sharing(os.environ)
            if ranks > 1 and self.torch_device.type == "cpu":
                bound += f", which each of {ranks} ranks has of this host"
        return f"swapping {', '.join(options.swap)} from {self.device.name} to {self.engine.name}: {bound}"


class Pause:
    """What `Session.pause` returns. A class, because an interrupt inside of contextlib would leave LMS paused."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._between = False  # it lies between two passes

    def __enter__(self) -> None:
        self._between = self._training.begin_pause()

    def __exit__(self, *_: object) -> None:
        self._training.end_pause(self._between)


_OPENING = (Session.__enter__, Session.open, Pause.__enter__)
_CLOSING = (Session.__exit__, Session.close, Pause.__exit__)
_UNINTERRUPTED_CODES = frozenset(method.__code__ for method in (*_OPENING, *_CLOSING))

LMS = Session


def enable(
    model: torch.nn.Module | Iterable[torch.nn.Module] | None = None,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    **options: object,
) -> Session:
    """Switch LMS on for the rest of the process, or until `disable`; arguments as for `LMS`. Acts on this thread."""
    return Session(model, optimizer, **options).open()  # type: ignore[arg-type]


def disable() -> None:
    """Switch LMS off, if it is on."""
    if _open is not None:
        _open.close()


def _after_fork() -> None:
    # The copying threads stayed in the parent: a DataLoader's worker must neither swap nor wait for them.
    global _open, _claiming
    if _open is not None and _open._is_open:  # else another thread of the parent was about to open it
        _open._training.abandon()
    _open = None
    _claiming = threading.Lock()  # the thread that may have held it stayed in the parent


os.register_at_fork(after_in_child=_after_fork)
