"""Models in other forms, and back; timing and devices."""

import importlib.util
import re

import pytest
import torch

from bascule_caffe import CaffeError, FileError, NetError, devices
from bascule_caffe.convert import convert, load_safetensors
from bascule_caffe.messages import write_binary
from bascule_caffe.timing import time_net

TEXT = """name: "small \\"net\\""
layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 1 dim: 3 dim: 8 dim: 8 } } }
layer { name: "c.1/x" type: "Convolution" bottom: "data" top: "c" convolution_param { num_output: 4 kernel_size: 3 } }
layer { name: "n" type: "BatchNorm" bottom: "c" top: "c" }
layer { name: "s" type: "Scale" bottom: "c" top: "c" scale_param { bias_term: true } }
layer { name: "r" type: "ReLU" bottom: "c" top: "c" }
layer { name: "p" type: "Pooling" bottom: "c" top: "p" pooling_param { pool: AVE kernel_size: 3 stride: 2 } }
layer { name: "ip" type: "InnerProduct" bottom: "p" top: "ip" inner_product_param { num_output: 5 } }
layer { name: "prob" type: "Softmax" bottom: "ip" top: "prob" }
"""


@pytest.fixture
def files(build, tmp_path):
    """A prototxt and its model in a folder, and the net."""
    (tmp_path / "net.prototxt").write_text("\ufeff" + TEXT, encoding="utf-8")  # as Windows' editors write it
    net = build(TEXT).float()
    write_binary(tmp_path / "net.caffemodel", net.to_parameter())
    return tmp_path, net


def test_to_safetensors_with_a_module_that_builds_the_net_and_back(files):
    folder, net = files
    lines = convert(folder / "net.prototxt", folder / "net.caffemodel", folder / "my-net.safetensors")
    assert [line.rpartition("/")[2] for line in lines] == [
        "net.caffemodel: 4 layers read",
        "my_net.py written: its build() makes the net",
        "my-net.safetensors written",
    ]
    assert (folder / "my-net.safetensors").stat().st_mode == (folder / "net.prototxt").stat().st_mode
    spec = importlib.util.spec_from_file_location("my_net", folder / "my_net.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(module.build()(data=x)["prob"], net(data=x)["prob"])
    convert(folder / "net.prototxt", folder / "my-net.safetensors", folder / "again.caffemodel")
    assert (folder / "again.caffemodel").read_bytes() == (folder / "net.caffemodel").read_bytes()


def test_a_module_that_convert_did_not_write_is_not_overwritten(files):
    folder, _ = files
    arguments = (folder / "net.prototxt", folder / "net.caffemodel", folder / "my-net.safetensors")
    (folder / "my_net.py").write_text("print()\n")
    with pytest.raises(FileError, match=r"my_net.py: `caffe convert` did not write this file"):
        convert(*arguments)
    assert (folder / "my_net.py").read_text() == "print()\n"
    assert not (folder / "my-net.safetensors").exists()
    (folder / "my_net.py").unlink()
    assert convert(*arguments) == convert(*arguments)


@pytest.mark.slow  # torch.export takes seconds
def test_to_a_program_of_torch_export_for_batches_of_any_size(files):
    folder, net = files
    convert(folder / "net.prototxt", folder / "net.caffemodel", folder / "net.pt2")
    program = torch.export.load(folder / "net.pt2").module()
    for size in (1, 5):
        x = torch.rand(size, 3, 8, 8)
        torch.testing.assert_close(program(x)["prob"], net(data=x)["prob"])


@pytest.mark.slow  # torch.export takes seconds
def test_a_layer_that_torch_export_cannot_follow_is_named(build, tmp_path):
    text = """layer { name: "data" type: "Input" top: "data" top: "regions"
      input_param { shape { dim: 1 dim: 3 dim: 8 dim: 8 } shape { dim: 2 dim: 5 } } }
    layer { name: "c" type: "Convolution" bottom: "data" top: "c" convolution_param { num_output: 2 kernel_size: 3 } }
    layer { name: "roi" type: "ROIPooling" bottom: "c" bottom: "regions" top: "roi"
      roi_pooling_param { pooled_h: 2 pooled_w: 2 } }"""
    (tmp_path / "net.prototxt").write_text(text)
    write_binary(tmp_path / "net.caffemodel", build(text).float().to_parameter())
    said = r"net.prototxt: torch.export cannot follow .* layer 'roi' \(ROIPooling\) .*\. Convert it to .safetensors"
    with pytest.raises(NetError, match=said):
        convert(tmp_path / "net.prototxt", tmp_path / "net.caffemodel", tmp_path / "net.pt2")
    assert not (tmp_path / "net.pt2").exists()


def test_conversions_that_cannot_be_leave_nothing(files, build):
    folder, net = files
    before = sorted(folder.iterdir())
    with pytest.raises(ValueError, match=r"'out.onnx'; its suffix must be .safetensors, .pt2 or .caffemodel"):
        convert(folder / "net.prototxt", folder / "net.caffemodel", "out.onnx")
    (folder / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(FileError, match=r"cut.safetensors: cannot be read as safetensors"):
        convert(folder / "net.prototxt", folder / "cut.safetensors", folder / "out.caffemodel")
    (folder / "net.prototxt").write_text(TEXT.replace("stride: 2", "stride: 3"))
    with pytest.raises(NetError, match=r"net.caffemodel: layer 'ip': blob 0 is 5x36, and 5x16 in net"):
        convert(folder / "net.prototxt", folder / "net.caffemodel", folder / "out.safetensors")
    fields = "memory_data_param { batch_size: 1 channels: 3 height: 8 width: 8 }"
    memory = f'layer {{ name: "data" type: "MemoryData" top: "data" top: "label" {fields} }}'
    text = "\n".join([TEXT.splitlines()[0], memory, *TEXT.splitlines()[2:]])
    (folder / "net.prototxt").write_text(text)
    with pytest.raises(NetError, match=r"net.prototxt:2: layer 'data' \(MemoryData\): it reads data, and a .pt2 takes"):
        convert(folder / "net.prototxt", folder / "net.caffemodel", folder / "out.pt2")
    (folder / "net.prototxt").write_text(TEXT)
    with pytest.raises(FileError, match=r"out.safetensors: cannot be written"):
        convert(folder / "net.prototxt", folder / "net.caffemodel", folder / "net.prototxt" / "out.safetensors")
    assert sorted(folder.iterdir()) == sorted([*before, folder / "cut.safetensors"])
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(2)}, folder / "other.safetensors")
    with pytest.raises(FileError, match=r"has 'weight', which is no blob that `caffe convert` writes"):
        load_safetensors(net, folder / "other.safetensors")


@pytest.mark.parametrize("ending", ["safetensors", "pt2"])
def test_a_disk_that_is_full_halfway_leaves_the_last_file(files, ending, files_of_at_most):
    folder, _ = files
    path = folder / f"out.{ending}"
    path.write_bytes(b"old")
    listed = sorted(folder.iterdir())
    wanted = rf"out.{ending}: cannot be written: .*File too large"
    with files_of_at_most(1000), pytest.raises(FileError, match=wanted):
        convert(folder / "net.prototxt", folder / "net.caffemodel", path)
    assert path.read_bytes() == b"old"
    assert sorted(folder.iterdir()) == listed


def test_time_writes_caffes_lines(build):
    loss = 'layer { name: "l" type: "Input" top: "l" input_param { shape { dim: 1 } } }'
    loss += 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "l" }'
    lines: list[str] = []
    time_net(build(TEXT + loss, "TRAIN"), 2, lines.append)
    text = "\n".join(lines)
    assert re.search(r"^Initial loss: \d", text, re.M)
    assert len(re.findall(r"^Iteration: \d forward-backward time: \d+\.\d+ ms\.$", text, re.M)) == 2
    per_layer = dict(re.findall(r"^ *(\S+\tforward|\S+\tbackward): (\S+) ms\.$", text, re.M))
    assert len(per_layer) == 2 * 10
    assert float(per_layer["c.1/x\tforward"]) > 0
    assert float(per_layer["c.1/x\tbackward"]) > 0
    assert float(per_layer["data\tforward"]) == 0
    forward, backward, both = (
        float(re.search(rf"^Average {name}: (\S+) ms\.$", text, re.M)[1])
        for name in ("Forward pass", "Backward pass", "Forward-Backward")
    )
    assert both == pytest.approx(forward + backward, rel=1e-3)


def test_devices_are_described_or_said_to_be_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert devices.described([]) == ["No GPU: PyTorch finds none, and nets run on the CPU."]
    with pytest.raises(CaffeError, match="there is no GPU 3: PyTorch finds no GPU"):
        devices.named("3")
