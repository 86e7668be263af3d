"""A rank of torch's gloo for `ddlrun bench`; csrc/bench/allreduce.cc describes the protocol."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from ddl.bench.controller import TOKEN
from ddl.launch import guard


def main(contacts: str) -> None:
    """Join the group of the environment (RANK, MASTER_ADDR, ...) and serve the controller until it hangs up."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    connection = guard.connect(contacts.split(","))
    if connection is None:
        raise OSError(f"the controller at {contacts} cannot be reached: nothing answers there")
    with connection, connection.makefile("rw") as controller:
        print(os.environ[TOKEN], rank, size, file=controller, flush=True)
        tensor = torch.empty(0)
        for line in controller:
            word, *numbers = line.split()
            count = int(numbers[0]) // 4
            if word == "check":
                print(check(rank, size, count), file=controller, flush=True)
                continue
            if tensor.numel() != count:
                tensor = torch.zeros(count)  # in place: anything else would grow without bound
            print(timed(tensor, int(numbers[1])), file=controller, flush=True)
    dist.destroy_process_group()


def timed(tensor: torch.Tensor, repeats: int) -> str:
    """The answer with the seconds of `repeats` allreduces after a barrier."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(tensor)
    took = time.perf_counter() - start
    dist.barrier()
    return f"took {took:.9f}"


def check(rank: int, size: int, count: int) -> str:
    """An allreduce with a known sum: the answer with its time, or "wrong" and the element."""
    steps = torch.arange(count) % 17
    tensor = (steps + rank % 13).float()
    answer = timed(tensor, 1)
    wrong = tensor != (size * steps + sum(one % 13 for one in range(size))).float()
    return answer if not wrong.any() else f"wrong: element {int(wrong.nonzero()[0])}"


if __name__ == "__main__":
    main(*sys.argv[1:])
