"""Make the workers of a Dask cluster ranks of DDL: they train one model under LMS, and Dask is their rendezvous.

pip install './lms[torch]' ./ddl distributed scikit-learn
python examples/recipes/dask_ranks.py                        two workers on this host
python examples/recipes/dask_ranks.py tcp://scheduler:8786   those of a cluster: dask worker --nworkers 1 --nthreads 1
"""

from __future__ import annotations

import sys
from uuid import uuid4

import torch
from distributed import Client, get_client
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import ddl
import lms


class Store:
    """What `ddl.init` finds the other ranks by: notes that Dask's scheduler keeps."""

    def __init__(self, job: str) -> None:
        self.job = job

    def set(self, key: str, value: bytes) -> None:
        """Leave a note."""
        get_client().set_metadata([self.job, key], value)

    def get(self, key: str) -> bytes | None:
        """Read it; None if nobody has left it yet."""
        found: bytes | None = get_client().get_metadata([self.job, key], None)
        return found


def train(job: str, rank: int, size: int) -> str:
    """One rank: its share of the digits, and gradients averaged over all ranks. A task of Dask."""
    ddl.init(store=Store(job), rank=rank, size=size)
    try:
        digits = load_digits()
        images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
        images, labels = images[rank::size], labels[rank::size]
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with lms.LMS(model, optimizer, limit="2GB") as session:
            for _ in range(20):
                loss = cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    ddl.allreduce(parameter.grad, op="average")  # in place
                optimizer.step()
            peak = session.stats()["peak"]
        norm = sum(float(parameter.detach().square().sum()) for parameter in model.parameters())
    finally:  # the worker lives on, and may be a rank of the next job
        ddl.finalize()
    return f"rank {rank} of {size}: loss {loss.item():.4f}, parameters {norm:.6f}, peak {peak:,} bytes"


def main() -> None:
    """Submit one task to each worker: a rank needs a process of its own."""
    here = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with Client(sys.argv[1]) if sys.argv[1:] else Client(**here) as client:
        workers = sorted(client.scheduler_info(n_workers=-1)["workers"])
        job = uuid4().hex
        tasks = [
            client.submit(train, job, rank, len(workers), workers=[worker], pure=False)
            for rank, worker in enumerate(workers)
        ]
        print(*client.gather(tasks), sep="\n")


if __name__ == "__main__":
    main()
