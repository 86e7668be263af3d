"""The elastic example under the agents of torchrun: a node goes and comes back, and the training is the same."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
STEP = re.compile(r"step (\d+): loss=(\S+), (\d) ranks")
STEPS = 100


def agent(endpoint: str, nodes: str, checkpoint: Path, backend: str, *more: str) -> subprocess.Popen[str]:
    """A node: an agent of torchrun with one rank, in a process group of its own."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "1"]
    torchrun += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "job"]
    torchrun += ["--rdzv-conf", "last_call_timeout=1", "--no-python"]
    script = [str(ROOT / "examples/elastic/train.py"), "--checkpoint", str(checkpoint), "--backend", backend]
    run = [str(Path(sys.executable).with_name("lms")), "run", "--budget", "2MB", *script, "--steps", str(STEPS), *more]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    variables["PYTHONUNBUFFERED"] = "1"
    return subprocess.Popen(
        [*torchrun, *run],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def free_endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def steps(one: subprocess.Popen[str]) -> Iterator[tuple[int, float, int]]:
    """What rank 0 of this node says: step, loss, ranks."""
    assert one.stdout is not None
    for line in one.stdout:
        if found := STEP.match(line):
            yield int(found[1]), float(found[2]), int(found[3])


def undisturbed(folder: Path, seed: int) -> float:
    """The final loss of one node."""
    with agent(free_endpoint(), "1", folder / f"{seed}.pt", "ddl", "--seed", str(seed)) as one:
        *_, (last, loss, _) = steps(one)
    assert (one.returncode, last) == (0, STEPS)
    return loss


def disturbed(folder: Path, backend: str) -> tuple[float, float]:
    """Two nodes, one of which is killed and comes back; seconds from the kill to the next step, and the final loss."""
    endpoint, checkpoint = free_endpoint(), folder / f"{backend}.pt"
    more = ("--pause", "0.3")
    first = agent(endpoint, "1:2", checkpoint, backend, *more)
    nodes = [first]
    try:
        said = steps(first)
        assert next(said)[2] == 1
        nodes.append(agent(endpoint, "1:2", checkpoint, backend, *more))
        next(step for step, _, size in said if size == 2 and step % 5 == 2)
        began = time.monotonic()
        _kill(nodes[1])
        step = next(step for step, _, size in said if size == 1)
        took = time.monotonic() - began
        assert step % 5 == 1  # it goes on from the checkpoint
        nodes.append(agent(endpoint, "1:2", checkpoint, backend, *more))
        *_, (last, loss, size) = said
        assert first.wait() == nodes[2].wait() == 0
        assert (last, size) == (STEPS, 2)
        return took, loss
    finally:
        for one in nodes:
            _kill(one)


def _kill(one: subprocess.Popen[str]) -> None:
    """End a node as a power cut does: its agent and the agent's rank, which has a group of its own."""
    children = Path(f"/proc/{one.pid}/task/{one.pid}/children")
    for pid in [one.pid, *map(int, children.read_text().split())] if one.poll() is None else []:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    one.wait()


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
@pytest.mark.timeout(1800)
def test_a_node_that_is_killed_and_comes_back_changes_no_loss(tmp_path: Path) -> None:
    losses = [undisturbed(tmp_path, seed) for seed in range(3)]
    took = {}
    for backend in ("gloo", "ddl"):
        took[backend], loss = disturbed(tmp_path, backend)
        print(f"{backend}: {took[backend]:.1f} s from the kill to the next step; loss {loss}; undisturbed {losses}")
        assert abs(loss - losses[0]) <= max(losses) - min(losses)
    assert took["ddl"] <= took["gloo"] + 30
