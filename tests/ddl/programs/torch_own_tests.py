"""PyTorch's own tests of its backends, by the backend ddl: a line for each: passed, failed or skipped, and why.

The first argument is the backend of PyTorch's own, gloo or mpi, whose tests they are: each has some that the other has
not. The others are names of tests; all by default. Each test gets a group of its own, so that one that fails leaves
nothing to the next.
"""

from __future__ import annotations

import os
import re
import sys
import unittest
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed, common_utils

import ddl

torch.set_num_threads(1)
ddl.init()
RANK, SIZE = ddl.rank(), ddl.size()
FOLDER = Path(os.environ["TORCH_TESTS_FOLDER"])  # empty, and the same for all ranks
os.environ |= {"BACKEND": sys.argv[1], "WORLD_SIZE": str(SIZE), "RANK": str(RANK), "TEMP_DIR": str(FOLDER)}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
cases = common_distributed.DistTestCases
cases.skip_collective["allgather_coalesced"].discard("mpi")  # PyTorch's has none
for feature in ("ddp", "subgroup"):
    cases.backend_feature[feature].add("mpi")

from torch.testing._internal.distributed import distributed_test as tests  # noqa: E402  # BACKEND is read here

os.environ["BACKEND"] = "mpi"  # at run time the others skip tests on fewer than 8 ranks
MISSING = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}
STORE = dist.FileStore(str(FOLDER / "store"), SIZE)


class Suite(common_utils.TestCase, tests.DistributedTest._DistTestBase):
    @property
    def rank(self) -> int:
        return RANK

    @property
    def world_size(self) -> int:
        return SIZE

    def setUp(self) -> None:
        super().setUp()
        its = FOLDER / self._testMethodName
        for name in ("barrier", "test_dir"):
            (its / name).mkdir(parents=True, exist_ok=True)
        os.environ["TEMP_DIR"] = str(its)
        tests.Barrier.barrier_id = 0
        store = dist.PrefixStore(self._testMethodName, STORE)
        dist.init_process_group("ddl", store=store, rank=RANK, world_size=SIZE, timeout=timedelta(seconds=20))

    def tearDown(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        super().tearDown()


def outcome(name: str) -> str:
    result = unittest.TestResult()
    Suite(name).run(result)
    for _, text in result.errors + result.failures:
        raised = [line for line in text.splitlines() if re.match(r"[\w.]+(Error|Exception|Exit|Failure)\b", line)]
        why = raised[-1] if raised else text
        status = re.fullmatch(r"SystemExit: (\d+)", why)  # how these tests say that something is missing
        if status and int(status[1]) in MISSING:
            return f"skipped ({MISSING[int(status[1])]})"
        return f"failed ({why[:300]})"
    for _, reason in result.skipped:
        return f"skipped ({reason})"
    return "passed"


ddl.finalize()  # each test's group joins the job again
names = sys.argv[2:] or [name for name in sorted(dir(Suite)) if name.startswith("test_")]
for name in names:
    STORE.set(f"outcome/{name}/{RANK}", outcome(name))
    every = [STORE.get(f"outcome/{name}/{rank}").decode() for rank in range(SIZE)]  # waits
    if RANK == 0:
        worst = next((its for its in every if its.startswith("failed")), None)
        worst = worst or next((its for its in every if its == "passed"), every[0])
        print(f"{name}: {worst}", flush=True)
