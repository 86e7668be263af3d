"""The smallest example of DDL: four ranks reach the losses that one reaches."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
LINE = "ddlrun -np 4 python examples/numpy_average/train.py"


def test_four_ranks_train_as_one_does_to_rounding(tmp_path: Path) -> None:
    command = [Path(sys.executable).with_name("ddlrun"), *LINE.split()[1:]]
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "ddl/src"), "XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 ranks on 1 host: loss 0.693147 -> 0.2" in done.stdout
    apart = re.search(r"at most ([\d.e+-]+) apart", done.stdout)
    assert apart
    assert float(apart[1]) < 1e-12
