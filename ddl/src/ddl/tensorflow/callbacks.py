"""Callbacks for `fit`: what ranks have in common before, while and after they train."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from ddl.errors import MismatchError, UnsupportedError
from ddl.tensorflow.objects import allgather_object, broadcast_variables
from ddl.tensorflow.optimizer import Distributed, check_same
from ddl.tensorflow.process_sets import global_process_set, rank, size

Logs = dict[str, Any] | None


class DDLGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Gives every rank the model's and the optimizer's variables of `root_rank`.

    When training begins, or after the first batch if the model has no variables before. `local_variables` are left out.
    Raises MismatchError if the ranks' models differ.
    """

    def __init__(self, root_rank: int = 0, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self._root = root_rank
        given = local_variables if isinstance(local_variables, list | tuple) else [local_variables]
        self._local = [variable for variable in given if variable is not None]
        self._done = False

    def register_local_var(self, variable: Any) -> None:
        """Leave a variable as it is."""
        self._local.append(variable)

    def on_train_begin(self, logs: Logs = None) -> None:
        """Broadcast, if there is a model."""
        if not self._done and self.model.built:
            optimizer = self.model.optimizer
            if optimizer is not None and not optimizer.built:
                # One rank may have loaded its optimizer: then the others need the same variables.
                optimizer.build(self.model.trainable_variables)
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Broadcast, if that was not done yet."""
        if not self._done:
            self._broadcast()

    def _broadcast(self) -> None:
        optimizer = self.model.optimizer
        variables = [*self.model.variables, *(optimizer.variables if optimizer is not None else ())]
        shared = [its for its in variables if not any(its is other for other in self._local)]
        check_same(shared, global_process_set)
        broadcast_variables(shared, self._root)
        self._done = True


BroadcastGlobalVariablesCallback = DDLGlobalVariablesCallback


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Averages the metrics of an epoch over all ranks. Stands before callbacks that read them."""

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Replace the metrics by their averages. Raises MismatchError if ranks have different ones."""
        if logs is None:
            return
        mine = {name: np.asarray(value, np.float64) for name, value in sorted(logs.items())}
        every = allgather_object(mine)
        for number, its in enumerate(every):
            if its.keys() != every[0].keys():
                raise MismatchError(
                    f"epoch {epoch + 1}: rank 0 has the metrics {', '.join(every[0])}, but rank {number} has "
                    f"{', '.join(its)}: compile the same model on every rank, and give all or none validation data"
                )
        for name, value in mine.items():
            mean = np.mean([its[name] for its in every], axis=0)
            logs[name] = mean if value.ndim else float(mean)


class DDLCallback(MetricAverageCallback):
    """What a job needs beside its optimizer; the first callback.

    Averages metrics over all ranks. Checks that every rank has as many batches, and warns if all have the same data.
    Switches XLA off, which cannot compile DDL's operations.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__(device)
        self._looks = True

    def on_train_begin(self, logs: Logs = None) -> None:
        """Check what can be checked before. Raises MismatchError and UnsupportedError."""
        model, optimizer = self.model, self.model.optimizer
        inner = getattr(optimizer, "inner_optimizer", None)
        if isinstance(inner, Distributed):
            raise UnsupportedError(
                "a LossScaleOptimizer is around the DistributedOptimizer, so each rank would decide alone whether to "
                "step: pass DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
            )
        steps = allgather_object((self.params or {}).get("steps"))
        for number, its in enumerate(steps):
            if its != steps[0]:
                raise MismatchError(
                    f"rank 0 has {steps[0]} batches an epoch, but rank {number} has {its}: every rank must take as "
                    "many steps; ddl.shard gives each as much data, or set steps_per_epoch"
                )
        if model.jit_compile:
            if rank() == 0:
                print("ddl: XLA is off for this model (jit_compile): it has no DDL", file=sys.stderr)
            model.jit_compile = False
            model.make_train_function(force=True)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Compare the ranks' first losses."""
        if not self._looks:
            return
        self._looks = False
        losses = allgather_object(float((logs or {}).get("loss", 0)))
        if size() > 1 and losses[0] > 0 and len(set(losses)) == 1 and rank() == 0:
            print(
                f"ddl: all {size()} ranks have the same loss in the first batch, so they seem to have the same data: "
                "give each its share with ddl.shard",
                file=sys.stderr,
            )


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to `initial_lr` times `multiplier`: of the epoch, or a factor for each further epoch.

    From `start_epoch` to before `end_epoch`; once an epoch, or, without `staircase`, each batch, as a part of
    `steps_per_epoch`. With `momentum_correction` the optimizer's velocities change as its learning rate does (Goyal et
    al., arXiv:1706.02677, section 2.1). The epoch's logs get the rate as "lr".
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self._initial, self._momentum_correction = initial_lr, momentum_correction
        self._start, self._end, self._staircase = start_epoch, end_epoch, staircase
        self.steps_per_epoch = steps_per_epoch
        if callable(multiplier):
            self._multiplier = multiplier
        else:
            factor = multiplier
            self._multiplier = lambda epoch: factor ** (epoch - start_epoch)
        self._epoch = 0

    def on_train_begin(self, logs: Logs = None) -> None:
        """Find the number of batches. Raises ValueError if it is needed and not known."""
        if not self._staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ValueError(f"{type(self).__name__}: the number of batches is not known: give steps_per_epoch")

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Note the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Set the learning rate."""
        if self._epoch < self._start or (self._end is not None and self._epoch >= self._end):
            return
        if self._staircase and batch == 0:
            self._set(self._initial * self._multiplier(self._epoch))
        elif not self._staircase:
            assert self.steps_per_epoch is not None
            self._set(self._initial * self._multiplier(self._epoch + batch / self.steps_per_epoch))

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Log the learning rate."""
        if logs is not None:
            logs["lr"] = _rate(self.model.optimizer)

    def _set(self, value: float) -> None:
        optimizer = self.model.optimizer
        old = _rate(optimizer)
        optimizer.learning_rate = value
        plain = getattr(optimizer, "inner_optimizer", optimizer)
        if self._momentum_correction and old > 0 and value != old and getattr(plain, "momentum", None):
            velocities: Iterable[Any] = getattr(plain, "momentums", None) or getattr(plain, "_momentums", None) or ()
            for velocity in velocities:
                velocity.assign(velocity * (value / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr` / size() to `initial_lr`, batch by batch, over `warmup_epochs`."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            epoch += 1 / self.steps_per_epoch  # round numbers at the ends of epochs
            return (epoch * (size() - 1) / warmup_epochs + 1) / size()

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self._verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Log the learning rate; after the last epoch say that it has arrived."""
        super().on_epoch_end(epoch, logs)
        if self._end is not None and epoch == self._end - 1 and self._verbose > 0 and rank() == 0:
            print(f"\nEpoch {epoch + 1}: the learning rate has risen to {_rate(self.model.optimizer):g}")


def _rate(optimizer: Any) -> float:
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))
