"""Caffe's commands on a real GPU: the digits of the tutorial, plain and over LMS."""

from __future__ import annotations

import re
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU: torch.cuda.is_available() is False", allow_module_level=True)

pytest.importorskip("lmdb")
pytest.importorskip("sklearn")

from bascule_caffe import devices
from bascule_caffe.cli import main
from bascule_caffe.messages import Model, blob_array, read_binary

pytestmark = pytest.mark.gpu

EXAMPLE = Path(__file__).parents[2] / "examples" / "caffe_digits"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example with its digits, and algorithms that give the same bits each time."""
    for file in EXAMPLE.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("write_lmdb.py", run_name="__main__")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def test_the_gpu_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["device_query", "-gpu", "all"]) == 0
    said = capsys.readouterr()
    assert torch.cuda.get_device_name() in said.out + said.err
    assert len([line for line in devices.described([0]) if line.startswith("Name:")]) == 1


def test_training_over_lms_has_plains_bits_and_the_net_is_tested(capsys: pytest.CaptureFixture[str]) -> None:
    models = []
    for flags in ([], ["-lms", "0", "-lms_frac", "0"]):
        assert main(["train", "-solver", "solver.prototxt", "-gpu", "0", *flags]) == 0
        said = capsys.readouterr().err
        assert "Using GPU 0" in said
        accuracies = re.findall(r"Test net output #\d: accuracy = (\S+)", said)
        assert float(accuracies[-1]) > 0.9, said
        models.append(
            read_binary(max(Path().glob("*.caffemodel"), key=lambda one: int(one.stem.split("_")[-1])), Model)
        )
    for plain, swapped in zip(models[0].layer, models[1].layer, strict=True):
        for blobs in zip(plain.blobs, swapped.blobs, strict=True):
            assert blob_array(blobs[0]).tobytes() == blob_array(blobs[1]).tobytes(), plain.name
    net = ["-model", "lenet.prototxt", "-weights", "lenet_iter_200.caffemodel"]
    assert main(["test", *net, "-iterations", "3", "-gpu", "0"]) == 0
    assert re.search(r"accuracy = 0\.9|accuracy = 1", capsys.readouterr().err)


def test_layers_are_timed_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["time", "-model", "lenet.prototxt", "-iterations", "5", "-gpu", "0"]) == 0
    assert re.search(r"conv1\s+forward: \d", capsys.readouterr().err)
