"""`LMS`: the Keras callback."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from lms.errors import LMSError, UsageError
from lms.tensorflow.decorator import Offload, offload
from lms.tensorflow.tiers import FileTier, usage

_KEPT = "_lms_train_function"  # an attribute of a model


class LMS(keras.callbacks.Callback):  # type: ignore[misc]
    """Large model support for `model.fit`: `callbacks=[LMS(limit="12GB")]`. Takes what `offload` takes.

    Raises UsageError when training begins if the model runs eagerly, is compiled by XLA on request or does not run on
    TensorFlow; LimitError for a limit below the floor; LMSError after the first step if TensorFlow's optimizers undid
    the plan. If the first step goes over the limit, the next ones are planned with what it needed beside.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.offload: Offload = offload(**options)
        self._options = options
        self._edited: _Edited
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
        """Announce the step, and note the time."""
        self._edited.announce()
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Note how long it took."""
        self._times.append(time.perf_counter() - self._began)

    def on_train_begin(self, logs: object = None) -> None:
        """Put LMS's train function in place of the model's own: that of the fit before, if it still fits."""
        model = self.model
        if keras.backend.backend() != "tensorflow":
            raise UsageError(f"Keras runs on {keras.backend.backend()}; set KERAS_BACKEND=tensorflow")
        left = getattr(model.train_step, "__self__", None)
        if isinstance(left, _Edited):  # a fit before has raised
            left.put_back()
        if model.run_eagerly:
            raise UsageError("run_eagerly=True: there is no graph to edit; compile the model with run_eagerly=False")
        if model.get_compile_config().get("jit_compile") is True:
            raise UsageError("jit_compile=True: XLA has its own schedule; compile the model with jit_compile=False")
        kept = model.__dict__.get(_KEPT)
        # If Keras is to trace the step again, after compile for example, the model has a new function of its own.
        if kept is None or kept.plain is not model.train_function or kept.options != self._options:
            kept = _Edited(model, self.offload, self._options)
        self._edited, self.offload = kept, kept.offload
        kept.put_in()

    def on_train_end(self, logs: object = None) -> None:
        """Leave the model as it was."""
        model, edited = self.model, self._edited
        model.train_function = edited
        edited.put_back()
        if edited.is_announced:  # a callback had Keras trace the step in this fit, so that function may have copies
            model.train_function = None


class _Edited:
    """The train function of a model, with LMS.

    It stands in place of the model's own, `plain`, while a fit with the callback runs. The model keeps it for the next
    such fit, as Keras keeps its own, so that random operations continue their sequence.
    """

    def __init__(self, model: Any, ours: Offload, options: dict[str, Any]) -> None:
        self.model, self.offload, self.options = model, ours, options
        self.plain = model.train_function
        self._train: Any = None
        self.is_announced = False  # the callback has seen the batch of the fit's next call begin
        self._runs = False
        self._is_watched = False  # whether the next call is to be measured

    def put_in(self) -> None:
        """Have the fit that begins call this."""
        model = self.model
        self._jit, self._own = model.jit_compile, model.__dict__.get("train_step")
        if model.jit_compile:
            print("lms: XLA is off for this model (jit_compile): it has a schedule of its own", file=sys.stderr)
            model.jit_compile = False
        optimizer = model.optimizer
        if model.built and optimizer is not None and not optimizer.built:
            # Variables that the first step makes would put it into a branch: TensorFlow traces another for those after.
            with model.distribute_strategy.scope():
                optimizer.build(model.trainable_variables)
        self._plain_step = model.train_step
        self._step_with_copies = self.offload(model.train_step)
        model.train_step = self._step
        model.train_function = self
        if self._train is None:
            self._make()
        self._is_watched = True

    def put_back(self) -> None:
        """Leave the model as it was, but for what compile has set since."""
        model = self.model
        model.__dict__.pop("train_step", None)
        if self._own is not None:
            model.train_step = self._own
        if model.train_function is self:
            model.train_function, model.jit_compile = self.plain, self._jit

    def announce(self) -> None:
        """Say that the callback is in the fit that makes the next call."""
        self.is_announced = True
        if self.model.train_function is self.plain:  # another call came in between
            self.put_in()

    def __call__(self, iterator: Any) -> Any:
        """Take a step."""
        is_in_fit = isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator))  # not in train_on_batch
        if is_in_fit and not self.is_announced:  # a fit with the callback has raised, and this one has none
            self.put_back()
            return self.plain(iterator)
        if is_in_fit:
            self.is_announced = False
        self._runs = True
        try:
            if not self._is_watched:
                return self._train(iterator)
            result, again = self._watched(iterator)
            self._is_watched = again or not is_in_fit  # each of the two has a trace of its own
            return result
        finally:
            self._runs = False

    def _step(self, data: Any) -> Any:
        # A model that is compiled after its fit has raised still has this, and makes a train function of it.
        return (self._step_with_copies if self._runs else self._plain_step)(data)

    def _make(self) -> None:
        model = self.model
        there = model.train_function  # another callback may have put its own around this
        model.make_train_function(force=True)
        self._train, model.train_function = model.train_function, there

    def _watched(self, iterator: Any) -> tuple[Any, bool]:
        """Take a step and measure it. Returns its result, and whether it is to be traced again.

        Its first batch is looked at before, because tracing may not know the size.
        """
        model = self.model
        if isinstance(iterator, tf.data.Iterator):
            batches = _take(iterator, model.steps_per_execution)
            if batches:
                self.offload.first_batch = [
                    one.shape for one in tf.nest.flatten(batches[0], expand_composites=True) if tf.is_tensor(one)
                ]
            spec = iterator.element_spec
            iterator = iter(tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec))
        replicas = model.distribute_strategy.num_replicas_in_sync
        try:
            result, again = self.offload.watch(lambda: self._train(iterator), is_new=True, replicas=replicas)
        except LMSError:
            model.__dict__.pop(_KEPT, None)  # so that the next fit tries again, and raises again
            raise
        if again:
            self._make()
        model.__dict__[_KEPT] = self
        return result, again


def _take(iterator: Any, count: int) -> Sequence[Any]:
    """At most `count` elements."""
    batches = []
    for _ in range(count):
        try:
            batches.append(next(iterator))
        except (StopIteration, tf.errors.OutOfRangeError):
            break
    return batches
