"""`lms run` and `lms plan` for a script that trains by Keras' `model.fit`: each fit has the callback added."""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lms.console import say, warn
from lms.core.plan import make_plan
from lms.errors import LMSError
from lms.files import write_output
from lms.link import Link
from lms.memory.file import FileSlab, address_of, page_memory
from lms.memory.spill import spill_folder
from lms.options import Options
from lms.target import OVER_LIMIT, Enough, Target, execute
from lms.trace import Trace
from lms.units import format_size

if TYPE_CHECKING:
    from lms.tensorflow.keras import LMS

_TRAINER = "keras.src.backend.tensorflow.trainer"  # where Keras 3 has its fit for TensorFlow
STEPS = 3  # what `lms plan` watches: the first traces, and the others are timed
_PIECE = 32 << 20  # bytes that are copied to measure a link


def run(target: Target, options: Options, *, trace: Path | None = None, report: Path | None = None) -> int:
    """Run the target with LMS in each fit; write the last step to `trace` and a page about it to `report`.

    Returns the exit status. Raises LMSError, KeyboardInterrupt and SystemExit as the target does.
    """
    fits = _Fits(options)
    for option, value in (("--tensorboard", options.tensorboard), ("--metrics-port", options.metrics_port)):
        if value is not None:
            warn(f"{option}={value}: without effect, because sessions of TensorFlow are not watched")
    status, returned = 1, False
    try:
        with fits:
            status = execute(target)
        returned = True
    finally:
        failed = fits.finish(target, trace, report, returned=returned)
    return status or int(failed) or (OVER_LIMIT if fits.over_limit() else 0)


def record(target: Target, options: Options) -> tuple[int, Trace | None, Link | None]:
    """Run the target until a few steps of a fit are over: the exit status so far, the step and the link.

    Step and link are None if the target failed. Raises as `run`, and LMSError if it ended without a step.
    """
    fits = _Fits(options, steps=STEPS)
    try:
        with fits:
            status = execute(target)
    except Enough:
        status = 0
    if status != 0:
        return status, None, None
    step = fits.step(target)
    if step is None:
        raise LMSError(f"{target.name} ended too early: {_WHY_NO_STEP}")
    return 0, step, Link.from_dict(step.link)


_WHY_NO_STEP = "no step of a Keras fit on TensorFlow was traced (the script may call its own tf.function: see offload)"


class _Fits:
    """While it is entered, each fit of the script's has the callback."""

    def __init__(self, options: Options, steps: int | None = None) -> None:
        self.options, self.steps = options, steps
        self.callbacks: list[LMS] = []
        self._finder = _Finder(self._change)

    def __enter__(self) -> _Fits:
        bound = self.options.budget if self.options.budget is not None else self.options.limit
        text = format_size(bound) if bound is not None else f"{self.options.frac:g} of the memory"
        say(f"swapping in each fit of Keras': {text} ({self.options.why})")
        if _TRAINER in sys.modules:
            self._change(sys.modules[_TRAINER])
        sys.meta_path.insert(0, self._finder)
        return self

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self._finder)

    def _change(self, module: ModuleType) -> None:
        fit = module.TensorFlowTrainer.fit
        signature = inspect.signature(fit)

        @functools.wraps(fit)
        def changed(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.arguments["callbacks"] = self._added(given.arguments.get("callbacks"))
            return fit(*given.args, **given.kwargs)

        module.TensorFlowTrainer.fit = changed

    def _added(self, callbacks: Any) -> Any:
        import keras

        from lms.tensorflow.keras import LMS

        if not self.callbacks:
            self.callbacks.append(LMS(**self.options.keywords()))
        ours: list[Any] = [self.callbacks[0]]
        if self.steps is not None:
            ours.append(_watch(keras, self.callbacks[0], self.steps))
        if isinstance(callbacks, keras.callbacks.CallbackList):
            for one in ours:
                callbacks.append(one)
            return callbacks
        theirs = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks else []
        if any(isinstance(one, LMS) for one in theirs):
            warn("the script's own LMS callback is used, and not what the command line says")
            return theirs
        return [*ours, *theirs]

    def step(self, target: Target) -> Trace | None:
        """The last step that was traced, with the script's name, the link, and times as they were measured."""
        traces = [traced.trace for one in self.callbacks for traced in one.offload.traces]
        if not traces:
            return None
        step, seconds = traces[-1], self.callbacks[-1].step_time
        if seconds and step.seconds:
            scale = seconds / step.seconds
            accesses = tuple(replace(one, seconds=one.seconds * scale) for one in step.accesses)
            step = replace(step, accesses=accesses, tail=step.tail * scale)
        link = measure_link(spill_folder(self.options.spill_dir))
        machine = {"script": target.title, **step.machine}
        return Trace.of(replace(step, device="cpu (TensorFlow)", link=link.to_dict(), machine=machine))

    def over_limit(self) -> bool:
        """Whether a step went over the limit after the first, which is planned with what it needed."""
        return any(one.offload.over_limit for one in self.callbacks)

    def finish(self, target: Target, trace: Path | None, report: Path | None, *, returned: bool) -> bool:
        """Sum up and write the files; returns whether that failed."""
        wanted = [(option, path) for option, path in (("--trace", trace), ("--report", report)) if path is not None]
        if not any(one.offload.traces for one in self.callbacks):
            if returned:
                warn(f"LMS had no effect: {_WHY_NO_STEP}")
            for option, path in wanted:
                warn(f"{option}={str(path)!r}: nothing written, because no step was traced")
            return False
        figures = self.callbacks[-1].stats()
        say(
            f"{figures['swapped']} of {figures['tensors']} tensors swapped, {format_size(figures['swapped_out'])} out "
            f"and {format_size(figures['swapped_in'])} back in all; peak {format_size(figures['peak'])}"
        )
        try:
            step = self.step(target) if wanted else None
            for option, path in wanted:
                assert step is not None
                text = step.to_json() if option == "--trace" else self._page(step, target)
                say(f"wrote {write_output(option, path, text.encode())}")
        except (LMSError, OSError, ImportError) as error:
            say(f"error: {error}")
            return True
        return False

    def _page(self, step: Trace, target: Target) -> str:
        from lms.report import render

        link, offload = Link.from_dict(step.link), self.callbacks[-1].offload
        limit, budget = offload.bounds.of(step)
        plan = make_plan(step, link, limit=limit, budget=budget)
        return render(step, link=link, plan=plan, title=target.title)


def _watch(keras: ModuleType, managed: LMS, steps: int) -> Any:
    class Watch(keras.callbacks.Callback):  # type: ignore[misc,name-defined]
        """Ends the script after so many steps."""

        done = 0

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            """Count."""
            self.done += 1
            if self.done >= steps:
                raise Enough

    return Watch()


class _Finder(MetaPathFinder):
    """Has `change` called with Keras' trainer once it is imported: a script may set variables that Keras reads."""

    def __init__(self, change: Callable[[ModuleType], None]) -> None:
        self.change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec as it would be found without us, with a loader that calls `change`."""
        if fullname != _TRAINER:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.change)
        return spec


class _Loader(Loader):
    def __init__(self, inner: Loader, change: Callable[[ModuleType], None]) -> None:
        self.inner, self.change = inner, change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        self.change(module)


def measure_link(folder: Path) -> Link:
    """The speed of copies to a file in `folder` and back. Raises SpillError if no file can be made there."""
    slab = FileSlab(folder)
    try:
        memory = page_memory(_PIECE)
        memory[:] = bytes(_PIECE)
        place = slab.allocate(_PIECE, 0)
        seconds = []
        for copy in (slab.write, slab.read):
            copy(place, address_of(memory))  # the first one finds its blocks
            began = time.perf_counter()
            copy(place, address_of(memory))
            seconds.append(time.perf_counter() - began)
    finally:
        slab.close()
    return Link("file", _PIECE / seconds[0], _PIECE / seconds[1], source=f"measured: a file in {folder}")
