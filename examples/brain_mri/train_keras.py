"""Train a 3D U-Net in Keras, on TensorFlow, to segment the same whole-brain MRI as train.py.

python examples/brain_mri/train_keras.py                              # 4 mm: a minute on two cores
python examples/brain_mri/train_keras.py --budget 35%                 # with LMS, by its callback
lms run --budget 20MB examples/brain_mri/train_keras.py                # the same, from outside
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow says what processor it was built for
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import tensorflow as tf
from data import CLASSES, FOLDER, RESOLUTIONS, DataError, load_arrays
from net_keras import unet


class Watch(keras.callbacks.Callback):  # type: ignore[misc]
    """Prints each step, and keeps losses and times in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """Note the time."""
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Print the step. Keras shows the mean of an epoch, which is one step here."""
        self.seconds.append(time.perf_counter() - self._began)
        self.losses.append(float(logs["loss"]))
        print(f"step {len(self.losses)} loss {self.losses[-1]!r} seconds {self.seconds[-1]:.2f}", flush=True)


def main() -> int:
    """Train as the command line says; returns the exit status."""
    args = _parse()
    keras.utils.set_random_seed(args.seed)
    try:
        volume = load_arrays(args.resolution, 2**args.depth, args.data)
    except DataError as error:
        print(f"train_keras.py: {error}", file=sys.stderr)
        return 1
    image, truth = volume.image[None, ..., None], volume.truth[None]
    model = unet(image.shape[1:], len(CLASSES), args.width, args.depth, batch=1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(args.lr), loss)
    watch = Watch()
    callbacks: list[Any] = [watch]
    managed = None
    if args.budget is not None or args.limit is not None:
        from lms.tensorflow import LMS

        managed = LMS(budget=args.budget, limit=args.limit)
        callbacks.insert(0, managed)
    data = tf.data.Dataset.from_tensors((image, truth))
    try:
        model.fit(data, epochs=args.steps, verbose=0, callbacks=callbacks)
    except tf.errors.ResourceExhaustedError as error:
        print(f"train_keras.py: out of memory: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    if args.json is not None:
        weights = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found = {"losses": watch.losses, "seconds": watch.seconds, "weights": weights, "peak": peak}
        args.json.write_text(json.dumps(found | {"lms": managed.stats() if managed is not None else None}))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resolution", type=int, choices=RESOLUTIONS, default=4, help="mm a voxel (default 4)")
    parser.add_argument("--width", type=int, default=16, help="channels at full resolution (default 16)")
    parser.add_argument("--depth", type=int, default=3, help="poolings (default 3)")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (default 10)")
    parser.add_argument("--lr", type=float, default=3e-3, help="Adam's learning rate (default 0.003)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default 0)")
    parser.add_argument("--data", type=Path, default=FOLDER, metavar="DIR", help="where the volume is kept")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write losses, times, the peak and LMS's figures")
    bound = parser.add_mutually_exclusive_group()
    bound.add_argument("--budget", help="train with LMS: bytes of tensors that may stay, or a share such as 35%%")
    bound.add_argument("--limit", help="train with LMS: most memory that the process may take, such as 1.5GB")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
