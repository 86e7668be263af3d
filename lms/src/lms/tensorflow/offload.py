"""`offload`: LMS for one function that TensorFlow traces."""

from __future__ import annotations

import functools
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import tensorflow as tf

from lms.core.link import KNOWN, Link
from lms.core.plan import make_plan
from lms.core.static import make_static
from lms.errors import LimitError, UsageError
from lms.memory.capacity import memory_capacity
from lms.memory.resident import ResidentSet
from lms.options import NotBuiltError, Options
from lms.tensorflow.graph import Step, read_step
from lms.tensorflow.order import Design, make_design
from lms.tensorflow.rewrite import Rewritten, rewrite
from lms.tensorflow.tiers import FileTier, HostTier
from lms.units import format_size

TESTED = ((2, 21), (2, 21))  # the first and the last version of TensorFlow that the tests run with
_KNOBS = ("swapout_threshold", "swapin_ahead", "swapin_groupby", "sync_mode")
_ATTEMPTS = 4  # plans that are made for a limit: what TensorFlow may run early counts only once a plan is laid out
_FILE = Link("file", 1.5e9, 1.5e9, source="assumed: what a disk of a cloud's machine reaches")

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Traced:
    """What LMS did to one trace of the function. Bytes of one run; `seconds` for planning and rewriting."""

    operations: int
    tensors: int
    swapped: int  # tensors
    swapped_bytes: int
    outs: int
    ins: int
    plain_peak: int  # most bytes without LMS, in any order; what was there before the step is in both peaks
    predicted_peak: int  # most bytes with LMS, in any order of operations that TensorFlow may choose
    variables: int
    seconds: float


class Offload:
    """The decorator that `offload` returns; `traces` has what was done, one entry for each trace."""

    def __init__(self, options: dict[str, Any], knobs: dict[str, int | None], host: str | None) -> None:
        share = options.get("budget")
        self.share: float | None = None
        if isinstance(share, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", share)):
            self.share = float(match[1]) / 100
            if self.share > 1:
                raise UsageError(f"budget={share!r}: expected at most 100%")
            options = {**options, "budget": 0}
        self.options = Options.parse(**options)
        self.knobs = {name: _knob(name, value) for name, value in knobs.items()}
        if self.knobs["sync_mode"] > 3:
            raise UsageError(f"sync_mode={knobs['sync_mode']!r}: expected 0, 1 (out), 2 (in), 3 (both), or -1")
        if self.knobs["swapin_groupby"] != -1:
            raise NotBuiltError("swapin_groupby: only None or -1, the plan's choice, is built")
        _check_version(tf.__version__)
        self.tier = _tier(self.options, host)
        self.traces: list[Traced] = []
        self.first_batch: Sequence[Any] | None = None  # shapes of the inputs, if tracing does not know them
        self.scratch = 0  # bytes that operations were seen to need beside their results
        self._told: set[str] = set()

    def __call__(self, function: F) -> F:
        """The function, whose graph is edited each time that it is traced."""

        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            start = self._begin()
            result = function(*args, **kwargs)
            self._edit(start, result)
            return result

        return traced  # type: ignore[return-value]

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _begin(self) -> int:
        if tf.executing_eagerly():
            raise UsageError(
                "offload edits the graph of a tf.function, and this function runs eagerly: put @tf.function above "
                "@offload(...), and leave run_functions_eagerly off"
            )
        if _is_compiled():
            raise UsageError("jit_compile=True: XLA has a schedule of its own; take jit_compile=False")
        return len(tf.compat.v1.get_default_graph().get_operations())

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _edit(self, start: int, result: object) -> None:
        began = time.perf_counter()
        graph = tf.compat.v1.get_default_graph()
        flat = tf.nest.flatten(result, expand_composites=True)
        results = [one for one in flat if tf.is_tensor(one) and hasattr(one, "graph")]
        replica = tf.distribute.get_replica_context()
        replicas = replica.num_replicas_in_sync if replica is not None else 1
        step = read_step(
            graph,
            start,
            results,
            min_size=self.options.min_size,
            base=self.scratch + (0 if isinstance(self.tier, HostTier) else ResidentSet().current()),
            on_device=isinstance(self.tier, HostTier),
            given=self.first_batch,
            threshold=self.knobs["swapout_threshold"],
            device=tf.nest.flatten(replica.devices)[0] if replicas > 1 else "",
        )
        self._tell_untouched(step)
        done = self._rewrite(graph, step, replicas)
        self.traces.append(
            Traced(
                operations=len(graph.get_operations()) - start,
                tensors=len(step.tensors),
                swapped=done.outs,
                swapped_bytes=done.nbytes,
                outs=done.outs,
                ins=done.ins,
                plain_peak=make_design(step, None).peak,
                predicted_peak=done.peak,
                variables=step.variables,
                seconds=time.perf_counter() - began,
            )
        )
        self._tell(
            f"{done.outs} of {len(step.tensors)} tensors ({format_size(done.nbytes)}) go to {self.tier}; foreseen: at "
            f"most {format_size(done.peak)}"
        )

    def _rewrite(self, graph: Any, step: Step, replicas: int) -> Rewritten:
        """Edit the graph. Each of several replicas has its part of what is above the base."""
        most = max(step.trace.live, default=0)
        design = make_design(step, None)
        budget, limit = self.options.budget, None
        if self.share is not None:
            budget = int(self.share * most)
        elif budget is None:
            limit = self.options.limit or int((self.options.frac or 0) * memory_capacity())
        if limit is not None:
            limit = step.base + (limit - step.base) // replicas
            if design.peak > limit:
                design = self._under(step, limit)
        elif budget is not None and most > budget:
            design = self._designed(step, budget=budget)
        if not design.outs and step.unknown > len(step.tensors):
            warnings.warn(
                f"LMS chose no tensor: the sizes of {step.unknown} are not known while tracing; give tensors of a "
                "fixed batch (drop_remainder=True, or an input_signature with sizes)",
                RuntimeWarning,
                stacklevel=2,
            )
        return rewrite(graph, step, design, self.tier)

    def _under(self, step: Step, limit: int) -> Design:
        """A design that holds at most `limit` bytes. Raises LimitError if none is found."""
        target = limit
        for _ in range(_ATTEMPTS):
            try:
                design = self._designed(step, limit=target)
            except LimitError:
                break
            if design.peak <= limit:
                return design
            target -= design.peak - limit
        design = self._designed(step, budget=0)
        if design.peak <= limit:
            return design
        raise LimitError(
            f"limit {format_size(limit)} is below the floor of {format_size(design.peak)}: with every tensor swapped "
            f"that can be, the step may still need that much, of it {format_size(step.base)} before it begins. Raise "
            "the limit, or make the batch, the resolution or the width smaller"
        )

    def _designed(self, step: Step, *, limit: int | None = None, budget: int | None = None) -> Design:
        ahead, sync = self.knobs["swapin_ahead"], self.knobs["sync_mode"]
        link = KNOWN["pcie3x16"] if isinstance(self.tier, HostTier) else _FILE
        write_ahead = 0 if sync in (1, 3) else self.options.write_ahead
        prefetch = 0 if sync in (2, 3) else self.options.prefetch
        plan = make_plan(step.trace, link, limit=limit, budget=budget, prefetch=prefetch, write_ahead=write_ahead)
        return make_design(step, make_static(step.trace, plan), ahead=None if ahead < 0 else ahead)

    def _tell_untouched(self, step: Step) -> None:
        if step.untouched:
            named = ", ".join(f"{count} {name}" for name, count in sorted(step.untouched.items()))
            self._tell(f"memory inside of these stays as it is: {named}")

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            print(f"lms: {text}", file=sys.stderr)


def offload(
    *,
    swapout_threshold: int | None = None,
    swapin_ahead: int | None = None,
    swapin_groupby: int | None = None,
    sync_mode: int | None = None,
    host: str | None = None,
    **options: Any,
) -> Offload:
    """LMS for a training step: a decorator to be put below `@tf.function`, for a function that computes its gradients.

    `options` are those of `lms.LMS` that fit: limit, frac or budget (which may be a share such as "35%" of what the
    step's tensors take at their peak), min_size, spill_dir, prefetch, write_ahead. `host` is the device that swapped
    tensors go to: with none, "/device:CPU:0" if there is a GPU, else a file in `spill_dir`. The others are TFLMS v2's,
    counted in operations of the step; None or -1 leave it to the plan.

    Raises UsageError for wrong options, LMSError if the operations of the file tier are not built, and, while the
    function is traced, LimitError for a limit below the floor.
    """
    if unknown := set(options) - {one.name for one in Options.__dataclass_fields__.values() if one.metadata}:
        known = (*(name for name in ("limit", "frac", "budget", "min_size", "spill_dir", "prefetch", "write_ahead")),)
        raise UsageError(f"{sorted(unknown)[0]!r} is no option; expected any of {', '.join((*known, *_KNOBS, 'host'))}")
    knobs = dict(zip(_KNOBS, (swapout_threshold, swapin_ahead, swapin_groupby, sync_mode), strict=True))
    return Offload(options, knobs, host)


def _knob(name: str, value: int | None) -> int:
    if value is None:
        return -1
    if isinstance(value, bool) or not isinstance(value, int) or value < -1:
        raise UsageError(f"{name}={value!r}: expected a whole number, or None or -1 for the plan's choice")
    return value


def _tier(options: Options, host: str | None) -> HostTier | FileTier:
    if host is not None:
        return HostTier(host)
    if not tf.config.list_logical_devices("GPU"):
        return FileTier(options.spill_dir)
    if options.limit is None and options.budget is None:
        raise UsageError("TensorFlow does not tell how much memory the GPU has: give limit or budget")
    return HostTier("/device:CPU:0")


def _check_version(version: str) -> None:
    found = tuple(int(part) for part in version.split(".")[:2])
    if not TESTED[0] <= found <= TESTED[1]:
        first, last = (".".join(map(str, one)) for one in TESTED)
        tested = first if first == last else f"{first} to {last}"
        warnings.warn(
            f"LMS is tested with TensorFlow {tested}, this is {version}: it uses two private methods of graphs "
            "(_update_input, _add_control_input), which may differ",
            RuntimeWarning,
            stacklevel=4,
        )


def _is_compiled() -> bool:
    """Whether the tf.function that is traced here is compiled by XLA: nothing but its own frame tells."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if type(owner).__name__ == "Function" and getattr(owner, "_jit_compile", None):
            return True
        frame = frame.f_back
    return False
