"""The training of train.py, which goes on when ranks die, and takes in others: from the step that the ranks agree on.

    export MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
    for rank in 0 1 2 3; do
        RANK=$rank WORLD_SIZE=4 .venv/bin/python examples/numpy_average/survivors.py --die 50:0 --die 120:2 --ranks 3 &
    done
    .venv/bin/python examples/numpy_average/survivors.py --join; wait

kills rank 0 at step 50 and rank 2 at step 120; a fifth process joins meanwhile, and with `--ranks 3` the others wait
for it at their last step. The first of those that are left then trains once more, alone, and prints how far the losses
are apart: by rounding only, as each step's batch is shared among those that are there.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from dataclasses import dataclass, field

import numpy as np
from train import Array, data, loss_and_gradient

import ddl

FEATURES, NONE = 50, 1 << 30


@dataclass
class State:
    """What a rank knows of the training, if it has not just joined."""

    weights: Array = field(default_factory=lambda: np.zeros(FEATURES))
    before: Array = field(default_factory=lambda: np.zeros(FEATURES))  #: the weights at the last step
    losses: list[float] = field(default_factory=list)  #: of each step so far
    is_known: bool = True


def settle(state: State) -> None:
    """All ranks of an epoch go on from one step. Survivors are at most one step apart; rank 0 is one of them."""
    while True:
        try:
            step = len(state.losses) if state.is_known else NONE
            agreed = int(ddl.allreduce(np.array([step]), op="min")[0])
            if agreed == NONE:
                raise SystemExit("nobody is left who knows the weights: start from a checkpoint")
            if step == agreed + 1:  # this rank has got the last step's result, and others have not
                state.weights, state.losses = state.before, state.losses[:-1]
            state.weights = ddl.broadcast(state.weights.copy(), root=0)
            losses = np.array(state.losses) if step != NONE else np.zeros(agreed)
            state.losses = ddl.broadcast(losses, root=0).tolist()
            state.is_known = True
        except ddl.PeerLostError:  # another one has died
            ddl.resize()
            continue
        if ddl.rank() == 0:
            print(f"epoch {ddl.epoch()}: {ddl.size()} ranks go on from step {agreed}", flush=True)
        return


def train(state: State, steps: int, batch: int, ranks: int, dies_at: int | None) -> None:
    """Add the loss of each step, over the whole batch, of which this rank computes its share."""
    points, labels = data(samples=4096, features=FEATURES)
    while (step := len(state.losses)) < steps:
        if step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            waiting = int(ddl.allreduce(np.array([ddl.waiting()]), op="max")[0])
            if waiting == 0 and step == steps - 1 and ddl.size() < ranks:
                time.sleep(0.01)
                continue
            if waiting == 0:
                chosen = np.arange(step * batch, (step + 1) * batch) % len(labels)
                share = chosen[ddl.rank() :: ddl.size()]
                loss, gradient = loss_and_gradient(state.weights, points[share], labels[share])
                together: Array = np.append(gradient, loss) * (len(share) / batch)
                ddl.allreduce(together)
                state.before, state.weights = state.weights, state.weights - 0.5 * together[:-1]
                state.losses.append(float(together[-1]))
                continue
        except ddl.PeerLostError:
            pass
        ddl.resize()
        settle(state)


def alone(steps: int, batch: int) -> list[float]:
    """The same on one rank."""
    points, labels = data(samples=4096, features=FEATURES)
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
    parser.add_argument("--ranks", type=int, default=1, help="wait at the last step until there are so many ranks")
    parser.add_argument("--join", action="store_true", help="join a training that runs")
    arguments = parser.parse_args()

    deaths = {int(rank): int(step) for step, rank in (word.split(":") for word in arguments.die)}
    state = State(is_known=not arguments.join)
    if arguments.join:
        ddl.join()
        settle(state)
    else:
        ddl.init()
    dies_at = None if arguments.join else deaths.get(ddl.rank())
    train(state, arguments.steps, arguments.batch, arguments.ranks, dies_at)
    losses = state.losses
    if ddl.rank() == 0:
        apart = max(abs(a - b) for a, b in zip(losses, alone(arguments.steps, arguments.batch), strict=True))
        print(f"{ddl.size()} ranks are left: loss {losses[0]:.6f} -> {losses[-1]:.6f}")
        print(f"on one rank the same, at most {apart:.1e} apart")
    ddl.finalize()


if __name__ == "__main__":
    main()
