"""Several ranks under ddlrun, on one host and on two of a virtual cluster."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from bascule_caffe import Solver, SolverParameter, parse_text
from testbed import AGENT, cluster, running

DDLRUN = [sys.executable, "-m", "ddl.ddlrun"]
NET = """
layer { name: "data" type: "HDF5Data" top: "data" top: "label" hdf5_data_param { source: "list.txt" batch_size: %d } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 8 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "score" type: "InnerProduct" bottom: "conv" top: "score"
  inner_product_param { num_output: 4 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "score" bottom: "label" top: "loss" }
"""
SOLVER = """
net: "net%d.prototxt" base_lr: 0.05 lr_policy: "fixed" momentum: 0.9 max_iter: 20 random_seed: 1
test_iter: %d test_interval: 20 snapshot_after_train: false weight_decay: 0.001
"""
PROGRAM = """
import hashlib
import signal
import sys

import numpy as np

from bascule_caffe import Solver, SolverParameter, parse_text
from bascule_caffe.job import join
from bascule_caffe.signals import Signals

job = join()

solver = Solver(parse_text("ranks.prototxt", SolverParameter), "ranks.prototxt", job=job)
solver.solve()
weights = [entry.parameter.detach().numpy().copy() for entry in solver.net.learnable]
print("bits", job.rank, job.size, hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest(), flush=True)
if job.rank == 0:
    np.savez("ranks.npz", *weights)

solver.parameter.max_iter, solver.parameter.test_interval = 24, 0
with Signals() as signals:
    if job.rank == 1:
        signal.raise_signal(signal.SIGHUP)
    solver.solve(signals)
solver.close()
job.leave()
"""


def ddlrun(ranks: int, words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DDLRUN, "-np", str(ranks), *words], capture_output=True, text=True, timeout=280)


def ddlrun_on_two_hosts(ranks: int, words: list[str]) -> subprocess.CompletedProcess[str]:
    variables = {"PRTE_MCA_plm_ssh_agent": str(AGENT), "XDG_STATE_HOME": str(Path("state").absolute())}
    hosts = f"h0:{ranks // 2},h1:{ranks // 2}"
    with running(cluster([2])) as bed:
        return bed.run("h0", [*DDLRUN, "-H", hosts, *words], env=variables, cwd=Path.cwd(), timeout=280)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "run"),
    [
        (2, ddlrun),
        pytest.param(4, ddlrun, marks=pytest.mark.slow),
        pytest.param(4, ddlrun_on_two_hosts, marks=[pytest.mark.slow, pytest.mark.root]),
    ],
)
def test_ranks_train_as_one_does(
    ranks: int,
    run: Callable[[int, list[str]], subprocess.CompletedProcess[str]],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if run is ddlrun_on_two_hosts:
        request.getfixturevalue("needs_testbed")
        tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    with h5py.File("data.h5", "w") as file:
        file["data"] = generator.normal(size=(50, 3, 8, 8)).astype(np.float32)
        file["label"] = generator.integers(0, 4, 50)
    Path("list.txt").write_text("data.h5\n")
    for name, size in (("one", 1), ("ranks", ranks)):  # the same records an iteration, and the same in a test
        Path(f"net{size}.prototxt").write_text(NET % (16 // size))
        Path(f"{name}.prototxt").write_text(SOLVER % (size, 2 * size))
    done = run(ranks, [sys.executable, "-c", PROGRAM])
    assert done.returncode == 0, done.stdout + done.stderr
    said = sorted(line.split("bits ")[1].split() for line in done.stdout.splitlines() if "bits " in line)
    assert [line[:2] for line in said] == [[str(rank), str(ranks)] for rank in range(ranks)]
    assert len({line[2] for line in said}) == 1
    solver = Solver(parse_text("one.prototxt", SolverParameter), "one.prototxt")
    solver.solve()
    solver.close()
    alone = [entry.parameter.detach().numpy() for entry in solver.net.learnable]
    together = list(np.load("ranks.npz").values())
    assert said[0][2] == hashlib.sha256(b"".join(weight.tobytes() for weight in together)).hexdigest()
    # A signal that one rank gets has its effect on all: rank 0 wrote a snapshot after the next iteration.
    assert {path.name for path in tmp_path.glob("*.solverstate")} == {"ranks_iter_21.solverstate"}
    for one, two in zip(alone, together, strict=True):
        assert np.abs(one - two).max() <= 1e-5 * np.abs(one).max()
    tested = [float(text.split("loss = ")[1].split()[0]) for text in _tests(done.stderr)]
    assert tested == pytest.approx(
        [float(text.split("loss = ")[1].split()[0]) for text in _tests(capsys.readouterr().err)]
    )


def _tests(log: str) -> list[str]:
    lines = [line for line in log.splitlines() if "Test net output" in line]
    assert len(lines) == 2
    return lines


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_at_ddlrun_is_a_snapshot_of_all_ranks_and_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.prototxt").write_text(
        """layer { name: "data" type: "DummyData" top: "data" top: "label"
          dummy_data_param { shape { dim: 4 dim: 6 } shape { dim: 4 } data_filler { type: "gaussian" }
          data_filler { value: 1 } } }
        layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 3 } }
        layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }"""
    )
    Path("s.prototxt").write_text(
        "net: 'net.prototxt' base_lr: 0.1 lr_policy: 'fixed' max_iter: 1000000000 display: 1 solver_mode: CPU"
    )
    words = ["-np", "2", sys.executable, "-m", "bascule_caffe", "train", "-solver", "s.prototxt"]
    # A group of its own, as a shell gives it to what runs in a terminal.
    with subprocess.Popen([*DDLRUN, *words], stderr=subprocess.PIPE, text=True, process_group=0) as job:
        assert job.stderr is not None
        log = ""
        for line in job.stderr:
            if "Iteration 5 (" in line:
                os.killpg(job.pid, signal.SIGINT)
            log += line
    assert job.returncode == 0, log
    snapshots = re.findall(r"Snapshotting solver state to binary proto file (\S+)", log)
    assert len(snapshots) == 1, log
    assert [path.name for path in tmp_path.glob("*.solverstate")] == snapshots
    assert log.count("Optimization stopped early.") == 1, log
