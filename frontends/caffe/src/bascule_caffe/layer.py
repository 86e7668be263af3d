"""A layer, the registry of types, and the layers of users.

A layer is built from its LayerParameter and its bottoms' shapes. Its blobs are on the meta device until the net has
checked every shape, and are filled then.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from google.protobuf.message import Message
from torch import Tensor, nn

from bascule_caffe.errors import NetError
from bascule_caffe.fillers import fill
from bascule_caffe.messages import FillerParameter, no_field

Shape = tuple[int, ...]
T = TypeVar("T")


class Source(Protocol):
    """What a data layer reads: the shapes of its tops, and the next batch, one tensor a top."""

    shapes: Sequence[Shape]

    def __next__(self) -> Sequence[Tensor]: ...


Factory = Callable[[Message, str, object], Source]
Builder = Callable[[Message, list[Shape]], nn.Module]

TYPES: dict[str, type[Layer]] = {}  # Caffe's own, filled by the modules of layers
DATA: dict[str, Factory] = {}  # filled by data.py; a factory takes the parameter, the phase and the Net's `data`
USERS: dict[str, Builder] = {}

LEFT_OUT = {
    **dict.fromkeys(("AnnotatedData", "DetectionEvaluate", "DetectionOutput", "MultiBoxLoss", "PriorBox"), "SSD"),
    **dict.fromkeys(("BoxAnnotatorOHEM", "PSROIPooling"), "R-FCN"),
    "WindowData": "data of windows",
}


def layer(kind: str) -> Callable[[type[Layer]], type[Layer]]:
    """Registers one of Caffe's own layers."""

    def register(cls: type[Layer]) -> type[Layer]:
        TYPES[kind] = cls
        return cls

    return register


def register_layer(kind: str, builder: Builder) -> None:
    """Registers a module of yours for a type of layer that is not Caffe's, or for a Python layer.

    Args:
        kind: the layer's type; for `type: "Python"`, the `layer` of its python_param, or its `module.layer`.
        builder: called with the LayerParameter and the bottoms' shapes, such as an nn.Module's class that takes both.
            The module takes the bottoms and returns a tensor a top. Its parameters become the layer's blobs, in their
            order; its persistent floating-point buffers follow, and are not learnt. The module must change these in
            place. `messages.foreign(parameter, "interp_param")` has a field that Caffe itself does not know, as text.

    A module that gives data has no bottoms, and its tops' shapes as `top_shapes`.

    Raises:
        ValueError: the type is Caffe's own.
    """
    if kind in TYPES or kind in DATA:
        raise ValueError(f"'{kind}' is a layer of Caffe's own and cannot be replaced: choose another type")
    USERS[kind] = builder


def build(parameter: Message, shapes: list[Shape], phase: str, data: object) -> Layer:
    """The layer of a LayerParameter over bottoms of these shapes.

    Raises:
        NetError: its type is unknown or left out, or a field does not fit; says no place: the net adds it.
    """
    kind = parameter.type
    cls: type[Layer] | None = TYPES.get(kind)
    if kind in DATA or cls is not None:
        if parameter.foreign:
            raise NetError(no_field(type(parameter), parameter.foreign[0].name))
        if cls is None:
            return DataLayer(parameter, DATA[kind](parameter, phase, data))
        return cls(parameter, shapes, phase)
    python = parameter.python_param
    names = [f"{python.module}.{python.layer}", python.layer] if kind == "Python" else [kind]
    for name in names:
        if name in USERS:
            return UserLayer(parameter, shapes, phase, USERS[name](parameter, shapes))
    way = f"register a module of yours, bascule_caffe.register_layer('{names[-1]}', ...)"
    require(kind not in LEFT_OUT, f"{LEFT_OUT.get(kind)} is left out: {way}")
    raise NetError(f"its type is unknown: {way}, or use one of {', '.join(sorted({*TYPES, *DATA, *USERS}))}")


class Layer(nn.Module):
    """A layer: takes its bottoms, returns its tops.

    Attributes:
        parameter: the LayerParameter.
        name: the layer's name.
        kind: its type, such as "Convolution".
        bottoms: the names of its bottoms.
        tops: the names of its tops; the net adds one to a loss that has none.
        blobs: its parameters in Caffe's order.
    """

    bottoms_allowed: tuple[int, int | None] = (1, 1)  # at least, at most
    tops_allowed: tuple[int, int | None] = (1, 1)
    is_loss = False

    def __init__(self, parameter: Message, shapes: list[Shape], phase: str) -> None:
        super().__init__()
        self.parameter = parameter
        self.name, self.kind = str(parameter.name), str(parameter.type)
        self.bottoms: list[str] = list(parameter.bottom)
        self.tops: list[str] = list(parameter.top)
        self.blobs = nn.ParameterList()
        self.fillers: list[Message] = []
        self.shapes: list[Shape] = []  # the blobs'
        self.train(phase == "TRAIN")
        ends = [("bottom", self.bottoms, self.bottoms_allowed), ("top", self.tops, self.tops_allowed)]
        for what, names, (least, most) in ends:
            least = 0 if what == "top" and self.is_loss else least
            wanted = f"{least}" if least == most else f"at least {least}" if most is None else f"{least} to {most}"
            allowed = least <= len(names) and (most is None or len(names) <= most)
            require(allowed, f"it has {len(names)} {what}s, and takes {wanted}")
        self.setup(shapes)

    def setup(self, shapes: list[Shape]) -> None:
        """Reads the fields and adds the blobs; `shapes` are the bottoms'."""

    def infer(self, shapes: list[Shape]) -> list[Shape]:
        """The tops' shapes: those that a forward on the meta device has."""
        with torch.no_grad():
            tops = self(*(torch.empty(shape, device="meta") for shape in shapes))
        return [tuple(top.shape) for top in tops]

    def add_blob(self, shape: Sequence[int], filler: Message | None = None, **default: object) -> None:
        """Adds a blob of a shape. It begins as the filler says or, if that is None, as a FillerParameter(**default)."""
        require(0 not in shape, f"its blob {len(self.blobs)} would be {dims(shape)}, which is empty")
        self.blobs.append(nn.Parameter(torch.empty(tuple(shape), device="meta")))
        self.fillers.append(filler if filler is not None else FillerParameter(**default))
        self.shapes.append(tuple(shape))

    def add_weight_and_bias(self, shape: Sequence[int], fields: Message) -> None:
        """Adds a blob for the weights and, if bias_term says so, one for the biases."""
        self.add_blob(shape, fields.weight_filler)
        if fields.bias_term:
            self.add_blob([fields.num_output], fields.bias_filler)

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """The first blob, and the second one if there is one."""
        return self.blob(0), self.blob(1) if len(self.blobs) > 1 else None

    def fill(self, index: int, generator: torch.Generator | None) -> None:
        """Makes a blob as its filler says."""
        self.blobs[index] = nn.Parameter(fill(self.fillers[index], self.shapes[index], generator))

    def learns(self, index: int) -> bool:
        """Whether a blob is learnt: statistics are not."""
        return True

    def blob(self, index: int) -> Tensor:
        """A blob in this layer's own shape, even if the layer that it is shared with has it in another one."""
        blob: Tensor = self.blobs[index]
        return blob if blob.shape == self.shapes[index] else blob.view(self.shapes[index])

    def __call__(self, *bottoms: Tensor) -> list[Tensor]:
        tops = super().__call__(*bottoms)
        return [tops] if isinstance(tops, Tensor) else list(tops)


class DataLayer(Layer):
    """A layer that reads a source of data."""

    bottoms_allowed = (0, 0)
    tops_allowed = (1, None)

    def __init__(self, parameter: Message, source: Source) -> None:
        self.source: Source
        super().__init__(parameter, [], "TRAIN")
        self.source = source

    def infer(self, shapes: list[Shape]) -> list[Shape]:
        return [tuple(shape) for shape in self.source.shapes][: len(self.tops)]

    def forward(self) -> list[Tensor]:
        return list(next(self.source))[: len(self.tops)]  # labels may be left out


class UserLayer(Layer):
    """A module of a user's as a layer.

    Its blobs are its parameters and, after them, its statistics: the persistent floating-point buffers, such as
    BatchNorm2d's. These become parameters that are not learnt, so that snapshots hold them.
    """

    bottoms_allowed = (0, None)
    tops_allowed = (0, None)

    def __init__(self, parameter: Message, shapes: list[Shape], phase: str, module: nn.Module) -> None:
        super().__init__(parameter, shapes, phase)
        self.module = module.train(self.training)
        learnt = list(module.parameters())
        self.learnt = len(learnt)
        self.blobs = nn.ParameterList([*learnt, *_buffers_as_parameters(module)])
        self.shapes = [tuple(blob.shape) for blob in self.blobs]

    def fill(self, index: int, generator: torch.Generator | None) -> None:
        """The module has filled it."""

    def learns(self, index: int) -> bool:
        return index < self.learnt

    def infer(self, shapes: list[Shape]) -> list[Shape]:
        if hasattr(self.module, "top_shapes"):
            made: list[Shape] = list(map(tuple, cast(Any, self.module).top_shapes))
            return made
        module = copy.deepcopy(self.module).to("meta")  # a copy: a module may have state
        with torch.no_grad():
            tops = module(*(torch.empty(shape, device="meta") for shape in shapes))
        return [tuple(top.shape) for top in ([tops] if isinstance(tops, Tensor) else tops)]

    def forward(self, *bottoms: Tensor) -> Tensor | list[Tensor]:
        if self.module.training != self.training:  # a training net and its test nets share the module
            self.module.train(self.training)
        tops: Tensor | list[Tensor] = self.module(*bottoms)
        return tops


def _buffers_as_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Turns the module's persistent floating-point buffers into parameters without a gradient."""
    made: dict[int, nn.Parameter] = {}  # by the buffer: modules can share one
    for part in module.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            if buffer.is_floating_point() and name not in part._non_persistent_buffers_set:
                delattr(part, name)
                part.register_parameter(name, made.setdefault(id(buffer), nn.Parameter(buffer, requires_grad=False)))
    return list(made.values())


def place_of(parameter: Message) -> str:
    """A layer's file and line, its name and its type, for an error."""
    return f"{parameter.location}: layer '{parameter.name}' ({parameter.type})".removeprefix(": ")


def require(condition: object, message: str) -> None:
    """Raises NetError with the message, unless the condition holds. The net puts the layer's place before it."""
    if not condition:
        raise NetError(message)


def axis_of(axis: int, shape: Sequence[int], field: str = "axis") -> int:
    """An axis from 0 of one that may be counted from the end. Raises NetError if the shape has no such axis."""
    require(-len(shape) <= axis < len(shape), f"{field} is {axis}, and its bottom {dims(shape)} has {len(shape)} axes")
    return axis % len(shape)


def each(values: Sequence[T], count: int, field: str) -> list[T]:
    """A field's values, one for each of `count`; a single one is for all. Raises NetError for another number."""
    require(len(values) in (1, count), f"it has {len(values)} of {field}, and takes 1 or {count}")
    return list(values) if len(values) == count else list(values) * count


def dims(shape: Sequence[int]) -> str:
    """A shape as people write it: 64x3x224x224."""
    return "x".join(map(str, shape)) or "()"
