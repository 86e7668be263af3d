"""One cell of the benchmark: a process that trains one model in one way, a step whenever it is told to.

It is started with a JSON configuration and reads one JSON command a line: {"do": "step"} or {"do": "end"}. Each gets
one line of JSON back. It computes only between a command and its answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import time
from contextlib import AbstractContextManager, nullcontext

import allocators
import torch
from models import Job, build, checkpoint_blocks

from lms.memory.resident import ResidentSet


class Memory:
    """The most bytes the device held since `reset`: the process's resident set, or what CUDA's allocator gave out."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.name = "allocated bytes (torch.cuda.max_memory_allocated)" if self.cuda else "resident set (VmHWM)"
        self._resident = ResidentSet()
        self._before = 0  # the most that was seen before somebody else began the measurement anew

    def notice(self) -> None:
        """Take the peak so far into account before it is lost."""
        self._before = max(self._before, self._current())

    def reset(self) -> None:
        """Begin anew."""
        self._before = 0
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            self._resident.reset_peak()

    def peak(self) -> int:
        """Bytes."""
        return max(self._before, self._current())

    def _current(self) -> int:
        return torch.cuda.max_memory_allocated() if self.cuda else self._resident.peak()


def digest(model: torch.nn.Module) -> str:
    """One hash of every gradient's bits, in the order of the parameters."""
    total = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        total.update(name.encode())
        if parameter.grad is not None:
            total.update(parameter.grad.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return total.hexdigest()


def step(job: Job, optimizer: torch.optim.Optimizer, memory: Memory) -> dict[str, object]:
    """One training step, and what it took."""
    memory.reset()
    before = resource.getrusage(resource.RUSAGE_SELF)
    cpu, start = time.process_time(), time.perf_counter()
    optimizer.zero_grad()
    loss = job.loss()
    loss.backward()
    optimizer.step()
    value = loss.item()  # on a GPU this waits for everything queued
    del loss
    if memory.cuda:
        torch.cuda.synchronize()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = memory.peak()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": seconds,
        "cpu": cpu,
        "loss": float(value).hex(),
        "peak": peak,
        "minor_faults": after.ru_minflt - before.ru_minflt,
        "major_faults": after.ru_majflt - before.ru_majflt,
        "digest": digest(job.model),
    }


def main() -> None:
    """Answer commands until the input ends."""
    # Answers go to the original stdout; all other output goes to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    config = json.loads(sys.argv[1])
    allocators.enter(config["kind"])
    device = torch.device(config["device"])
    torch.set_num_threads(config["threads"])
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS may give other bits each time
        torch.use_deterministic_algorithms(True, warn_only=True)
    job = build(config["model"], config["size"], device)
    if config["kind"] == "checkpoint":
        checkpoint_blocks(job)
    optimizer = torch.optim.SGD(job.model.parameters(), lr=1e-4, momentum=0.9)
    memory = Memory(device)
    if config["kind"] == "lms":
        from sessions import before_reset, describe, forecast

        from lms import Session

        opening: AbstractContextManager[Session | None] = Session(
            job.model, optimizer, budget=config["budget"], spill_dir=config["spill_dir"]
        )
    else:
        opening = nullcontext()
    with opening as session:
        if session is not None:
            before_reset(session, memory.notice)
        print(json.dumps({"memory": memory.name}), file=answers)
        for line in sys.stdin:
            if json.loads(line)["do"] != "step":
                break
            told = forecast(session) if session is not None else {}
            answer = step(job, optimizer, memory)
            if session is not None:
                answer |= {"session": describe(session), "forecast": told}
            print(json.dumps(answer), file=answers)
    print(json.dumps({"end": True}), file=answers)


if __name__ == "__main__":
    main()
