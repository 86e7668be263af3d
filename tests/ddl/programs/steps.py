"""What the programs have in common in which ranks die or join: a death, and data whose sums are exact."""

import os
import time

import numpy as np

COUNT = 20_000


def die() -> None:
    """Without a word to the others."""
    print(f"death at {time.monotonic()}", flush=True)
    os.kill(os.getpid(), 9)


def data_of(who: int, step: int) -> np.ndarray:
    """What a rank brings to a step: small whole numbers, whose sums are exact."""
    return np.arange(COUNT, dtype=np.float64) % 1000 + 31 * who + step
