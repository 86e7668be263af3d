"""The programs of examples/recipes, each as a user starts it."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from mlflow import MlflowClient

RECIPES = Path(__file__).parents[2] / "examples/recipes"


def output(folder, program, *arguments):
    command = [sys.executable, str(RECIPES / program), *arguments]
    for _ in range(3):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        if "node timed out during startup" not in done.stderr:  # Ray kills itself if a process of its own needs 15 s
            break
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_ray_tune(folder):
    said = output(folder, "ray_tune.py", "--trials", "2", "--at-once", "1")
    found = re.search(r"^best: lr=(\S+), loss (\S+), peak ([\d,]+) bytes$", said, re.MULTILINE)
    assert found, said
    assert float(found[2]) < 2.3  # ln 10: what guessing costs
    assert 10**8 < int(found[3].replace(",", "")) < 2 * 10**9  # of a process with PyTorch; the limit


def check_dask_ranks(folder):
    said = output(folder, "dask_ranks.py")
    found = re.findall(r"^rank (\d) of 2: loss (\S+), parameters (\S+), peak", said, re.MULTILINE)
    (_, first, norm), (_, second, other) = found
    assert [rank for rank, *_ in found] == ["0", "1"]
    assert norm == other  # one model
    assert first != second  # of different samples


def check_mlflow_run(folder):
    (run,) = re.findall(r"^run (\w+): loss", output(folder, "mlflow_run.py", "--steps", "20"), re.MULTILINE)
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    metrics = client.get_run(run).data.metrics
    assert metrics["lms/swapped_out"] > 10**6
    assert [one.step for one in client.get_metric_history(run, "lms/steps")] == [10, 20]
    assert [one.value for one in client.get_metric_history(run, "lms/steps")] == [10, 20]
    (page,) = folder.glob(f"mlruns/*/{run}/artifacts/step.html")
    assert "<svg" in page.read_text()


for check in (check_dask_ranks, check_mlflow_run, check_ray_tune):
    with tempfile.TemporaryDirectory() as folder:
        check(Path(folder))
print("right")
