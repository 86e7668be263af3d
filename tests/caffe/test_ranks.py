"""Several ranks under ddlrun."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from bascule_caffe import Solver, SolverParameter, parse_text

DDLRUN = Path(sys.executable).with_name("ddlrun")
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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_train_as_one_does(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    with h5py.File("data.h5", "w") as file:
        file["data"] = generator.normal(size=(50, 3, 8, 8)).astype(np.float32)
        file["label"] = generator.integers(0, 4, 50)
    Path("list.txt").write_text("data.h5\n")
    for name, size in (("one", 1), ("ranks", ranks)):  # the same records an iteration, and the same in a test
        Path(f"net{size}.prototxt").write_text(NET % (16 // size))
        Path(f"{name}.prototxt").write_text(SOLVER % (size, 2 * size))
    done = subprocess.run(
        [str(DDLRUN), "-np", str(ranks), sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=280
    )
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
