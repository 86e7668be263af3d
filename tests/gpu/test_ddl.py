"""DDL with buffers in a real GPU's memory, staged and through the real NCCL, on ranks that share the GPU.

They need libddl: `ci/gpu_check` compiles it. NCCL refuses two ranks on one GPU of a host, so each rank calls its host
by another name (NCCL_HOSTID), and NCCL's bytes take the loopback interface: right numbers, and no figure of its speed.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU: torch.cuda.is_available() is False", allow_module_level=True)

from ddl import library
from ddl.errors import DDLError

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

PROGRAMS = Path(__file__).parents[1] / "ddl" / "programs"


def loaded(name: str) -> str:
    """The file of a library that PyTorch has loaded."""
    found = re.search(rf"/\S+/{re.escape(name)}\S*", Path("/proc/self/maps").read_text())
    return found[0] if found else pytest.skip(f"PyTorch has not loaded {name}")


def run(size: int, program: str, *arguments: str, **variables: str) -> str:
    """The output of the program on that many ranks, which meet over TCP."""
    try:
        library.find()
    except DDLError as error:
        pytest.skip(f"no libddl: {error}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DDL_TRANSPORT": "tcp",
        "NCCL_SOCKET_IFNAME": "lo",
        **variables,
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAMS / program), *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "NCCL_HOSTID": f"rank{rank}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    until = time.monotonic() + 120
    try:
        output = "".join(rank.communicate(timeout=max(1, until - time.monotonic()))[0] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), output
    return output


@pytest.mark.parametrize("size", [1, 2])
def test_torch_distributed_is_right_whatever_is_late(size: int) -> None:
    output = run(size, "torch_gpu.py")
    assert output.count(" checks\n") == size, output


@pytest.mark.parametrize("modes", [("r",), ("n",), ("b",)], ids=["staged", "nccl", "nccl with messages"])
def test_every_collective_is_what_numpy_computes(modes: tuple[str, ...]) -> None:
    torch.zeros(1, device="cuda")  # loads both
    libraries = {"DDL_CUDA_LIB": loaded("libcudart.so"), "DDL_NCCL_LIB": loaded("libnccl.so")}
    output = run(2, "sweep.py", "2", "device", *modes, **libraries)
    for mode in modes:
        assert f"-mode {mode}: right" in output, output
