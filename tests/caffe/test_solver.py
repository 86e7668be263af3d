"""Trainings from their text files: against NumPy, resumed, under LMS, with tests, log lines and signals."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from bascule_caffe.errors import FileError, NetError
from bascule_caffe.job import Job
from bascule_caffe.memory import Memory
from bascule_caffe.messages import Model, SolverParameter, parse_text, read_binary, write_binary
from bascule_caffe.optimizers import SOLVERS
from bascule_caffe.signals import Signals
from bascule_caffe.snapshot import save_model
from bascule_caffe.solver import Solver

ROWS = 40
DATA = """
layer { name: "data" type: "HDF5Data" top: "data" top: "label" include { phase: %s }
  hdf5_data_param { source: "list.txt" batch_size: 8 shuffle: %s } }
"""
NET = (
    DATA % ("TRAIN", "true")
    + DATA % ("TEST", "false")
    + """
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
  param { lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  convolution_param { num_output: 8 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "bn" type: "BatchNorm" bottom: "conv1" top: "bn" }
layer { name: "relu" type: "ReLU" bottom: "bn" top: "bn" }
layer { name: "conv2" type: "Convolution" bottom: "bn" top: "conv2"
  convolution_param { num_output: 8 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "drop" type: "Dropout" bottom: "conv2" top: "conv2" }
layer { name: "score" type: "InnerProduct" bottom: "conv2" top: "score"
  inner_product_param { num_output: 4 weight_filler { type: "xavier" } } }
layer { name: "accuracy" type: "Accuracy" bottom: "score" bottom: "label" top: "accuracy" include { phase: TEST } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "score" bottom: "label" top: "loss" }
"""
)
SOLVER = """
net: "net.prototxt"
base_lr: 0.05
lr_policy: "multistep"
stepvalue: 3
stepvalue: 5
gamma: 0.5
momentum: 0.9
weight_decay: 0.001
max_iter: 8
snapshot: 4
snapshot_prefix: "x"
random_seed: 3
"""
Make = Callable[..., Solver]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with data, a net and a solver."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    with h5py.File("data.h5", "w") as file:
        file["data"] = generator.normal(size=(ROWS, 3, 12, 12)).astype(np.float32)
        file["label"] = generator.integers(0, 4, ROWS)
    Path("list.txt").write_text("data.h5\n")
    Path("net.prototxt").write_text(NET)
    Path("solver.prototxt").write_text(SOLVER)
    return tmp_path


@pytest.fixture
def make(folder: Path) -> Make:
    def solver(more: str = "", *, without: str = "", **options: Any) -> Solver:
        lines = [line for line in SOLVER.splitlines() if not without or not re.match(rf"({without}):", line)]
        path = folder / "solver.prototxt"
        path.write_text("\n".join(lines) + "\n" + more)
        return Solver(parse_text(path, SolverParameter), str(path), **options)

    return solver


def bits(solver: Solver) -> list[bytes]:
    tensors = [*(entry.parameter for entry in solver.net.learnable), *solver.optimizer.histories()]
    return [tensor.detach().numpy().tobytes() for tensor in tensors]


def test_a_training_is_what_numpy_computes(folder: Path, make: Make) -> None:
    """Linear least squares with iter_size, multipliers and a step of the rate."""
    (folder / "net.prototxt").write_text(
        """layer { name: "data" type: "HDF5Data" top: "data" top: "label"
          hdf5_data_param { source: "list.txt" batch_size: 8 } }
        layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" param { lr_mult: 1 decay_mult: 3 }
          param { lr_mult: 2 decay_mult: 0 } inner_product_param { num_output: 1 weight_filler { type: "xavier" } } }
        layer { name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "label" top: "loss" }"""
    )
    with h5py.File("data.h5", "r+") as file:
        x = file["data"][:].reshape(ROWS, -1).astype(np.float64)
        del file["label"]
        y = x[:, :1] * 2 + 1
        file["label"] = y
    solver = make("iter_size: 2\nbase_lr: 0.002", without="snapshot|base_lr")
    weight, bias = (entry.parameter.detach().double().numpy().copy() for entry in solver.net.learnable)
    velocity = [np.zeros_like(weight), np.zeros_like(bias)]
    rows = 0
    for iteration in range(8):
        rate = 0.002 * 0.5 ** sum(iteration >= step for step in (3, 5))
        gradients = [np.zeros_like(weight), np.zeros_like(bias)]
        for _ in range(2):
            part = np.arange(rows, rows + 8) % ROWS
            rows += 8
            error = x[part] @ weight.T + bias - y[part]
            gradients[0] += error.T @ x[part] / 8
            gradients[1] += error.sum(axis=0) / 8
        velocity[0] = 0.9 * velocity[0] + rate * (gradients[0] / 2 + 0.003 * weight)
        velocity[1] = 0.9 * velocity[1] + 2 * rate * gradients[1] / 2
        weight, bias = weight - velocity[0], bias - velocity[1]
    solver.solve()
    solver.close()
    for entry, right in zip(solver.net.learnable, (weight, bias), strict=True):
        np.testing.assert_allclose(entry.parameter.detach().numpy(), right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kind", "ending"), [("BINARYPROTO", ""), ("HDF5", ".h5")])
def test_a_resumed_training_has_the_same_bits(make: Make, kind: str, ending: str) -> None:
    more = f"snapshot_format: {kind}\niter_size: 2\ntype: 'Adam'\nmomentum2: 0.99\ntest_iter: 2\ntest_interval: 3"
    whole = make(more)
    whole.solve()
    resumed = make(more + "\n# again")
    resumed.restore(f"x_iter_4.solverstate{ending}")
    assert resumed.iteration == 4
    resumed.solve()
    assert bits(resumed) == bits(whole)
    assert resumed.schedule.current_step == whole.schedule.current_step == 2
    for solver in (whole, resumed):
        solver.close()


def test_a_state_that_does_not_say_how_often_the_rate_fell_goes_on_at_the_rate_of_its_iteration(make: Make) -> None:
    """Files of 2014 do not, nor does one that lacks its last two bytes."""
    whole = make()
    whole.solve()
    path = Path("x_iter_4.solverstate")
    path.write_bytes(path.read_bytes()[:-2])
    resumed = make("# again")
    resumed.restore(str(path))
    resumed.solve()
    assert bits(resumed) == bits(whole)
    for solver in (whole, resumed):
        solver.close()


def test_a_test_goes_on_with_the_records_that_follow_after_a_restart_too(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    more = "test_iter: 3\ntest_interval: 2\ntest_compute_loss: true"  # 3 batches of 8 in 40 records
    whole = make(more)
    whole.solve()
    first = re.findall(r"Test net output #0.*|Test loss.*", capsys.readouterr().err)
    resumed = make(more)
    resumed.restore("x_iter_4.solverstate")
    resumed.solve()
    again = re.findall(r"Test net output #0.*|Test loss.*", capsys.readouterr().err)
    assert len(first) == 2 * 5
    assert again == first[4:]
    for solver in (whole, resumed):
        solver.close()


def vgg() -> str:
    """VGG16's form in small: blocks of convolutions of 3 x 3, each with a ReLU in place, and a pooling."""
    layers, bottom = [DATA % ("TRAIN", "true")], "data"
    for block, (count, width) in enumerate([(2, 8), (2, 16), (3, 16)], 1):
        for number in range(1, count + 1):
            top = f"conv{block}_{number}"
            layers.append(
                f'layer {{ name: "{top}" type: "Convolution" bottom: "{bottom}" top: "{top}" convolution_param '
                f'{{ num_output: {width} kernel_size: 3 pad: 1 weight_filler {{ type: "xavier" }} }} }} '
                f'layer {{ name: "relu{block}_{number}" type: "ReLU" bottom: "{top}" top: "{top}" }}'
            )
            bottom = top
        layers.append(
            f'layer {{ name: "pool{block}" type: "Pooling" bottom: "{bottom}" top: "pool{block}" pooling_param '
            f"{{ pool: MAX kernel_size: 2 stride: 2 }} }}"
        )
        bottom = f"pool{block}"
    return "\n".join(layers) + NET[NET.index('layer { name: "drop"') :].replace("conv2", bottom)


def test_lms_keeps_every_bit(folder: Path, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With everything swapped, and with a budget that the saved tensors exceed four times."""
    (folder / "net.prototxt").write_text(vgg())
    plain = make()
    plain.solve()
    plain.close()
    for quarter in (False, True):
        memory = Memory(0)
        swapped = make(memory=memory)
        swapped.solve()
        swapped.close()
        stats = memory.session.stats()
        assert stats["swapped_in"] > 0
        assert stats["saved"] >= 4 * stats["budget"]
        assert (stats["budget"] > 0) == quarter
        assert bits(swapped) == bits(plain)
        monkeypatch.setenv("LMS_BUDGET", str(stats["saved"] // 4))


def test_a_fraction_that_is_too_small_is_told_and_training_goes_on(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = make()
    plain.solve()
    swapped = make(memory=Memory(1, 1e-4))
    swapped.solve()
    assert "Going on with everything swapped" in capsys.readouterr().err
    assert bits(swapped) == bits(plain)
    for solver in (plain, swapped):
        solver.close()


def test_weights_are_taken_by_the_names_of_layers(make: Make) -> None:
    first = make()
    first.solve()
    second = make("random_seed: 9", without="random_seed|snapshot")
    second.load_weights("x_iter_4.caffemodel, x_iter_8.caffemodel")
    for one, other in zip(first.net.learnable, second.net.learnable, strict=True):
        assert one.parameter.equal(other.parameter)
    for solver in (first, second):
        solver.close()


def test_lines_are_those_that_plotting_scripts_read(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    solver = make("display: 2\naverage_loss: 3\ntest_iter: 5\ntest_interval: 4\ntest_compute_loss: true")
    losses: list[float] = []
    solver.optimizer.register_step_pre_hook(lambda *_: losses.append(solver.net.loss.item()))
    solver.solve()
    solver.close()
    lines = capsys.readouterr().err.splitlines()
    # The patterns of Caffe's tools/extra/parse_log.py.
    number = r"([\.\deE+-]+)"
    found: dict[str, list[tuple[int, float]]] = {"lr": [], "loss": [], "train": [], "test": []}
    iteration = -1
    for line in lines:
        month, day, clock = int(line[1:3]), int(line.split()[0][3:]), line.split()[1]
        datetime.strptime(f"2026-{month}-{day} {clock}", "%Y-%m-%d %H:%M:%S.%f")
        if match := re.search(r"Iteration (\d+)", line):
            iteration = int(match[1])
        for key, pattern in (
            ("lr", r"lr = ([-+]?[0-9]*\.?[0-9]+([eE]?[-+]?[0-9]+)?)"),
            ("loss", rf"Iteration \d+ \(.* iter/s, .*s/2 iters\), loss = {number}"),
            ("train", rf"Train net output #0: loss = {number} \(\* 1 = "),
            ("test", rf"Test net output #0: accuracy = {number}$"),
        ):
            if match := re.search(pattern, line):
                found[key].append((iteration, float(match[1])))
    assert any("] Solving " in line for line in lines)
    assert found["lr"] == [(0, 0.05), (2, 0.05), (4, 0.025), (6, 0.0125)]
    assert [i for i, _ in found["loss"]] == [i for i, _ in found["train"]] == [0, 2, 4, 6]
    for i, loss in found["loss"]:
        assert loss == pytest.approx(np.mean(losses[max(0, i - 2) : i + 1]), rel=1e-4)
    assert [i for i, _ in found["test"]] == [0, 4, 8]
    assert all(0 <= accuracy <= 1 for _, accuracy in found["test"])
    assert lines[-1].endswith("Optimization Done.")


def test_several_test_nets_have_their_own_stages(folder: Path, make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    text = NET.replace(
        'include { phase: TEST } }\nlayer { name: "loss"',
        'include { phase: TEST stage: "score" } }\nlayer { name: "loss"',
    )
    (folder / "net.prototxt").write_text(text)
    solver = make("test_iter: 1 test_iter: 5 test_state { } test_state { stage: 'score' } test_interval: 8")
    solver.test_all()
    solver.close()
    said = capsys.readouterr().err.partition("Testing net (#0)")[2]
    first, _, second = said.partition("Testing net (#1)")
    assert "accuracy" not in first
    assert "Test net output #0: accuracy" in second


def test_signals_ask_for_a_snapshot_and_for_the_end(
    folder: Path, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGHUP)
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        solver = make(without="snapshot")
        solver.solve(signals)
    assert {path.name for path in folder.glob("*.solverstate")} == {"x_iter_1.solverstate", "x_iter_8.solverstate"}
    with Signals(sighup="none") as signals:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGINT)
        stopped = make(without="snapshot")
        stopped.step(1)
        stopped.solve(signals)
    assert stopped.iteration == 2
    assert (folder / "x_iter_2.solverstate").exists()
    assert "Optimization stopped early." in capsys.readouterr().err
    assert signal.getsignal(signal.SIGHUP) is before
    for one in (solver, stopped):
        one.close()


@pytest.mark.parametrize(
    ("more", "without", "words"),
    [
        ("lr_policy: 'cosine'", "lr_policy", r"solver.prototxt:13: lr_policy is 'cosine': fixed, step,"),
        ("type: 'LARS'", "", r"solver.prototxt:14: type is 'LARS': SGD, Nesterov, AdaGrad,"),
        ("iter_size: 0", "", r"solver.prototxt:14: iter_size is 0, and must be at least 1"),
        ("regularization_type: 'L3'", "", r"solver.prototxt:14: regularization_type is 'L3'"),
        ("type: 'RMSProp'", "", r"solver.prototxt:8: RMSProp has no momentum"),
        ("test_iter: 2", "", "test_iter: a test net needs a test_interval|needs a test_interval above 0"),
        ("", "net", "one of train_net, train_net_param, net and net_param"),
        ("test_net: 'net.prototxt'", "", "0 of test_iter for 1 test nets"),
        ("warmup: 5", "", "solver.prototxt:14: SolverParameter has no field 'warmup'"),
    ],
)
def test_a_solver_that_cannot_be_is_told_with_its_line(make: Make, more: str, without: str, words: str) -> None:
    with pytest.raises(NetError, match=words):
        make(more, without=without)


def test_a_net_without_blobs_is_told(folder: Path, make: Make) -> None:
    (folder / "net.prototxt").write_text(DATA % ("TRAIN", "true"))
    with pytest.raises(NetError, match=r"solver.prototxt: no layer of the training net has blobs"):
        make()


@pytest.mark.parametrize(
    ("old", "type_"),
    [
        ("SGD", "SGD"),
        ("NESTEROV", "Nesterov"),
        ("ADAGRAD", "AdaGrad"),
        ("RMSPROP", "RMSProp"),
        ("ADADELTA", "AdaDelta"),
        ("ADAM", "Adam"),
    ],
)
def test_an_old_solver_type_is_taken(make: Make, old: str, type_: str) -> None:
    solver = make(f"solver_type: {old}", without="momentum")
    solver.close()
    assert type(solver.optimizer) is SOLVERS[type_]


def test_a_folder_that_cannot_hold_snapshots_is_told_before_the_training(make: Make) -> None:
    with pytest.raises(FileError, match=r"solver.prototxt:13: the folder nowhere cannot be written"):
        make("snapshot_prefix: 'nowhere/x'", without="snapshot_prefix")


def test_a_net_that_is_not_there_is_told_with_where_it_is(
    make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    with pytest.raises(FileError, match=r"net.prototxt exists: names are relative to where caffe is started"):
        make()


def test_a_loss_that_no_blob_changes_is_trained_on_without_an_error(folder: Path, make: Make) -> None:
    (folder / "net.prototxt").write_text(re.sub(r"lr_mult: \d", "lr_mult: 0", NET))
    solver = make()
    before = [entry.parameter.clone() for entry in solver.net.learnable if entry.owner.startswith("conv1[")]
    solver.solve()
    solver.close()
    after = [entry.parameter for entry in solver.net.learnable if entry.owner.startswith("conv1[")]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_model_that_lacks_a_layer_is_not_resumed_from(make: Make) -> None:
    whole = make()
    whole.solve()
    model: Any = read_binary("x_iter_4.caffemodel", Model)
    del model.layer[[layer.name for layer in model.layer].index("conv2")]
    write_binary("x_iter_4.caffemodel", model)
    resumed = make()
    with pytest.raises(FileError, match=r"x_iter_4.caffemodel: has no blobs of 'conv2'"):
        resumed.restore("x_iter_4.solverstate")
    for solver in (whole, resumed):
        solver.close()


def test_a_blob_without_a_gradient_decays(folder: Path, make: Make) -> None:
    score = 'name: "score" type: "InnerProduct"'
    (folder / "net.prototxt").write_text(NET.replace(score, f"{score} propagate_down: false"))
    solver = make()
    blob = next(entry.parameter for entry in solver.net.learnable if entry.owner.startswith("conv2["))
    before = blob.detach().clone()
    solver.step(1)
    solver.close()
    torch.testing.assert_close(blob.detach(), before * (1 - 0.05 * 0.001), rtol=1e-6, atol=0)


def test_ranks_test_with_the_statistics_of_the_first(make: Make) -> None:
    sent: list[torch.Tensor] = []

    class Recorded(Job):
        def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
            sent.extend(tensors)

    solver = make("test_iter: 1 test_interval: 8", job=Recorded())
    sent.clear()
    solver.test_all()
    solver.close()
    statistics = next(layer.blobs for layer in solver.net.layers if layer.name == "bn")
    assert [id(tensor) for tensor in sent] == [id(blob) for blob in statistics]


def test_a_test_of_no_batches_has_no_scores(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    solver = make("test_iter: 0 test_interval: 8")
    assert solver.test_all()
    solver.close()
    said = capsys.readouterr().err
    assert "Testing net (#0)" in said
    assert "Test net output" not in said


def test_weights_are_taken_by_the_layers_of_test_nets_too(folder: Path, make: Make) -> None:
    (folder / "net.prototxt").write_text(
        NET + 'layer { name: "probe" type: "InnerProduct" bottom: "score" top: "probe" include { phase: TEST }'
        ' inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }'
    )
    solver = make("test_iter: 1 test_interval: 8")
    probe = next(layer for layer in solver.test_nets[0].layers if layer.name == "probe")
    save_model("x.caffemodel", solver.test_nets[0])
    before = probe.blobs[0].detach().clone()
    probe.blobs[0].data.zero_()
    solver.load_weights("x.caffemodel")
    assert torch.equal(probe.blobs[0], before)
    save_model("x.caffemodel", solver.net)
    solver.load_weights("x.caffemodel")
    assert torch.equal(probe.blobs[0], before)
    solver.close()


def test_a_snapshot_prefix_that_is_a_folder_gets_the_solvers_name(folder: Path, make: Make) -> None:
    (folder / "models").mkdir()
    for prefix in ("models", "models/"):
        solver = make(f"snapshot_prefix: '{prefix}'", without="snapshot_prefix")
        solver.snapshot()
        solver.close()
        assert {path.stem for path in (folder / "models").iterdir()} == {"solver_iter_0"}
