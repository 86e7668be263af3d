"""Digits on several ranks: the losses of one process, and the same bits on every rank, by either front end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "ddp_digits"


def run(*command: str | Path, **variables: str) -> str:
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment = {**os.environ, **root, "PYTHONPATH": str(ROOT / "ddl/src"), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ranks(size: int, *program: str | Path) -> str:
    mpirun = [Path(sys.executable).with_name("mpirun"), "-np", str(size), "--map-by", ":OVERSUBSCRIBE"]
    mpirun += ["--bind-to", "none", "--mca", "mpi_yield_when_idle", "1", sys.executable, *program]
    # One that was killed leaves `ompi.PID` in /tmp, and the next one with its process id would fail there.
    with tempfile.TemporaryDirectory(prefix="mpirun-") as folder:
        return run(*mpirun, PRTE_MCA_prte_local_tmpdir_base=folder)


@pytest.mark.parametrize("script", ["train.py", "train_horovod.py"])
def test_two_ranks_train_as_one_process_does(script: str) -> None:
    output = ranks(2, EXAMPLE / script, "--epochs", "3")
    assert "parameters: the same bits on every rank" in output
    apart = re.search(r"at most ([\d.e+-]+) of it apart", output)
    assert apart, output
    assert 0 <= float(apart[1]) < 1e-4
    losses = [float(text) for text in re.findall(r"^epoch \d: loss ([\d.]+)", output, re.MULTILINE)]
    assert len(losses) == 3
    assert losses[-1] < 0.5 * losses[0], output


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_script_for_torchrun_changes_its_launcher_and_then_its_backend() -> None:
    script = [EXAMPLE / "train.py", "--epochs", "2"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ddlrun = [sys.executable, "-m", "ddl.ddlrun", "-np", "2", sys.executable]
    as_it_was = run(*torchrun, *script, "--backend", "gloo")
    launched = run(*ddlrun, *script, "--backend", "gloo")
    changed = run(*ddlrun, *script)
    assert as_it_was.splitlines()[0].startswith("epoch 1: loss ")
    assert launched.splitlines() == as_it_was.splitlines()
    assert changed.splitlines()[:2] == as_it_was.splitlines()[:2]  # what follows has one more digit
    assert changed.splitlines()[-1] == "parameters: the same bits on every rank"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_that_lost_a_rank_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    fails = tmp_path / "fails.py"  # rank 1 is killed in the third epoch of the first attempt
    fails.write_text(
        f"""
import os, runpy, signal, sys
sys.path.insert(0, {str(EXAMPLE)!r})
import digits
its, calls = digits.epoch, []
def epoch(*arguments):
    calls.append(1)
    if os.environ["RANK"] == "1" and "DDL_RESTART" not in os.environ and len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return its(*arguments)
digits.epoch = epoch
runpy.run_path({str(EXAMPLE / "train.py")!r}, run_name="__main__")
"""
    )
    ddlrun = [sys.executable, "-m", "ddl.ddlrun", "-np", "2"]
    plain = run(*ddlrun, sys.executable, EXAMPLE / "train.py", "--epochs", "4")
    checkpoint = tmp_path / "digits.pt"
    output = run(*ddlrun, "--restarts", "1", sys.executable, fails, "--epochs", "4", "--checkpoint", checkpoint)
    assert "going on after epoch 2" in output
    pattern = re.compile(r"^epoch (\d): loss ([\d.]+)", re.MULTILINE)
    assert pattern.findall(output) == pattern.findall(plain)
    assert output.splitlines()[-1] == plain.splitlines()[-1]
