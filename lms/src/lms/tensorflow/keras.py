"""`LMS`: the Keras callback."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from lms.errors import LMSError, UsageError
from lms.memory.resident import ResidentSet
from lms.tensorflow.offload import Offload, Traced, offload
from lms.tensorflow.tiers import FileTier, usage
from lms.units import format_size


class LMS(keras.callbacks.Callback):  # type: ignore[misc]
    """Large model support for `model.fit`: `callbacks=[LMS(limit="12GB")]`. Takes what `offload` takes.

    Raises UsageError when training begins if the model runs eagerly, is compiled by XLA on request or does not run on
    TensorFlow; LimitError for a limit below the floor; LMSError after the first step if TensorFlow's optimizers undid
    the plan. If the first step goes over the limit, the next ones are planned with what it needed beside.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.offload: Offload = offload(**options)
        self._jit: object = None
        self._resident = ResidentSet()
        self._peak = 0

    def stats(self) -> dict[str, int]:
        """Figures: bytes and counts of the last trace, and what the file tier of this process has done."""
        figures = dict(usage()) if isinstance(self.offload.tier, FileTier) else {}
        if self.offload.traces:
            last = self.offload.traces[-1]
            figures |= {name: getattr(last, name) for name in ("tensors", "swapped", "plain_peak", "predicted_peak")}
            figures |= {"variables": last.variables, "peak": self._peak}
        return figures

    def on_train_begin(self, logs: object = None) -> None:
        """Have the training step traced anew, with LMS."""
        model = self.model
        if keras.backend.backend() != "tensorflow":
            raise UsageError(f"Keras runs on {keras.backend.backend()}; set KERAS_BACKEND=tensorflow")
        if model.run_eagerly:
            raise UsageError("run_eagerly=True: there is no graph to edit; compile the model with run_eagerly=False")
        if model.get_compile_config().get("jit_compile") is True:
            raise UsageError("jit_compile=True: XLA has its own schedule; compile the model with jit_compile=False")
        self._restore()
        self._jit = model.jit_compile
        if model.jit_compile:
            print("lms: XLA is off for this model (jit_compile): it has a schedule of its own", file=sys.stderr)
            model.jit_compile = False
        model.train_step = self.offload(model.train_step)
        model.make_train_function(force=True)
        self._peek(model)

    def on_train_end(self, logs: object = None) -> None:
        """Leave the model as it was."""
        self._restore()
        self.model.jit_compile = self._jit

    def _restore(self) -> None:
        self.model.__dict__.pop("train_step", None)
        self.model.train_function = None

    def _peek(self, model: Any) -> None:
        """Look at the first batch before the step is traced, because tracing may not know its size."""
        train: Callable[[Any], Any] = model.train_function

        def first(iterator: Any) -> Any:
            model.train_function = train
            if isinstance(iterator, tf.data.Iterator):
                batches = _take(iterator, model.steps_per_execution)
                if batches:
                    self.offload.first_batch = [
                        one.shape for one in tf.nest.flatten(batches[0], expand_composites=True) if tf.is_tensor(one)
                    ]
                spec = iterator.element_spec
                iterator = iter(tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec))
            before, traced = self.stats(), len(self.offload.traces)
            with contextlib.suppress(OSError):  # a sandbox's kernel may refuse: the peak is then that of the process
                self._resident.reset_peak()
            result = train(iterator)
            self._check(before, self.offload.traces[traced:][-model.distribute_strategy.num_replicas_in_sync :])
            self._compare(model)
            return result

        model.train_function = first

    def _check(self, before: dict[str, int], traces: Sequence[Traced]) -> None:
        """Raise LMSError if not all pairs ran that were put into the graph, or if a place outlived the step."""
        if not isinstance(self.offload.tier, FileTier) or not traces:
            return
        after, wanted = self.stats(), [sum(getattr(one, name) for one in traces) for name in ("outs", "ins")]
        outs, ins = (after[name] - before[name] for name in ("outs", "ins"))
        steps = max(1, round(outs / wanted[0])) if wanted[0] else 1
        if [outs, ins] != [steps * one for one in wanted]:
            raise LMSError(
                f"TensorFlow's graph optimizers undid the plan: {outs} copies out and {ins} back ran of "
                f"{wanted[0]} and {wanted[1]} a step; report this with the model"
            )

    def _compare(self, model: Any) -> None:
        """If the process went over the limit, have the step traced anew, with what its operations need beside."""
        self._peak = self._resident.peak()
        limit = self.offload.options.limit
        if limit is None or not isinstance(self.offload.tier, FileTier) or self._peak <= limit:
            return
        self.offload.scratch += self._peak - limit
        print(
            f"lms: the step took {format_size(self._peak)}, because operations need memory beside their results: it is "
            f"planned again for {format_size(limit)}",
            file=sys.stderr,
        )
        model.make_train_function(force=True)
        self._peek(model)


def _take(iterator: Any, count: int) -> Sequence[Any]:
    """At most `count` elements."""
    batches = []
    for _ in range(count):
        try:
            batches.append(next(iterator))
        except (StopIteration, tf.errors.OutOfRangeError):
            break
    return batches
