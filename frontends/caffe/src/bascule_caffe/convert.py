"""Caffe's models in other forms, and back: `caffe convert`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bascule_caffe.errors import FileError, NetError
from bascule_caffe.layer import DataLayer, place_of
from bascule_caffe.messages import LateFile, NetParameter, parse_text, write_binary, write_file, writing
from bascule_caffe.net import Net
from bascule_caffe.snapshot import load_model

_MODULE = '''"""{name}, as `caffe convert` wrote it from {source}."""

from pathlib import Path

from bascule_caffe import Net, NetParameter
from bascule_caffe.convert import load_safetensors
from bascule_caffe.messages import parse_string

PROTOTXT = """\\
{text}"""


def build(weights: str | Path = Path(__file__).with_name("{weights}")) -> Net:
    """The net with its weights: call it with its inputs by name, and it returns its outputs by name."""
    net = Net(parse_string(PROTOTXT, NetParameter, "{source}"), "{phase}", {level}, {stages})
    load_safetensors(net, weights)
    return net
'''
_MARK = b"as `caffe convert` wrote it from"  # in the first line of a module


def convert(
    net_path: str | Path,
    model_path: str | Path,
    output_path: str | Path,
    phase: str = "TEST",
    level: int = 0,
    stages: Sequence[str] = (),
) -> list[str]:
    """Converts a net and its model to what the output's suffix names; lines that say what was written.

    Args:
        net_path: the .prototxt.
        model_path: the .caffemodel or .caffemodel.h5, or a .safetensors that `caffe convert` wrote.
        output_path: .safetensors, beside which a Python module is written that builds the net; .pt2, a program of
            torch.export, for batches of any size if the net allows it; or .caffemodel.
        phase: as Net.
        level: as Net.
        stages: as Net.

    Raises:
        NetError: the suffix is another one.
        NetError, FileError: the net, the model or the output cannot be read or written.
    """
    output = Path(output_path)
    if output.suffix not in (".safetensors", ".pt2", ".caffemodel"):
        raise NetError(f"the output is '{output}'; its suffix must be .safetensors, .pt2 or .caffemodel")
    net = Net(parse_text(net_path, NetParameter), phase, level, stages)
    safe = Path(model_path).suffix == ".safetensors"
    taken = load_safetensors(net, model_path) if safe else load_model(str(model_path), net)
    module = output.with_name(re.sub(r"\W", "_", output.stem) + ".py")
    if output.suffix == ".safetensors" and module.exists() and _MARK not in module.read_bytes()[:4096]:
        raise FileError(
            f"{module}: `caffe convert` did not write this file, so it does not overwrite it: give -o another name"
        )
    lines = [f"{model_path}: {len(taken)} layers read"]
    if left := net.left_out(taken):
        lines.append(f"not in the model, and as their fillers made them: {left}")
    if output.suffix == ".caffemodel":
        write_binary(output, net.to_parameter())
    elif output.suffix == ".pt2":
        program = _exported(net, net_path)
        with writing(output) as part, LateFile(part, "wb") as content:
            torch.export.save(program, content)
    else:
        save_safetensors(net, output)
        text = Path(net_path).read_text(encoding="utf-8-sig").replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
        code = _MODULE.format(
            name=net.name or output.stem,
            source=Path(net_path).name,
            text=text,
            weights=output.name,
            phase=phase,
            level=level,
            stages=tuple(stages),
        )
        write_file(module, code.encode())
        lines.append(f"{module} written: its build() makes the net")
    return [*lines, f"{output} written"]


def save_safetensors(net: Net, path: str | Path) -> None:
    """Writes a net's blobs, each as its layer's name and its index: "conv1.0" are weights, "conv1.1" are biases.

    Raises:
        FileError: the file cannot be written.
    """
    blobs: dict[str, Tensor] = {}
    seen: set[int] = set()
    for layer in net.layers:
        for index in range(len(layer.blobs)):
            blob = layer.blob(index).detach().cpu().contiguous()
            memory = blob.untyped_storage().data_ptr()
            blobs[f"{layer.name}.{index}"] = blob.clone() if memory in seen else blob  # two names cannot have the same
            seen.add(memory)
    with writing(path) as part:
        try:
            save_file(blobs, part)
        except Exception as error:  # as in load_safetensors
            raise FileError(f"{path}: cannot be written: {error}") from error


def load_safetensors(net: Net, path: str | Path) -> list[str]:
    """Copies blobs that `save_safetensors` wrote into a net's layers; the names of these layers.

    Raises:
        FileError: the file cannot be read, or is damaged.
        NetError: as Net.load_caffemodel.
    """
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except Exception as error:  # safetensors has an exception class of its own, and raises OSError, too
        raise FileError(f"{path}: cannot be read as safetensors: {error}") from error
    blobs: dict[str, dict[int, Tensor]] = {}
    for key, tensor in tensors.items():
        layer, dot, index = key.rpartition(".")
        if not dot or not index.isdecimal():
            raise FileError(f"{path}: has '{key}', which is no blob that `caffe convert` writes, such as 'conv1.0'")
        blobs.setdefault(layer, {})[int(index)] = tensor
    return net.load_blobs({name: [parts[i].numpy() for i in sorted(parts)] for name, parts in blobs.items()}, str(path))


class _Positional(nn.Module):
    """A net that takes its inputs in their order, and returns its outputs in theirs."""

    def __init__(self, net: Net, names: list[str]) -> None:
        super().__init__()
        self.net, self.names = net, names

    def forward(self, *blobs: Tensor) -> dict[str, Tensor]:
        return self.net.compute(dict(zip(self.names, blobs, strict=True)))[0]


def _exported(net: Net, source: str | Path) -> torch.export.ExportedProgram:
    names = [top for layer in net.layers if layer.kind == "Input" for top in layer.tops]
    if data := [layer for layer in net.layers if isinstance(layer, DataLayer)]:
        way = "a .pt2 takes its data from its caller: put an Input layer in its place"
        raise NetError(f"{place_of(data[0].parameter)}: it reads data, and {way}")
    # A batch of 1 would be taken as fixed.
    blobs = tuple(torch.rand(max(2, net.shapes[name][0]), *net.shapes[name][1:]) for name in names)
    sizes = tuple({0: torch.export.Dim.AUTO} for _ in names)
    try:
        return torch.export.export(_Positional(net, names), blobs, dynamic_shapes=(sizes,))
    except Exception as error:  # torch.export has many classes; a layer in which it fails is in a note, or said
        said = "; ".join([next(iter(str(error).splitlines()), type(error).__name__), *getattr(error, "__notes__", ())])
        raise NetError(
            f"{source}: torch.export cannot follow the net for a .pt2: {said}. "
            "Convert it to .safetensors: the Python module beside it runs every net"
        ) from error
