"""Train on handwritten digits with DistributedDataParallel over DDL.

    .venv/bin/ddlrun -np 4 python examples/ddp_digits/train.py

Written as for torchrun, which starts it with `--backend gloo`: the name of the backend is all that differs. With
--checkpoint FILE it goes on where it was ended: `ddlrun --restarts 1` then outlives a rank that dies.
"""

from __future__ import annotations

import os

import digits
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train on all ranks, then on one, and compare."""
    parser = digits.parser_of("Train on handwritten digits with DistributedDataParallel over DDL.")
    parser.add_argument("--checkpoint", help="a file to go on from, written after each epoch")
    parser.add_argument("--backend", default="ddl", help="of torch.distributed (default ddl)")
    options = parser.parse_args()
    dist.init_process_group(options.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(digits.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    share, sampler = digits.batches(digits.data()[0], options.batch, rank, size)

    first = 0
    if options.checkpoint and os.path.exists(options.checkpoint):
        state = torch.load(options.checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epochs"]
        if rank == 0:
            print(f"going on after epoch {first}", flush=True)
    losses = []
    for number in range(first, options.epochs):
        sampler.set_epoch(number)
        loss = digits.epoch(model, optimizer, share)
        dist.all_reduce(loss)  # gloo has no average
        losses.append(float(loss) / size)
        if rank == 0:
            print(f"epoch {number + 1}: loss {losses[-1]:.6f}", flush=True)
        if options.checkpoint and rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": number + 1}
            torch.save(state, f"{options.checkpoint}.new")
            os.replace(f"{options.checkpoint}.new", options.checkpoint)

    prints: list[str] = [""] * size
    dist.all_gather_object(prints, digits.fingerprint(model))
    if rank == 0 and losses:
        digits.report(size, losses, model.module, prints, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
