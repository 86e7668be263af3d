"""The command line: Caffe's manners, what it writes, and how errors are told."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from google.protobuf.message import Message

from bascule_caffe import devices, register_layer
from bascule_caffe.cli import main
from bascule_caffe.errors import CaffeError
from bascule_caffe.job import Job
from bascule_caffe.log import Log
from bascule_caffe.messages import Model, blob_array, read_binary
from bascule_caffe.shaping import InnerProduct

NET = """
name: "net"
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 4 dim: 1 dim: 6 dim: 6 } shape { dim: 4 } data_filler { type: "gaussian" } data_filler { value: 1 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 3
  weight_filler { type: "xavier" } } }
layer { name: "score" type: "InnerProduct" bottom: "ip" top: "score" include { stage: "deep" } inner_product_param {
  num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
layer { name: "accuracy" type: "Accuracy" bottom: "ip" bottom: "label" top: "accuracy" include { phase: TEST } }
"""
SOLVER = 'net: "net.prototxt" base_lr: 0.1 lr_policy: "fixed" max_iter: 3 display: 1 random_seed: 0 solver_mode: CPU\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    Path("net.prototxt").write_text(NET)
    Path("solver.prototxt").write_text(SOLVER)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        "-solver solver.prototxt",
        "-solver=solver.prototxt",
        "--solver solver.prototxt",
        "--solver=solver.prototxt -sigint_effect snapshot -sighup_effect=none",
        "-bvlc -ddl_update -solver solver.prototxt -ddl_align=1 -threshold 3 -engine CAFFE -lms 0 -lms_frac 0",
    ],
)
def test_flags_are_written_as_caffe_took_them(words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words.split()]) == 0
    said = capsys.readouterr().err
    assert re.search(r"^I\d{4} \S+ +\d+ solver.cpp:218\] Iteration 2 \(", said, re.MULTILINE)
    assert (folder / "solver_iter_3.solverstate").exists()
    for flag in ("bvlc", "threshold", "engine", "ddl_update", "ddl_align"):
        assert (f"-{flag} has no effect here" in said) == (flag in words)


def test_a_training_goes_on_from_its_snapshot_and_from_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "-solver", "solver.prototxt"]) == 0
    Path("solver.prototxt").write_text(SOLVER.replace("max_iter: 3", "max_iter: 4"))
    assert main(["train", "-solver", "solver.prototxt", "-snapshot", "solver_iter_3.solverstate"]) == 0
    said = capsys.readouterr().err.partition("Resuming from solver_iter_3.solverstate")[2]
    assert re.findall(r"Iteration (\d+) \(", said) == ["3"]
    assert (
        main(["train", "-solver", "solver.prototxt", "-weights", "solver_iter_3.caffemodel,solver_iter_4.caffemodel"])
        == 0
    )
    assert capsys.readouterr().err.count("Finetuning from solver_iter_") == 2


class Interrupted(torch.nn.Module):
    """Sends this process a SIGINT and a SIGHUP in its second forward."""

    def __init__(self, parameter: Message, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, bottom: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        if self.forwards == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGHUP)
        return bottom * 1


@pytest.mark.parametrize(
    ("flags", "snapshots"),
    [
        ("", {2}),  # the larger of stop and snapshot
        ("-sigint_effect snapshot -sighup_effect none", {2, 3}),
        ("-sigint_effect none -sighup_effect stop", {2}),
        ("-sigint_effect none -sighup_effect=none", {3}),
    ],
)
def test_signals_have_the_effect_that_the_flags_say(
    flags: str, snapshots: set[int], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register_layer("Interrupted", Interrupted)
    layer = (
        'layer { name: "s" type: "Interrupted" bottom: "ip" top: "s" } layer { name: "n" type: "Silence" bottom: "s" }'
    )
    Path("net.prototxt").write_text(NET + layer)
    assert main(["train", "-solver", "solver.prototxt", *flags.split()]) == 0
    assert {int(path.stem.rpartition("_")[2]) for path in folder.glob("*.solverstate")} == snapshots
    assert ("Optimization stopped early." in capsys.readouterr().err) == (3 not in snapshots)


def test_a_model_is_scored_as_its_blobs_say(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "-solver", "solver.prototxt"])
    capsys.readouterr()
    assert main(["test", "-model", "net.prototxt", "-weights", "solver_iter_3.caffemodel", "-iterations", "40"]) == 0
    said = capsys.readouterr().err
    assert "Running for 40 iterations." in said
    batches = [float(value) for value in re.findall(r"Batch \d+, loss = (\S+)", said)]
    assert len(batches) == 40
    means = re.findall(r"\] loss = (\S+) \(\* 1 = (\S+) loss\)", said)
    assert float(means[0][0]) == pytest.approx(sum(batches) / 40, rel=1e-4)
    assert re.search(r"\] accuracy = [\d.]+$", said, re.MULTILINE)
    # What a softmax of the trained blobs gives on normal numbers, label 1.
    model = read_binary("solver_iter_3.caffemodel", Model)
    weight, bias = (
        torch.tensor(blob_array(blob)) for layer in model.layer if layer.name == "ip" for blob in layer.blobs
    )
    scores = torch.randn(100_000, 36, generator=torch.Generator().manual_seed(0)) @ weight.T + bias
    expected = torch.nn.functional.cross_entropy(scores, torch.ones(len(scores), dtype=torch.long))
    assert sum(batches) / 40 == pytest.approx(float(expected), rel=0.2)


def test_layers_that_a_model_lacks_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """They are scored, or trained on, with random blobs."""
    model = "solver_iter_3.caffemodel"
    said = "Not in the model, and as their fillers made them: 'score'"
    main(["train", "-solver", "solver.prototxt"])
    assert main(["test", "-model", "net.prototxt", "-weights", model, "-iterations", "1"]) == 0
    assert "Not in the model" not in capsys.readouterr().err
    assert main(["test", "-model", "net.prototxt", "-weights", model, "-iterations", "1", "-stage", "deep"]) == 0
    assert said in capsys.readouterr().err
    assert main(["train", "-solver", "solver.prototxt", "-weights", model, "-stage", "deep"]) == 0
    assert said in capsys.readouterr().err


def test_stages_choose_layers_of_the_training_net_alone_as_in_caffe(capsys: pytest.CaptureFixture[str]) -> None:
    Path("net.prototxt").write_text(NET.replace("include { phase: TEST }", 'include { phase: TEST not_stage: "deep" }'))
    Path("solver.prototxt").write_text(SOLVER.replace("max_iter: 3", "max_iter: 1 test_iter: 1 test_interval: 1"))
    for stage, names in (("", {"ip"}), ("deep", {"ip", "score"})):
        assert main(["train", "-solver", "solver.prototxt", "-stage", stage]) == 0
        assert {layer.name for layer in read_binary("solver_iter_1.caffemodel", Model).layer if layer.blobs} == names
        assert "Test net output #0: accuracy" in capsys.readouterr().err


def test_help_shows_how_to_begin(capsys: pytest.CaptureFixture[str]) -> None:
    begin = "caffe train -solver s.prototxt"
    for words, said in (([], begin), (["help"], begin), (["-help"], begin), (["train", "-help"], "-sigint_effect")):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 0
        assert said in capsys.readouterr().out


def test_too_little_memory_is_one_line_that_names_lms(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = InnerProduct.forward

    def full(layer: InnerProduct, bottom: torch.Tensor) -> torch.Tensor:
        if bottom.is_meta:  # while the net is built
            return forward(layer, bottom)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(InnerProduct, "forward", full)
    assert main(["time", "-model", "net.prototxt"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.match(r"E\d{4} .*\] CUDA out of memory. .*; in layer 'ip' .*: train with -lms 1000", last), last


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InnerProduct, "forward", lambda *_: signal.default_int_handler(signal.SIGINT, None))
    assert main(["time", "-model", "net.prototxt"]) == 130


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "train -solver solver.prototxt -ddl -mode",
            "-ddl needs a launcher, and none started this process. .* ddlrun -np 2 caffe train",
        ),
        ("train -solver nowhere.prototxt", "nowhere.prototxt: cannot be read"),
        ("train -solver solver.prototxt -snapshot nowhere.solverstate", "nowhere.solverstate: cannot be read"),
        ("train -solver solver.prototxt -snapshot a -weights b", "-snapshot and -weights are both given"),
        ("train -solver solver.prototxt -lms_frac 0.5", "-lms_frac needs -lms"),
        ("train -solver solver.prototxt -lms 1 -lms_frac 2", "-lms_frac is 2: give a share of the memory"),
        ("train -solver solver.prototxt -gpu 99", "there is no GPU 99"),
        ("train -solver solver.prototxt -gpu x", "-gpu x: give the number of a GPU, several"),
        ("train -solver solver.prototxt -gpu 0,0", "-gpu 0,0 names a GPU twice"),
        ("test -model net.prototxt -weights solver.prototxt", "solver.prototxt: "),
    ],
)
def test_an_error_is_one_line_with_what_to_do(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.match(rf"E\d{{4}} .*\] .*{said}", last), last


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train -solver solver.prototxt -batch 3", "-batch=3"),
        ("time -model net.prototxt -iterations 0", "0 is no number above 0"),
        ("train -solver solver.prototxt -sigint_effect die", "invalid choice: 'die'"),
    ],
)
def test_a_flag_that_is_not_caffes_is_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_several_gpus_are_one_process_each_under_ddlrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    lines: list[list[str]] = []

    def execute(program: str, line: list[str]) -> None:
        lines.append(line)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", execute)
    words = ["train", "-solver", "solver.prototxt", "-gpu", "all", "-lms", "100"]
    monkeypatch.setattr(sys, "orig_argv", ["python", "my_caffe.py", *words])
    with pytest.raises(SystemExit):
        main(words)
    assert Path(lines[0][0]).name == "ddlrun"
    assert lines[0][1:] == ["-np", "2", sys.executable, "my_caffe.py", *words]


def test_several_gpus_from_a_notebook_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "ipykernel_launcher", "-f", "kernel.json"])
    assert main(["train", "-solver", "solver.prototxt", "-gpu", "all"]) == 1
    assert "start this program by ddlrun -np 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "local_ranks", "taken"),
    [
        ((), (0, 1), [0, 1]),
        ((2, 1), (0, 1), [2, 1]),
        ((1,), (0,), [1]),
        ((), (0, 1, 2, 3), "rank 3 of its host, from 0, and the host has 3"),
        ((1,), (0, 1), "rank 1 of its host, from 0, and -gpu names 1"),
    ],
)
def test_each_rank_of_a_host_has_a_gpu_of_its_own_or_all_end(
    gpus: tuple[int, ...], local_ranks: tuple[int, ...], taken: list[int] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ranks(Job):
        def most(self, number: int) -> int:  # what one rank lacks, every rank knows
            return int(isinstance(taken, str))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    found: list[int] = []
    for local in local_ranks:
        job = Ranks(local, 2 * len(local_ranks), local)
        try:
            found.append(devices.own(gpus, job, Log(1), wanted=True).index)
        except CaffeError as error:
            last = str(error)
    assert found == (taken if isinstance(taken, list) else [])
    assert isinstance(taken, list) or taken in last


def test_a_rank_that_sees_one_gpu_only_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `srun --gpus-per-task=1`, where this is rank 1 of its host."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    monkeypatch.setattr(Job, "most", lambda self, number: number)
    monkeypatch.setenv("SLURM_LOCALID", "0")  # ddlrun inside a task
    with pytest.raises(CaffeError, match="each rank needs a GPU of its own"):
        devices.own((), Job(1, 2, 1), Log(1), wanted=True)
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert devices.own((), Job(1, 2, 1), Log(1), wanted=True).index == 0


def test_a_device_id_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(CaffeError, match="device_id is 5: there are 2 GPUs, from 0"):
        devices.own((), Job(), Log(), wanted=True, default=5)
