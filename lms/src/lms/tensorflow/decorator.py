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
from tensorflow.core.framework.graph_pb2 import GraphDef

from lms.core.link import KNOWN, Link
from lms.core.plan import make_plan
from lms.core.static import make_static
from lms.core.trace import Trace
from lms.errors import LimitError, LMSError, UsageError
from lms.memory.capacity import memory_capacity
from lms.memory.resident import ResidentSet
from lms.options import NotBuiltError, Options
from lms.tensorflow.edit import edit
from lms.tensorflow.graph import read_nodes
from lms.tensorflow.step import Step, read_step
from lms.tensorflow.swaps import Swaps, make_swaps, plain
from lms.tensorflow.tiers import FileTier, HostTier, mark
from lms.tensorflow.traced import Known, read_traced
from lms.units import format_size

TESTED = ((2, 16), (2, 21))  # the first and the last version of TensorFlow that the tests ran with
_KNOBS = ("swapout_threshold", "swapin_ahead", "swapin_groupby", "sync_mode")
_ATTEMPTS = 4  # plans that are made for a limit: copies that are waited for late may need another
_FILE = Link("file", 1.5e9, 1.5e9, source="assumed: what a disk of a cloud's machine reaches")

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Traced:
    """What LMS did to one graph. Bytes of one run; `seconds` of the processor for planning and rewriting."""

    operations: int
    tensors: int
    swapped: int  # tensors
    swapped_bytes: int
    outs: int
    ins: int
    plain_peak: int  # most bytes without LMS, in the order of the plan; what was there before is in both peaks
    predicted_peak: int  # most bytes with LMS, beside what operations need inside
    variables: int
    seconds: float
    trace: Trace


class Offload:
    """The decorator that `offload` returns; `traces` has what was done, one entry for each graph."""

    def __init__(self, options: dict[str, Any], knobs: dict[str, int | None], host: str | None) -> None:
        share = options.get("budget")
        self.share: float | None = None
        if isinstance(share, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", share)):
            self.share = float(match[1]) / 100
            if self.share > 1:
                raise UsageError(f"budget={share!r}: expected at most 100%")
            options = {**options, "budget": 0}
        self.options = Options.parse(**options)
        if self.options.swap != ("activations",):
            raise NotBuiltError(
                f"swap={self.options.swap!r}: with TensorFlow LMS moves activations alone; leave swap out, or lower "
                "the limit"
            )
        self.knobs = {name: _knob(name, value) for name, value in knobs.items()}
        if self.knobs["sync_mode"] > 3:
            raise UsageError(f"sync_mode={knobs['sync_mode']!r}: expected 0, 1 (out), 2 (in), 3 (both), or -1")
        _check_version(tf.__version__)
        self.tier = _tier(self.options, host)
        self.traces: list[Traced] = []
        self.first_batch: Sequence[Any] | None = None  # shapes of the inputs, if tracing does not know them
        self.scratch: int | None = None  # bytes that operations were seen to need beside their results; None: not yet
        self.trying = False  # whether a step is measured before one is planned for a limit
        self.failure: Exception | None = None  # what stopped the last graph
        self._told: set[str] = set()

    def __call__(self, function: F) -> F:
        """The function, whose graph is edited each time that it is traced."""

        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            start = self._begin()
            result = function(*args, **kwargs)
            self._end(start)
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
    def _end(self, start: int) -> None:
        """Read what was traced, and mark it, so that the graph comes back once it is optimized."""
        replica = tf.distribute.get_replica_context()
        replicas = replica.num_replicas_in_sync if replica is not None else 1
        known = read_traced(tf.compat.v1.get_default_graph(), start, self.first_batch)
        if known.untouched:
            named = ", ".join(f"{count} {name}" for name, count in sorted(known.untouched.items()))
            self._tell(f"memory inside of these stays as it is: {named}")
        with tf.device(tf.nest.flatten(replica.devices)[0] if replicas > 1 else None):
            mark(
                functools.partial(self._edited, known, replicas),
                before_partition=self.tier.before_partition,
            )

    def _edited(self, known: Known, replicas: int, graph: bytes, index: int) -> bytes:
        """The optimized graph with the copies of a plan. The mark stands in it as often as the function is called."""
        try:
            definition = GraphDef.FromString(graph)
            marks = [one.name for one in definition.node if one.op == "LmsMark" and one.attr["index"].i == index]
            for name in marks:
                self._edit(definition, known, replicas, name)
        except Exception as error:
            self.failure = error
            raise
        edited: bytes = definition.SerializeToString()
        return edited

    def _edit(self, definition: Any, known: Known, replicas: int, name: str) -> None:
        began = time.thread_time()
        prefix = name[: name.rindex("lms_mark_")]
        on_device = isinstance(self.tier, HostTier)
        nodes = read_nodes(definition, lambda node: _number(node, prefix, known))
        step = read_step(
            nodes,
            next(node for node in nodes if node.name == name),
            known,
            prefix,
            min_size=self.options.min_size,
            base=known.variables + known.inputs if on_device else ResidentSet().current() + (self.scratch or 0),
            on_device=on_device,
            threshold=self.knobs["swapout_threshold"],
        )
        swaps = self._planned(step, replicas)
        if not swaps.outs and known.unknown > len(step.tensors):
            warnings.warn(
                f"LMS chose no tensor: the sizes of {known.unknown} are not known while tracing; give tensors of a "
                "fixed batch (drop_remainder=True, or an input_signature with sizes)",
                RuntimeWarning,
                stacklevel=2,
            )
        edit(definition, step, swaps, self.tier, f"{name}_")
        if swaps.outs and len(read_nodes(definition, lambda node: None)) < len(definition.node):
            raise LMSError("the edited graph has a cycle; report this with the model")
        self.traces.append(
            Traced(
                operations=len(nodes),
                tensors=len(step.tensors),
                swapped=len({out.storage for out in swaps.outs}),
                swapped_bytes=sum(step.storages[out.storage].nbytes for out in swaps.outs),
                outs=len(swaps.outs),
                ins=len(swaps.backs),
                plain_peak=plain(step).peak,
                predicted_peak=swaps.peak,
                variables=known.variables,
                seconds=time.thread_time() - began,
                trace=step.trace,
            )
        )
        done = self.traces[-1]
        self._tell(
            f"{done.swapped} of {done.tensors} tensors ({format_size(done.swapped_bytes)}) go to {self.tier}; "
            f"foreseen: at most {format_size(done.predicted_peak)}"
        )

    def bound(self, trace: Trace) -> tuple[int | None, int | None]:
        """The limit or the budget, in bytes; the other is None."""
        if self.share is not None:
            return None, int(self.share * max(trace.live, default=0))
        return self.options.limit_of(memory_capacity()), self.options.budget

    def _planned(self, step: Step, replicas: int) -> Swaps:
        """The copies. Each of several replicas has its part of what is above the base."""
        limit, budget = self.bound(step.trace)
        nothing = plain(step)
        if limit is not None:
            limit = step.base + (limit - step.base) // replicas
            # What operations need inside is not known before one step has run: half as much again is left for it.
            known = self.scratch is not None or isinstance(self.tier, HostTier)
            safe = limit if known else step.base + (limit - step.base) * 2 // 3
            if nothing.peak <= safe:
                return nothing
            if self.trying and not known:
                return self._swaps(step, budget=0)
            return self._under(step, safe)
        assert budget is not None
        return nothing if max(step.trace.live, default=0) <= budget else self._swaps(step, budget=budget)

    def _under(self, step: Step, limit: int) -> Swaps:
        """Copies with which the step holds at most `limit` bytes. Raises LimitError if none are found."""
        target = limit
        for _ in range(_ATTEMPTS):
            try:
                swaps = self._swaps(step, limit=target)
            except LimitError:
                break
            if swaps.peak <= limit:
                return swaps
            target -= swaps.peak - limit
        swaps = self._swaps(step, budget=0)
        if swaps.peak <= limit:
            return swaps
        raise LimitError(
            f"limit {format_size(limit)} is below the floor of {format_size(swaps.peak)}: with every tensor swapped "
            f"that can be, the step still needs that much, of it {format_size(step.base)} before it begins. Raise "
            "the limit, or make the batch, the resolution or the width smaller"
        )

    def _swaps(self, step: Step, *, limit: int | None = None, budget: int | None = None) -> Swaps:
        sync = self.knobs["sync_mode"]
        link = KNOWN["pcie3x16"] if isinstance(self.tier, HostTier) else _FILE
        write_ahead = 0 if sync in (1, 3) else self.options.write_ahead
        prefetch = 0 if sync in (2, 3) else self.options.prefetch
        schedule = make_plan(step.trace, link, limit=limit, budget=budget, prefetch=prefetch, write_ahead=write_ahead)
        static = make_static(step.trace, schedule)
        return make_swaps(step, static, ahead=self.knobs["swapin_ahead"], group=self.knobs["swapin_groupby"])

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            print(f"lms: {text}", file=sys.stderr)


def _number(node: str, prefix: str, known: Known) -> int | None:
    return known.numbers.get(node[len(prefix) :]) if node.startswith(prefix) else None


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
            f"LMS is tested with TensorFlow {tested}, this is {version}: its pass over graphs uses "
            "C++ that is not TensorFlow's public interface, and may differ",
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
