"""Train on handwritten digits by Horovod's names over DDL.

    .venv/bin/ddlrun -np 4 python examples/ddp_digits/train_horovod.py

A script for Horovod, but for one line: the import.
"""

from __future__ import annotations

import digits
import torch

import ddl.horovod.torch as hvd


def main() -> None:
    """Train on all ranks, then on one, and compare."""
    options = digits.parser_of("Train on handwritten digits by Horovod's names over DDL.").parse_args()
    hvd.init()
    # Every rank begins with numbers of its own, and gets rank 0's.
    model = digits.net(seed=digits.SEED + hvd.rank())
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    share, sampler = digits.batches(digits.data()[0], options.batch, hvd.rank(), hvd.size())

    losses = []
    for number in range(options.epochs):
        sampler.set_epoch(number)
        loss = hvd.allreduce(digits.epoch(model, optimizer, share), name="loss")
        losses.append(float(loss))
        if hvd.rank() == 0:
            print(f"epoch {number + 1}: loss {losses[-1]:.6f}", flush=True)

    prints = hvd.allgather_object(digits.fingerprint(model))
    if hvd.rank() == 0:
        digits.report(hvd.size(), losses, model, prints, options)
    hvd.shutdown()


if __name__ == "__main__":
    main()
