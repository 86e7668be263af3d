"""`offload`: LMS for one function that TensorFlow traces."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar, cast

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.python.eager.context import async_wait

from lms.core.plan import no_collections
from lms.core.trace import Trace
from lms.errors import LimitError, LMSError, UsageError
from lms.memory.resident import ResidentSet
from lms.options import NotBuiltError, Options
from lms.tensorflow.bounds import KNOBS, Bounds
from lms.tensorflow.edit import edit
from lms.tensorflow.graph import read_nodes
from lms.tensorflow.remarks import called, in_clusters, nothing_moves, other_devices, what_stays
from lms.tensorflow.step import read_step
from lms.tensorflow.swaps import plain
from lms.tensorflow.tiers import FileTier, HostTier, copies, give_back, mark
from lms.tensorflow.traced import Known, read_traced
from lms.units import format_size

TESTED = ((2, 16), (2, 21))  # the first and the last version of TensorFlow that the tests ran with
_RANDOM = (
    "To avoid this, give a budget, or replace tf.random.* and tf.nn.dropout by tf.random.Generator, "
    "tf.random.stateless_* or Keras' own layers"
)
_plans = itertools.count(1)

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


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
    plan: int  # a number that no other plan of this process has
    mark: int  # a number that all graphs made of one traced function share
    random: bool  # whether each trace begins a sequence of random numbers again


class Offload:
    """The decorator that `offload` returns; `traces` has what was done, one entry for each graph."""

    def __init__(self, options: dict[str, Any], knobs: dict[str, int | None], host: str | None) -> None:
        self.bounds = Bounds(options, knobs)
        self.options = self.bounds.options
        if self.options.swap != ("activations",):
            raise NotBuiltError(
                f"swap={self.options.swap!r}: with TensorFlow LMS moves activations alone; leave swap out, or lower "
                "the limit"
            )
        _check_version(tf.__version__)
        if self.options.recompute:
            raise UsageError("recompute=True: with TensorFlow LMS recomputes nothing; leave it out")
        self.tier = _tier(self.options, host)
        self.traces: list[Traced] = []
        self.first_batch: Sequence[Any] | None = None  # shapes of the inputs, if tracing does not know them
        # Most bytes that each operation needs inside, by its name, as far as it is known; None: nothing was measured.
        self.scratch: dict[str, int] | None = None
        self.peak = 0  # most resident bytes of the process in the last step that was measured
        self.over_limit = False  # whether a step went over the limit that was planned with what another one needed
        self._found = 0  # resident bytes when the last step was planned
        self._tries = False  # whether the next step holds as little as possible, to be measured
        self._surely: dict[str, int] = {}  # bytes that its tensors take at least while each operation runs
        self._measuring = False
        self._failure: Exception | None = None  # what stopped the last graph
        self._resident = ResidentSet()
        self._told: set[str] = set()

    def __call__(self, function: F) -> F:
        """The function, whose graph is edited each time that it is traced; one of tf.function's is also measured."""
        if isinstance(function, tf.types.experimental.PolymorphicFunction):
            return cast(F, self._measured(function))

        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with _as_it_is():
                start = self._begin()
            result = function(*args, **kwargs)
            with _as_it_is():
                self._end(start)
            return result

        return traced  # type: ignore[return-value]

    def _measured(self, function: Any) -> Callable[..., Any]:
        """What `function` does. Each new plan is traced by another copy of it, whose first call is measured."""
        traced = self(function.python_function)
        copy, is_new = function._clone(traced), True

        @functools.wraps(function.python_function)
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal copy, is_new
            inside = not tf.executing_eagerly()  # a part of another function
            # By name, arguments would have to be brought into the order of the graph's inputs.
            self.first_batch = None if inside or kwargs else _shapes(args)
            if inside:
                return copy(*args, **kwargs)
            result, again = self.watch(lambda: copy(*args, **kwargs), is_new=is_new)
            copy, is_new = (function._clone(traced), True) if again else (copy, False)
            return result

        del step.__wrapped__  # TensorFlow would call that if `step` were an argument of another function
        return step

    def watch(self, call: Callable[[], T], *, is_new: bool, replicas: int = 1) -> tuple[T, bool]:
        """Call a step, and measure the call if it traced the step; `is_new` says that it will.

        Returns its result, and whether to trace it again because a better plan can now be made. Raises LMSError if not
        all copies of the plan ran, and LimitError if the limit turns out to be below the floor.
        """
        traced = len(self.traces)
        if is_new:
            if isinstance(self.tier, FileTier):
                give_back()  # what was freed before the step is no part of its peak
            with contextlib.suppress(OSError):  # a sandbox's kernel may refuse: the peak is then that of the process
                self._resident.reset_peak()
        self._failure, self._measuring = None, True
        try:
            result = call()
            if len(self.traces) > traced:
                async_wait()  # with asynchronous execution the step may still run
        except tf.errors.OpError:
            if self._failure is not None:
                raise self._failure from None
            raise
        finally:
            self._measuring = False
        traces = self.traces[traced:][-replicas:]
        if not traces:
            return result, False
        self.peak = self._resident.peak()
        self._check(traces)
        return result, self._learn(traces)

    def _check(self, traces: Sequence[Traced]) -> None:
        """Raise LMSError if not all pairs ran that were put into the graphs."""
        if not isinstance(self.tier, FileTier):
            return
        for number in {one.mark for one in traces}:
            graphs = [(copies(one.plan), (one.outs, one.ins)) for one in self.traces if one.mark == number]
            # Threads that make their first calls at once each have the graph edited, and all run one of these graphs.
            for (outs, ins), planned in [one for one in graphs if any(one[0])] or graphs:
                if (outs, ins) != planned:
                    raise LMSError(
                        f"TensorFlow's graph optimizers undid the plan: {outs} copies out and {ins} back ran of "
                        f"{planned[0]} and {planned[1]}; report this with the model"
                    )

    def _learn(self, traces: Sequence[Traced]) -> bool:
        """Learn from the peak what operations may need inside; returns whether another plan can be better.

        The first step under a limit that is tight holds as little as possible. Raises LimitError if even that was more
        than the limit.
        """
        last = traces[-1]
        limit, _ = self.bounds.of(last.trace)
        if limit is None or not isinstance(self.tier, FileTier):
            return False
        first = self.scratch is None
        over = self.peak > limit
        if over and first and (last.swapped or self._tries):
            raise LimitError(
                f"limit {format_size(limit)} is below the floor of {format_size(self.peak)}: the step took that "
                "much with every tensor swapped that can be. Raise the limit, or make the batch, the resolution "
                "or the width smaller"
            )
        if over:
            self.over_limit = not first
            print(f"lms: the step took {format_size(self.peak)}: it is planned again", file=sys.stderr)
        self._tries = over and first
        if not self._tries and (first or over):
            # An operation needs inside at most what the peak leaves beside its tensors; with other threads at work a
            # quarter more. What stays in memory after the step is a part of what the next plan finds there.
            give_back()
            above = (self.peak - max(self._found, self._resident.current())) * 5 // 4 // len(traces)
            self.scratch = {name: max(0, above - nbytes) for name, nbytes in self._surely.items()}
        return self._is_worth_a_trace(traces, over=over, better=first and last.swapped > 0)

    def _is_worth_a_trace(self, traces: Sequence[Traced], *, over: bool, better: bool) -> bool:
        """Whether to trace again: then stateful random operations, unlike in plain training, begin again."""
        random = any(one.random for one in traces)
        if over and random:
            warnings.warn(
                f"LMS traces the step again to keep the limit, so its random numbers begin again. {_RANDOM}",
                RuntimeWarning,
                stacklevel=2,
            )
        elif better and random:
            self._tell(
                "the step keeps its first plan, which swaps all that can be and takes more time than the limit needs: "
                f"random numbers would begin again with another trace. {_RANDOM}"
            )
        return over or (better and not random)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _begin(self) -> int:
        if tf.executing_eagerly():
            raise UsageError(
                "offload edits the graph of a tf.function, and this function runs eagerly: put @tf.function below "
                "@offload(...), and leave run_functions_eagerly off"
            )
        if _is_compiled():
            raise UsageError("jit_compile=True: XLA has a schedule of its own; take jit_compile=False")
        unmeasured = self.scratch is None and not self._measuring
        if unmeasured and self.options.budget is None and isinstance(self.tier, FileTier):
            raise UsageError(
                "with a limit, offload measures a step before it plans: put @offload(...) above @tf.function, and call "
                "the function from Python, not from another tf.function; or give a budget"
            )
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

    @no_collections()
    def _edited(self, known: Known, replicas: int, graph: bytes, index: int) -> bytes:
        """The optimized graph with the copies of a plan. The mark stands in it as often as the function is called."""
        try:
            definition = GraphDef.FromString(graph)
            marks = [one.name for one in definition.node if one.op == "LmsMark" and one.attr["index"].i == index]
            for name in marks:
                self._edit(definition, known, replicas, name, index)
        except Exception as error:
            self._failure = error
            raise
        edited: bytes = definition.SerializeToString()
        return edited

    def _edit(self, definition: Any, known: Known, replicas: int, name: str, index: int) -> None:
        began = time.thread_time()
        prefix = name[: name.rindex("lms_mark_")]
        on_device = isinstance(self.tier, HostTier)
        nodes = read_nodes(definition, lambda node: _number(node, prefix, known))
        if not on_device:
            give_back()
        self._found = self._resident.current()
        step = read_step(
            nodes,
            next(node for node in nodes if node.name == name),
            known,
            prefix,
            min_size=self.options.min_size,
            base=known.variables + known.inputs if on_device else self._found,
            on_device=on_device,
            threshold=self.bounds.knobs["swapout_threshold"],
            scratch=self.scratch,
        )
        swaps = self.bounds.swaps(
            step, replicas, on_device=on_device, measured=self.scratch is not None, tries=self._tries
        )
        stays = called(nodes, prefix, known)
        elsewhere = other_devices(known, step.device) if replicas == 1 else {}
        for remark in what_stays(stays, elsewhere):
            self._tell(remark)
        for warning in (in_clusters(nodes), nothing_moves(self.bounds, step, swaps, known, stays, on_device=on_device)):
            if warning:
                warnings.warn(warning, RuntimeWarning, stacklevel=2)
        plan = next(_plans)
        edit(definition, step, swaps, self.tier, f"{name}_", plan=plan, ordered=self.scratch is not None)
        names = (operation.node.name.removeprefix(prefix) for operation in step.operations)
        self._surely = dict(zip(names, swaps.surely, strict=True))
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
                plan=plan,
                mark=index,
                random=known.random,
            )
        )
        done = self.traces[-1]
        without = ", without the scratch memory of operations" if self.scratch is None else ""
        self._tell(
            f"{done.swapped} of {done.tensors} tensors ({format_size(done.swapped_bytes)}) go to {self.tier}; "
            f"foreseen{without}: at most {format_size(done.predicted_peak)}"
        )

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            print(f"lms: {text}", file=sys.stderr)


@contextlib.contextmanager
def _as_it_is() -> Iterator[None]:
    """Have AutoGraph raise an error as it is, and not one of its own in place of it."""
    try:
        yield
    except Exception as error:
        error.ag_pass_through = True  # type: ignore[attr-defined]
        raise


def _shapes(args: Any) -> list[Any]:
    flat = tf.nest.flatten(args, expand_composites=True)
    return [tf.TensorShape(one.shape) for one in flat if isinstance(one, (tf.Tensor, np.ndarray))]


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
    """LMS for a training step: a decorator above `@tf.function`, for a function that computes its gradients.

    It may also stand below `@tf.function`, as it must in a function that another one calls. Then nothing is measured,
    and on a processor it takes a budget, but no limit.

    `options` are those of `lms.LMS` that fit: limit, frac or budget (which may be a share such as "35%" of what the
    step's tensors take at their peak), min_size, spill_dir, prefetch, write_ahead. `host` is the device that swapped
    tensors go to: with none, "/device:CPU:0" if there is a GPU, else a file in `spill_dir`. The others are TFLMS v2's,
    counted in operations of the step; None or -1 leave it to the plan.

    Raises UsageError for wrong options, LMSError if the operations of the file tier are not built, and, while the
    function is traced, LimitError for a limit below the floor.
    """
    if unknown := set(options) - {one.name for one in Options.__dataclass_fields__.values() if one.metadata}:
        known = (*(name for name in ("limit", "frac", "budget", "min_size", "spill_dir", "prefetch", "write_ahead")),)
        raise UsageError(f"{sorted(unknown)[0]!r} is no option; expected any of {', '.join((*known, *KNOBS, 'host'))}")
    knobs = dict(zip(KNOBS, (swapout_threshold, swapin_ahead, swapin_groupby, sync_mode), strict=True))
    return Offload(options, knobs, host)


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
