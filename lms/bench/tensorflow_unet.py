"""A U-Net in Keras on the processor, plain and with LMS: resident peak above the state after tracing, and step times.

Run it in the environment of `make test-tensorflow`:
out/tensorflow/bin/python lms/bench/tensorflow_unet.py [BUDGET | limit=SIZE ...]
Each variant runs in a process of its own; `plain` is one of them. With TF_MKL_ALLOC_MAX_BYTES set, oneDNN's pool is
capped, and a variant that dies says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "brain_mri"))  # the net


def train(variant: str, side: int, width: int, depth: int, batch: int, steps: int) -> dict[str, Any]:
    """Train for `steps` steps after the first; sizes in bytes, times in seconds."""
    import keras
    import numpy as np
    import tensorflow as tf
    from net_keras import unet

    from lms.memory.resident import ResidentSet
    from lms.tensorflow import LMS

    keras.utils.set_random_seed(1)
    net = unet((side, side, 3), 2, width, depth, batch)
    resident = ResidentSet()
    base = 0

    class Traced(keras.Model):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            nonlocal base
            result = super().train_step(data)
            base = base or resident.current()
            return result

    model = Traced(net.inputs, net.outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(), loss, jit_compile=False)
    times: list[float] = []
    losses: list[float] = []

    class Watch(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
            self.began = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            times.append(time.perf_counter() - self.began)
            losses.append(logs["loss"])

    generator = np.random.default_rng(0)
    data = tf.data.Dataset.from_tensors(
        (generator.normal(size=(batch, side, side, 3)).astype("f4"), generator.integers(0, 2, (batch, side, side)))
    ).repeat()
    callbacks: list[Any] = [Watch()]
    if variant != "plain":
        name, _, bound = variant.rpartition("=")
        callbacks.insert(0, LMS(**{name or "budget": bound}))
    model.optimizer.build(model.trainable_variables)
    try:
        model.fit(data, steps_per_epoch=steps + 1, epochs=1, verbose=0, callbacks=callbacks)
    except tf.errors.ResourceExhaustedError as error:
        return {"variant": variant, "died": str(error).splitlines()[0][:120]}
    found = {
        "variant": variant,
        "base": base,
        "above": resident.peak() - base,
        "peak": resident.peak(),
        "step": statistics.median(times[1:]),
        "losses": losses,
    }
    if variant != "plain":
        traced = callbacks[0].offload.traces[-1]
        found |= {"swapped": traced.swapped, "bytes": traced.swapped_bytes, "planning": traced.seconds}
        found |= {"operations": traced.operations, "predicted": traced.predicted_peak}
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("budgets", nargs="*", default=["35%", "0%"])
    parser.add_argument("--side", type=int, default=128)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    size = (args.side, args.width, args.depth, args.batch, args.steps)
    if args.one:
        print(json.dumps(train(args.one, *size)))
        return
    for variant in ("plain", *args.budgets):
        run = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--one", variant], capture_output=True, text=True, check=False
        )
        lines = run.stdout.splitlines()
        print(lines[-1] if run.returncode == 0 and lines else f"{variant}: died with status {run.returncode}")


if __name__ == "__main__":
    main()
