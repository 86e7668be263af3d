"""Logistic regression in NumPy on several ranks: each computes on its share of the batch, and all average gradients.

    .venv/bin/ddlrun -np 4 python examples/numpy_average/train.py

Rank 0 then trains once more, alone on the whole batches, and prints how far the losses are apart: by rounding only.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

import ddl

Array = NDArray[np.float64]


def data(samples: int, features: int) -> tuple[Array, Array]:
    """Points and their labels (0 or 1), the same on every rank: shapes (samples, features) and (samples,)."""
    random = np.random.default_rng(0)
    points = random.standard_normal((samples, features))
    truth = random.standard_normal(features)
    noise = random.logistic(size=samples)
    return points, (points @ truth + noise > 0).astype(np.float64)


def loss_and_gradient(weights: Array, points: Array, labels: Array) -> tuple[float, Array]:
    """The mean cross-entropy of the points, and its gradient by the weights."""
    scores = points @ weights
    loss = np.mean(np.logaddexp(0, scores) - labels * scores)
    return float(loss), points.T @ (1 / (1 + np.exp(-scores)) - labels) / len(labels)


def train(steps: int, batch: int, rank: int, size: int, average: Callable[[Array], Array]) -> list[float]:
    """The loss of each step, over the whole batch, of which this rank computes its share."""
    points, labels = data(samples=4096, features=50)
    weights = np.zeros(points.shape[1])
    losses = []
    for step in range(steps):
        chosen = np.arange(step * batch, (step + 1) * batch) % len(labels)
        share = chosen[rank::size]
        loss, gradient = loss_and_gradient(weights, points[share], labels[share])
        # One message for both: the loss is one more element.
        together = average(np.append(gradient, loss))
        weights -= 0.5 * together[:-1]
        losses.append(float(together[-1]))
    return losses


def main() -> None:
    """Train on all ranks, then on one, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=512, help="points a step, over all ranks")
    arguments = parser.parse_args()

    ddl.init()
    if arguments.batch % ddl.size() != 0:
        raise SystemExit(
            f"--batch {arguments.batch} must be a multiple of the {ddl.size()} ranks, which share it evenly"
        )
    losses = train(
        arguments.steps, arguments.batch, ddl.rank(), ddl.size(), lambda array: ddl.allreduce(array, op="average")
    )
    if ddl.rank() == 0:
        alone = train(arguments.steps, arguments.batch, 0, 1, lambda array: array)
        apart = max(abs(a - b) for a, b in zip(losses, alone, strict=True))
        hosts = "1 host" if ddl.num_hosts() == 1 else f"{ddl.num_hosts()} hosts"
        print(f"{ddl.size()} ranks on {hosts}: loss {losses[0]:.6f} -> {losses[-1]:.6f}")
        print(f"the same on one rank:  loss {alone[0]:.6f} -> {alone[-1]:.6f}, at most {apart:.1e} apart")
    ddl.finalize()


if __name__ == "__main__":
    main()
