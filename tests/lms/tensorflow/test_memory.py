"""What the U-Net really holds: each training in a process of its own, measured by the system."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorflow", reason="no TensorFlow")

PROGRAM = Path(__file__).resolve().parents[3] / "lms" / "bench" / "tensorflow_unet.py"
SIZE = ("--side", "128", "--width", "16", "--steps", "1")


def train(variant: str, pool: int | None = None, batch: int = 4, **more: str) -> dict:
    """What it found; nothing if it died."""
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0" if pool is None else "1", **more}
    if pool is not None:
        environment["TF_MKL_ALLOC_MAX_BYTES"] = str(pool)
    command = [sys.executable, PROGRAM, *SIZE, "--batch", str(batch), "--one", variant]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert pool is not None or run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1]) if run.returncode == 0 else {}
    return {} if "died" in found else found


@pytest.mark.timeout(600)
def test_a_budget_lowers_the_peak_and_a_limit_holds() -> None:
    plain, managed = train("plain"), train("35%")
    assert managed["losses"] == plain["losses"]
    assert managed["above"] < 0.75 * plain["above"]
    limit = int(0.3 * plain["peak"] + 0.7 * managed["peak"])
    limited = train(f"limit={limit}")
    assert limited["losses"] == plain["losses"]
    assert limited["swapped"] > 0
    assert limited["peak"] <= limit


@pytest.mark.timeout(600)
def test_plain_training_dies_in_a_pool_in_which_lms_trains() -> None:
    assert not train("plain", 90_000_000)
    managed = train("20%", 90_000_000)
    assert managed["swapped"] > 0
    assert managed["losses"] == train("plain", 1 << 40)["losses"]  # with oneDNN's operations, too


@pytest.mark.timeout(600)
def test_without_onednns_pool_freed_tensors_go_back_to_the_system() -> None:
    pooled, managed = (
        train("35%", batch=8, TF_ENABLE_ONEDNN_OPTS="1", TF_ONEDNN_USE_SYSTEM_ALLOCATOR=system) for system in ("0", "1")
    )
    assert managed["losses"] == pooled["losses"]
    assert managed["above"] < 0.95 * pooled["above"]  # about 0.77 of it


def test_what_was_freed_below_other_memory_is_given_back() -> None:
    from lms.memory.resident import ResidentSet
    from lms.tensorflow.tiers import give_back

    resident, libc = ResidentSet(), ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    size, blocks = 64 << 10, []
    for _ in range(1000):
        blocks.append(libc.malloc(size))
        ctypes.memset(blocks[-1], 1, size)
    for block in blocks[:-1]:  # the last one keeps the top of the heap where it is
        libc.free(block)
    before = resident.current()
    give_back()
    assert resident.current() < before - 500 * size
    libc.free(blocks[-1])
