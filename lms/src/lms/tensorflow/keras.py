"""`LMS`: the Keras callback."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from lms.errors import UsageError
from lms.tensorflow.decorator import Offload, offload
from lms.tensorflow.tiers import FileTier, usage


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
        self._times: list[float] = []  # seconds of each batch since the step was planned

    def stats(self) -> dict[str, int]:
        """Figures: bytes and counts of the last trace, and what the file tier of this process has done."""
        figures = dict(usage()) if isinstance(self.offload.tier, FileTier) else {}
        if self.offload.traces:
            last = self.offload.traces[-1]
            figures |= {name: getattr(last, name) for name in ("tensors", "swapped", "plain_peak", "predicted_peak")}
            figures |= {"variables": last.variables, "peak": self.offload.peak}
        return figures

    @property
    def step_time(self) -> float:
        """Median seconds of a batch but the first, which traces; 0.0 if there was none."""
        return statistics.median(self._times[1:]) if self._times[1:] else 0.0

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """Note the time."""
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Note how long it took."""
        self._times.append(time.perf_counter() - self._began)

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
        optimizer = model.optimizer
        if model.built and optimizer is not None and not optimizer.built:
            # Variables that the first step makes would put it into a branch: TensorFlow traces another for those after.
            with model.distribute_strategy.scope():
                optimizer.build(model.trainable_variables)
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
        train = model.train_function

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
            replicas = model.distribute_strategy.num_replicas_in_sync
            result, again = self.offload.watch(lambda: train(iterator), is_new=True, replicas=replicas)
            if again:
                model.make_train_function(force=True)
                self._peek(model)
            return result

        model.train_function = first


def _take(iterator: Any, count: int) -> Sequence[Any]:
    """At most `count` elements."""
    batches = []
    for _ in range(count):
        try:
            batches.append(next(iterator))
        except (StopIteration, tf.errors.OutOfRangeError):
            break
    return batches
