"""Time a small allreduce over each way to libddl, and over gloo, in turns within one job.

    ddlrun -np 2 python ddl/bench/calls.py [--json FILE]

On one rank nothing is waited for, so only the time of the way itself is left, even on a busy machine.

A way's figure is the median over rounds of each round's median over calls, on rank 0. A call ends when its result is
there; asynchronous calls are waited for. The extra cost of the Python backend over the C++ backend is the median over
rounds of their difference within a round.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

import machine
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import ddl
from ddl import library
from ddl.bench.contest import order
from ddl.torch.fast_path import VARIABLE, choose

MOST = 30e-6  # seconds by which the Python backend may exceed the C++ backend
LIBRARY, NUMPY, CPP, PYTHON, GLOO = "libddl", "ddl.allreduce", "C++", "Python", "gloo"
LATER = " at once"  # the asynchronous form

Ways = dict[str, Callable[[], object]]


def ways(nbytes: int) -> Ways:
    """The ways, by name; each reduces `nbytes` of float32."""
    array, tensor = np.zeros(nbytes // 4, np.float32), torch.zeros(nbytes // 4)
    libddl, where = library.load(), array.ctypes.data
    found: Ways = {
        LIBRARY: lambda: libddl.ddl_allreduce(where, where, len(array), 2, 0, None),
        NUMPY: lambda: ddl.allreduce(array),
    }
    groups = {PYTHON: group_of("python"), CPP: group_of("native"), GLOO: dist.new_group(backend="gloo")}
    for name, group in groups.items():
        if group is not None:
            found[name] = _reduced(tensor, group)
            found[name + LATER] = _reduced_later(tensor, group)
    return found


def group_of(kind: str) -> dist.ProcessGroup | None:
    """A process group of all ranks over one of our backends; None if it was not compiled."""
    if kind == "native" and choose({}).native is None:
        return None
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = kind
    try:
        made: dist.ProcessGroup = dist.new_group()
        return made
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def _reduced(tensor: Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    return lambda: dist.all_reduce(tensor, group=group)


def _reduced_later(tensor: Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    def call() -> None:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        work.wait()

    return call


def timed(call: Callable[[], object], calls: int) -> float:
    """The median seconds of a call."""
    for _ in range(3):
        call()
    ddl.barrier()
    taken = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return median(taken)


def turns(found: Ways, rounds: int, calls: int) -> dict[str, list[float]]:
    """Each way's seconds in each round; the ways take turns, in another order each round."""
    names = list(found)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for at in range(rounds):
        for place in order(len(names), at):
            seconds[names[place]].append(timed(found[names[place]], calls))
    return seconds


def report(seconds: Mapping[str, Sequence[float]], nbytes: int) -> list[str]:
    """The table, and the verdict."""
    said = [f"allreduce of {nbytes} bytes, ranks: {dist.get_world_size()}; median microseconds a call"]
    said += [f"  {name:18}{1e6 * median(taken):9.1f}" for name, taken in seconds.items()]
    if CPP not in seconds:
        return [*said, f"no backend in C++: {choose({}).reason}"]
    more = median(ours - its for ours, its in zip(seconds[PYTHON], seconds[CPP], strict=True))
    verdict = "reached" if more <= MOST else "MISSED"
    return [*said, f"Python over C++: {1e6 * more:.1f}, at most {1e6 * MOST:.0f}: {verdict}"]


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="time small allreduces over each way to libddl, and over gloo")
    parser.add_argument("--bytes", type=int, default=1024, help="of each allreduce, a multiple of 4")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=200, help="of each way in each round")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    dist.init_process_group("ddl")
    seconds = turns(ways(args.bytes), args.rounds, args.calls)
    if dist.get_rank() == 0:
        print("\n".join(report(seconds, args.bytes)), flush=True)
        if args.json:
            record = {"ranks": dist.get_world_size(), "bytes": args.bytes, "calls": args.calls, "seconds": seconds}
            machine.write(args.json, record)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
