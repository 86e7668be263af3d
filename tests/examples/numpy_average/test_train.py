"""The example of the README: four ranks reach the losses that one reaches."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_four_ranks_train_as_one_does_to_rounding() -> None:
    command = [Path(sys.executable).with_name("mpirun"), "-np", "4", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
    command += ["--mca", "mpi_yield_when_idle", "1", sys.executable, ROOT / "examples/numpy_average/train.py"]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    variables = {**os.environ, **root, "PYTHONPATH": str(ROOT / "ddl/src")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 ranks on 1 host: loss 0.693147 -> 0.2" in done.stdout
    apart = re.search(r"at most ([\d.e+-]+) apart", done.stdout)
    assert apart
    assert float(apart[1]) < 1e-12
