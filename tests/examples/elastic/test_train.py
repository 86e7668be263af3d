"""The elastic example under the agents of torchrun: a node goes and comes back, and the training is the same."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from testbed import Testbed, cluster, running

ROOT = Path(__file__).parents[3]
STEP = re.compile(r"step (\d+): loss=(\S+), (\d) ranks")
STEPS = 100


def agent(bed: Testbed, host: str, nodes: str, checkpoint: Path, backend: str, *more: str) -> subprocess.Popen[str]:
    """A node: an agent of torchrun with one rank, on a host of the virtual cluster."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "1"]
    torchrun += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "h0:29777", "--rdzv-id", "job"]
    torchrun += ["--rdzv-conf", "last_call_timeout=1", "--no-python"]
    script = [str(ROOT / "examples/elastic/train.py"), "--checkpoint", str(checkpoint), "--backend", backend]
    run = [str(Path(sys.executable).with_name("lms")), "run", "--budget", "2MB", *script, "--steps", str(STEPS), *more]
    variables = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONUNBUFFERED": "1"}
    command = bed.command(host, [*torchrun, *run], env=variables)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def steps(one: subprocess.Popen[str]) -> Iterator[tuple[int, float, int]]:
    """What rank 0 of this node says: step, loss, ranks."""
    assert one.stdout is not None
    for line in one.stdout:
        if found := STEP.match(line):
            yield int(found[1]), float(found[2]), int(found[3])


def undisturbed(bed: Testbed, folder: Path, seed: int) -> float:
    """The final loss of one node."""
    one = agent(bed, "h0", "1", folder / f"{seed}.pt", "ddl", "--seed", str(seed))
    *_, (last, loss, _) = steps(one)
    assert (one.wait(), last) == (0, STEPS)
    return loss


def disturbed(bed: Testbed, folder: Path, backend: str) -> tuple[float, float]:
    """Two nodes, one of which is killed and comes back; seconds from the kill to the next step, and the final loss."""

    def node(host: str) -> subprocess.Popen[str]:
        return agent(bed, host, "1:2", folder / f"{backend}.pt", backend, "--pause", "0.3")

    first = node("h0")
    said = steps(first)
    assert next(said)[2] == 1
    other = node("h1")
    next(step for step, _, size in said if size == 2 and step % 5 == 2)
    began = time.monotonic()
    for process in bed.processes("h1"):  # the agent and its rank
        with suppress(ProcessLookupError):  # it has ended with the other one
            os.kill(process.pid, signal.SIGKILL)
    step = next(step for step, _, size in said if size == 1)
    took = time.monotonic() - began
    other.wait()
    assert step % 5 == 1  # it goes on from the checkpoint
    other = node("h1")
    *_, (last, loss, size) = said
    assert first.wait() == other.wait() == 0
    assert (last, size) == (STEPS, 2)
    return took, loss


def test_the_ranks_of_every_size_share_the_same_samples() -> None:
    spec = importlib.util.spec_from_file_location("elastic_train", ROOT / "examples/elastic/train.py")
    assert spec is not None
    assert spec.loader is not None
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)

    def samples(step: int, size: int) -> list[int]:
        shares = [train.share_of(100, 1797, step, 0, rank, size).tolist() for rank in range(size)]
        return sorted(sample for share in shares for sample in share)

    assert samples(7, 1) == samples(7, 2) == samples(7, 3)
    assert len(set(samples(7, 3))) == 100
    assert samples(7, 1) != samples(8, 1)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("needs_testbed")
def test_a_node_that_is_killed_and_comes_back_changes_no_loss(tmp_path: Path) -> None:
    with running(cluster([1, 1], link="1gbit")) as bed:
        losses = [undisturbed(bed, tmp_path, seed) for seed in range(3)]
        took = {}
        for backend in ("gloo", "ddl"):
            took[backend], loss = disturbed(bed, tmp_path, backend)
            print(f"{backend}: {took[backend]:.1f} s from the kill to the next step; loss {loss}; undisturbed {losses}")
            assert abs(loss - losses[0]) <= max(losses) - min(losses)
    assert took["ddl"] <= took["gloo"] + 30
