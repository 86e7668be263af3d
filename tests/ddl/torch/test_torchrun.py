"""torchrun starts jobs, and starts them again: in one agent, and with an agent that joins later. Pods of Kubeflow."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
EXAMPLE = Path(__file__).parents[3] / "examples/ddp_digits/train.py"
ELASTIC = Path(__file__).parents[1] / "programs" / "torch_elastic.py"


@pytest.mark.slow
def test_the_example_runs_under_torchrun(command: Callable[..., object]) -> None:
    torchrun = [*TORCHRUN, "--standalone", "--nproc-per-node", "4"]
    done = command([*torchrun, str(EXAMPLE), "--epochs", "1"], timeout=110, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout
    assert "4 ranks: loss 1.479901" in done.stdout
    assert "the same bits on every rank" in done.stdout


RESTARTED = """
import os, torch, torch.distributed as dist
import ddl.horovod.torch as hvd

hvd.init()  # before there is a process group
assert hvd.allreduce(torch.ones(2) * hvd.rank(), op=hvd.Sum).tolist() == [1, 1]
hvd.shutdown()
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
for _ in range(2):
    dist.init_process_group("ddl")
    summed = torch.ones(1)
    dist.all_reduce(summed)
    if attempt == "0" and dist.get_rank() == 1:
        os._exit(3)
    group = dist.new_group([1])
    dist.destroy_process_group()
print(f"attempt {attempt}: {summed.item()}\\n", end="", flush=True)
"""


def test_a_job_starts_again_in_the_store_of_the_first_try(command: Callable[..., object], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RESTARTED)
    torchrun = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]
    done = command([*torchrun, "--max-restarts", "1", str(script)], timeout=100)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("attempt 1: 2.0\n") == 2, done.stdout
    assert "attempt 0: " not in done.stdout


def test_a_job_grows_when_an_agent_joins() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = [*TORCHRUN, "--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "job"]
    words += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", "last_call_timeout=1", str(ELASTIC)]

    def agent() -> subprocess.Popen[str]:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    with agent() as first:
        assert first.stdout is not None
        assert next(line for line in first.stdout if "ran" in line) == "rank 0 of 1 ran\n"
        with agent() as second:
            assert second.stdout is not None
            lines = [*first.stdout, *second.stdout]
            assert (first.wait(), second.wait()) == (0, 0)
    assert {"rank 0 of 2 ran\n", "rank 1 of 2 ran\n"} <= set(lines)


# What the operators of PyTorchJob and of Trainer set in the pod `rank`.
PODS = {
    "PyTorchJob, python": lambda port, rank: {
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": rank, "PYTHONUNBUFFERED": "1"},
        **{"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port, "PET_NNODES": "2", "PET_NODE_RANK": rank},
        **{"PET_NPROC_PER_NODE": "auto"},
    },
    "Trainer, torchrun": lambda port, rank: {
        **{"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port, "PET_NNODES": "2", "PET_NODE_RANK": rank},
        **{"PET_NPROC_PER_NODE": "1"},
    },
}


@pytest.mark.parametrize("pods", PODS)
def test_the_pods_of_kubeflow_are_ranks(pods: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    words = TORCHRUN if "torchrun" in pods else TORCHRUN[:1]
    running = [
        subprocess.Popen(
            [*words, str(ELASTIC)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **PODS[pods](port, rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    said = [pod.communicate(timeout=100)[0] for pod in running]
    assert [pod.returncode for pod in running] == [0, 0], said
    assert "rank 0 of 2 ran" in said[0]
    assert "rank 1 of 2 ran" in said[1]
