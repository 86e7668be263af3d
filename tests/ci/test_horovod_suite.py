"""`make horovod-suite`: what it says of tests that pass, fail on one rank or are skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "ci" / "horovod_suite"

TESTS = """
import unittest
import torch
import horovod.torch as hvd

class Tests(unittest.TestCase):
    def test_averages(self):
        hvd.init()
        assert hvd.allreduce(torch.tensor([float(hvd.rank())])).item() == 0.5

    def test_differs(self):
        hvd.init()
        assert hvd.rank() == 0, "only rank 0 is right"

    def test_differs_in_a_part(self):
        hvd.init()
        with self.subTest("first"):
            assert hvd.rank() == 0, "only rank 0 is right"
        with self.subTest("second"):
            pass

    def test_needs_more(self):
        self.skipTest("No GPUs available")

    def test_goes_on(self):
        hvd.init()
        hvd.barrier()
"""


def suite(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    for name, content in (("parallel/test_torch.py", tests), ("utils/common.py", "")):
        file = folder / "test" / name
        file.parent.mkdir(parents=True)
        file.write_text(content)
    command = [sys.executable, SCRIPT, folder, "--suites", "torch", "--ranks", "2"]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env=os.environ, check=False)


def test_a_test_passes_if_it_does_on_every_rank_and_others_are_named_with_their_reason(tmp_path: Path) -> None:
    done = suite(tmp_path, TESTS)
    assert done.returncode == 1, done.stderr
    assert "failed  test_differs: AssertionError: only rank 0 is right" in done.stdout
    assert "failed  test_differs_in_a_part" in done.stdout
    assert "skipped  test_needs_more: No GPUs available" in done.stdout
    assert "5 tests: 2 passed, 1 skipped, 2 failed" in done.stdout
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["common.py", "test_torch.py"]


@pytest.mark.slow
def test_a_job_that_ran_no_test_is_a_failure(tmp_path: Path) -> None:
    assert suite(tmp_path, "import nothing_there").returncode == 1


def test_a_folder_without_horovods_sources_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "has no test/parallel/test_torch.py: give the folder of Horovod's sources" in done.stderr
