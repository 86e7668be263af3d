"""The training of train.py, which goes on when ranks die: from the step that the survivors agree on.

    for rank in 0 1 2 3; do
        RANK=$rank WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \
            .venv/bin/python examples/numpy_average/survivors.py --die 50:0 --die 120:2 &
    done; wait

kills rank 0 at step 50 and rank 2 at step 120. The first of the survivors then trains once more, alone, and prints how
far the losses are apart: by rounding only, as each step's batch is shared among those that are there.
"""

from __future__ import annotations

import argparse
import os
import signal

import numpy as np
from train import Array, data, loss_and_gradient

import ddl


def agree(step: int) -> int:
    """Go on without the dead; returns the step from which. Survivors are at most one step apart."""
    while True:
        epoch = ddl.shrink()
        try:
            agreed = int(ddl.allreduce(np.array([step]), op="min")[0])
        except ddl.PeerLostError:  # another one has died
            continue
        if epoch.rank == 0:
            print(f"epoch {epoch.number}: without {list(epoch.gone)}, {epoch.size} ranks go on from step {agreed}")
        return agreed


def train(steps: int, batch: int, dies_at: int | None) -> list[float]:
    """The loss of each step, over the whole batch, of which this rank computes its share."""
    points, labels = data(samples=4096, features=50)
    weights = before = np.zeros(points.shape[1])  # at this step, and at the last one
    losses: list[float] = []
    while (step := len(losses)) < steps:
        if step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        chosen = np.arange(step * batch, (step + 1) * batch) % len(labels)
        share = chosen[ddl.rank() :: ddl.size()]
        loss, gradient = loss_and_gradient(weights, points[share], labels[share])
        together: Array = np.append(gradient, loss) * (len(share) / batch)
        try:
            ddl.allreduce(together)
        except ddl.PeerLostError:
            if agree(step) < step:  # this rank has got the last step's result, and others have not
                weights = before
                losses.pop()
            continue
        before, weights = weights, weights - 0.5 * together[:-1]
        losses.append(float(together[-1]))
    return losses


def alone(steps: int, batch: int) -> list[float]:
    """The same on one rank."""
    points, labels = data(samples=4096, features=50)
    weights = np.zeros(points.shape[1])
    losses = []
    for step in range(steps):
        chosen = np.arange(step * batch, (step + 1) * batch) % len(labels)
        loss, gradient = loss_and_gradient(weights, points[chosen], labels[chosen])
        weights = weights - 0.5 * gradient
        losses.append(loss)
    return losses


def main() -> None:
    """Train with whoever is left, then on one rank, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=512, help="points a step, over all ranks")
    parser.add_argument("--die", metavar="STEP:RANK", action="append", default=[], help="this rank dies at this step")
    arguments = parser.parse_args()

    ddl.init()
    deaths = {int(rank): int(step) for step, rank in (word.split(":") for word in arguments.die)}
    losses = train(arguments.steps, arguments.batch, deaths.get(ddl.rank()))
    if ddl.rank() == 0:
        apart = max(abs(a - b) for a, b in zip(losses, alone(arguments.steps, arguments.batch), strict=True))
        print(f"{ddl.size()} ranks are left: loss {losses[0]:.6f} -> {losses[-1]:.6f}")
        print(f"on one rank the same, at most {apart:.1e} apart")
    ddl.finalize()


if __name__ == "__main__":
    main()
