"""`lms run` and `lms plan`: a user's script, unchanged, in a process that is set up for it."""

from __future__ import annotations

import gc
import json
import os
import shlex
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lms.advice import advice
from lms.console import say, warn
from lms.core.link import Link
from lms.errors import LMSError
from lms.files import write_output
from lms.link.watch import Watch
from lms.memory.spill import spill_folder
from lms.options import Options
from lms.stats import Stats, format_seconds
from lms.target import OVER_LIMIT, Enough, Target, execute
from lms.trace import Trace
from lms.units import format_size

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer

    from lms.core.plan import Choice, Plan
    from lms.core.timeline import Timeline
    from lms.torch.session import Session


_MOST_NAMES = 4  # recomputed modules that are told
_NEWS = 1.1  # a plan is announced if it moves at least this many times the bytes of the last one announced

# How much `lms plan` watches. The first pass warms caches and allocators up, and a cycle lies between two steps.
STEPS = 2
PASSES = 2  # complete ones with a backward, whether a step comes or not
CHOOSING = 4  # steps more, to choose modules that are recomputed and to see a pass in which they are
MOST_PASSES = 64  # while an optimizer is there and does not step


def missing_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What PyTorch reads when it begins to use a GPU, unless the user set it.

    Blocks of any size can then be reused for any other, so that fragmentation does not eat what swapping frees.
    """
    newer = "PYTORCH_ALLOC_CONF"  # not every release with it reads it for CUDA, so it is not ours
    ours = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return {} if newer in environ or ours.keys() <= environ.keys() else ours


def run(
    target: Target,
    options: Options,
    *,
    trace: Path | None = None,
    report: Path | None = None,
    perfetto: Path | None = None,
    stats: Path | None = None,
) -> int:
    """Run the target with LMS switched on.

    Write the recorded step to `trace`, a page about it to `report`, and the last pass as it ran to `perfetto`, if a
    pass was recorded; the session's figures to `stats`. They are written when the target fails, too. Returns the exit
    status: 0, or 1 after an exception, which is shown as python shows it. Raises LMSError, KeyboardInterrupt and
    SystemExit as the target does.
    """
    session = _start(options)
    watch = watch_link(session) if report is not None else None
    status, returned = 1, False
    try:
        status = execute(target)
        returned = True
    finally:
        problems = _finish(session, target, _Files(trace, report, perfetto, stats), watch, returned=returned)
    if problems:
        status = status or 1
    return status or (OVER_LIMIT if session.over_limit else 0)


def plain(target: Target, stats: Path) -> int:
    """Run the target without LMS, and write `steps`, `peak` and `step_time` to `stats`, as `Session.stats()` has them.

    The peak is that of the whole process. Returns the exit status, and raises, as `run` does.
    """
    from lms.memory.resident import ResidentSet
    from lms.runtime.progress import KEPT_TIMES
    from lms.torch.optimizers import Optimizers

    optimizers = Optimizers(())
    ends: deque[float] = deque(maxlen=KEPT_TIMES + 1)
    steps = 0

    def after_step(optimizer: Optimizer) -> None:
        nonlocal steps
        if optimizers.counts(optimizer):
            steps += 1
            ends.append(time.perf_counter())

    optimizers.listen(after_step)
    try:
        return execute(target)
    finally:
        import torch

        optimizers.leave()
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else ResidentSet().peak()
        times = [after - before for before, after in pairwise(ends)]
        found = {"steps": steps, "peak": peak, "step_time": statistics.median(times) if times else None}
        write_output("--stats", stats, json.dumps(found, indent=2).encode() + b"\n")


def record(target: Target, options: Options) -> tuple[int, Trace | None, Link | None]:
    """Run the target until enough was seen of it: the exit status so far, the step and the link.

    Step and link are None when the target failed. Raises as `run`, and LMSError when it ended without one pass.
    """
    session = _start(options)
    stop = _Stop(session)
    try:
        try:
            status = execute(target)
        except Enough:
            status = 0
        if status != 0:
            return status, None, None
        step = stop.step or session.trace
        if step is None:
            raise LMSError(f"{target.name} ended too early: {_why_no_step(session)}")
        return 0, *_described(session, target, _with_more(step, stop.first))
    finally:
        stop.remove()
        session.close()


def _with_more(step: Trace, first: Trace | None) -> Trace:
    """The step, with what the first pass had beside its records if that was more: a CPU's threads need more or less."""
    if (
        step.device != "cpu"
        or first is None
        or not (step.measured and first.measured)
        or _sequence(step) != _sequence(first)
    ):
        return step
    return step.with_measured(step.times, [max(both) for both in zip(step.others, first.others, strict=True)])


def _sequence(step: Trace) -> list[tuple[str, int, int]]:
    return [(access.kind, access.tensor, step.tensors[access.tensor].nbytes) for access in step.accesses]


def _described(session: Session, target: Target, step: Trace) -> tuple[Trace, Link]:
    """The step with the script's name and the link, and the link."""
    link = Link.from_dict(step.link) if step.link else session.link()
    return replace(step, link=link.to_dict(), machine={"script": target.title, **step.machine}), link


def _why_no_step(session: Session) -> str:
    stats = session.stats()
    if "activations" not in session.options.swap:
        return "swap has no activations, so no pass was recorded"
    if session.progress.passes:
        return "no pass with a backward was complete and could be planned for"
    if stats["held_peak"]:
        return (
            f"{format_size(int(stats['held_peak'] or 0))} were saved for a backward pass that never ended: a graph is "
            f"kept open, or the script stops in its first step ({format_size(int(stats['swapped_out'] or 0))} went out)"
        )
    stayed = Stats(**stats).stayed()  # type: ignore[arg-type]  # the keys of the dict are the fields
    if stayed:
        return f"{stayed[0]}, and nothing else on the main thread"
    return (
        "nothing of min-size or more was saved for a backward pass on the main thread, so there was nothing to swap "
        "(it does not train, trains on another device or thread, or stops before the end of its first backward)"
    )


class _Stop:
    """Raises Enough from the first module call or optimizer step after enough was watched."""

    def __init__(self, session: Session) -> None:
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._session = session
        self.first: Trace | None = None  # the first pass that could be planned for
        self.step: Trace | None = None  # the last one, once enough was watched
        self._more = CHOOSING if session.options.recompute else 0
        self._awaits_step: bool | None = None  # whether there is an optimizer that may step; None: not looked yet
        self._hooks = [register_module_forward_pre_hook(self._check), register_optimizer_step_post_hook(self._check)]

    def remove(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()

    def _check(self, *_: object) -> None:
        import torch

        # Dynamo must not compile this into the module.
        if not torch.compiler.is_compiling() and self._seen_enough():
            self.step = self._session.trace  # now: what the script does as it ends is no part of a step
            raise Enough

    def _seen_enough(self) -> bool:
        progress = self._session.progress
        if self.first is None and progress.trained:
            self.first = self._session.trace
        if progress.trained < PASSES + self._more:
            return False
        if progress.steps >= STEPS + self._more or progress.trained >= MOST_PASSES:
            return True
        if self._awaits_step is None:
            self._awaits_step = _has_optimizer()
        return not self._awaits_step


def _has_optimizer() -> bool:
    """Whether the script has an optimizer of PyTorch's: then its steps say when a step of the training is over."""
    from torch.optim.optimizer import Optimizer

    return any(issubclass(type(one), Optimizer) for one in gc.get_objects())


def _start(options: Options) -> Session:
    os.environ.update(missing_environment(os.environ))
    from lms.torch.session import enable

    session = enable(None, None, on_plan=_announcer(), **options.keywords())
    say(f"{session.describe()} ({options.why})")
    return session


def _announcer() -> Callable[[Plan], None]:
    """A function that prints a line about a plan: the first one, and each that moves notably more than those before."""
    most = -1  # bytes out of a plan that was announced
    choice: Choice | None = None  # of the last plan

    def announce(plan: Plan) -> None:
        nonlocal most, choice
        if plan.choice is not None and plan.choice is not choice:
            choice, names = plan.choice, list(plan.choice.modules)
            say(f"recomputed: {choice.why}")
            for name in names[:_MOST_NAMES]:
                say(f"recomputed: {name}: {choice.modules[name]}")
            if len(names) > _MOST_NAMES:
                say(f"recomputed: and {len(names) - _MOST_NAMES} modules more; a report lists them all")
        forecast = plan.forecast
        if plan.drift:
            say(f"planned anew: {plan.drift}")
        if forecast.out <= most * _NEWS:
            return
        most = forecast.out
        peak = f"peak {format_size(forecast.resident_peak)}, " if forecast.resident_peak else ""
        if not plan.moves:
            say(f"plan: {peak}everything fits, nothing will be swapped")
            return
        computing = sum(span.end - span.start for span in forecast.spans if span.lane == "compute")
        slower = f" ({forecast.seconds / computing:.2f} x its computation alone)" if computing else ""
        say(
            f"plan: {peak}at most {format_size(forecast.held_peak)} of saved bytes stay, "
            f"{format_size(forecast.out)} go out and {format_size(forecast.back)} come back in each pass of "
            f"{format_seconds(forecast.seconds)}{slower}"
        )

    return announce


def watch_link(session: Session) -> Watch | str:
    """Begin to read what the machine counts of the session's link; or why it cannot be read."""
    from lms.link.counters import Counters, DiskCounters, NvmlCounters

    device = session.torch_device
    try:
        counters: Counters
        if device.type == "cuda":
            import torch

            counters = NvmlCounters(str(getattr(torch.cuda.get_device_properties(device), "uuid", "")))
        else:
            counters = DiskCounters(spill_folder(session.options.spill_dir))
    except (LMSError, OSError) as error:
        return str(error)
    return Watch(counters)


class _Files(NamedTuple):
    """What a run is asked to write."""

    trace: Path | None
    report: Path | None
    perfetto: Path | None
    stats: Path | None


def _finish(
    session: Session,
    target: Target,
    files: _Files,
    watch: Watch | str | None,
    *,
    returned: bool,
) -> bool:
    """Close the session, sum it up, write the files; returns whether any of this failed.

    Never raises, so that an exception of the script's stays what it was.
    """
    problems = False
    step = timeline = timed = link = None
    try:
        step, timeline = session.trace, session.timeline
        timed = session.timed if files.perfetto is not None else None
        if step is not None and (files.trace is not None or files.report is not None):
            step, link = _described(session, target, step)
    except LMSError as error:
        warn(f"no link was measured: {error}")
        problems = True
    try:
        session.close()
    except LMSError as error:
        say(f"error: {error}")
        problems = True
    watched = watch.stop() if isinstance(watch, Watch) else watch
    counters = session.stats()
    if step is not None or counters["state"]:
        figures = Stats(**counters)  # type: ignore[arg-type]  # the keys of the dict are the fields
        say(figures.line(session.peak_where))
        for one in advice(figures):
            say(f"advice: {one.text}")
    elif returned:  # else it had no time to
        swapped = counters["swapped_out"]
        warn(f"{'there is no plan' if swapped else 'LMS had no effect'}: {_why_no_step(session)}")
    if files.stats is not None:
        problems |= not _write("--stats", files.stats, lambda: json.dumps(counters, indent=2) + "\n")
    if step is None:
        for name, path in files._replace(stats=None)._asdict().items():
            if path is not None:
                warn(f"--{name}={str(path)!r}: nothing written, because no step was recorded")
        return problems
    if files.trace is not None:
        problems |= not _write("--trace", files.trace, step.to_json)
    if files.report is not None:

        def page() -> str:
            from lms.report import render

            arguments = {"arguments": shlex.join(target.args)} if target.args else {}
            return render(
                replace(step, machine={**step.machine, **arguments}),
                link=link,
                plan=session.plan,
                ran=timeline,
                stats=counters,
                watched=watched,
                title=target.title,
            )

        problems |= not _write("--report", files.report, page)
    if timed is None and files.perfetto is not None:
        warn(f"--perfetto={str(files.perfetto)!r}: nothing written, because no pass was timed")
    elif timed is not None and files.perfetto is not None:
        problems |= not _write("--perfetto", files.perfetto, lambda: _events(target, *timed))
    return problems


def _events(target: Target, trace: Trace, ran: Timeline, plan: Plan | None) -> str:
    from lms.perfetto import to_json

    return to_json(replace(trace, machine={"script": target.title, **trace.machine}), ran, plan, measured=True)


def _write(option: str, path: Path, content: Callable[[], str]) -> bool:
    try:
        path = write_output(option, path, content().encode())
    except LMSError as error:
        say(f"error: {error}")
        return False
    except (OSError, ImportError) as error:  # what makes the content could not be loaded
        say(f"error: {option}={str(path)!r}: not written: {error}")
        return False
    say(f"wrote {path}")
    return True
