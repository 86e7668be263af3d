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
from bascule_caffe.messages import FillerParameter

Shape = tuple[int, ...]
T = TypeVar("T")


class Source(Protocol):
    """What a data layer reads: the shapes of its tops, and the next batch, one tensor a top."""

    shapes: Sequence[Shape]

    def __next__(self) -> Sequence[Tensor]: ...


Factory = Callable[[Message, str, object], Source]
Builder = Callable[[Message, list[Shape]], nn.Module]

TYPES: dict[str, type[Layer]] = {}  # Caffe's own, filled by the modules of layers
DATA: dict[str, Factory] = {}
USERS: dict[str, Builder] = {}

LEFT_OUT = {
    "SSD": ("AnnotatedData", "DetectionEvaluate", "DetectionOutput", "MultiBoxLoss", "PriorBox"),
    "R-FCN": ("BoxAnnotatorOHEM", "PSROIPooling"),
    "data of windows": ("WindowData",),
}


def layer(kind: str) -> Callable[[type[Layer]], type[Layer]]:
    """Registers one of Caffe's own layers."""

    def register(cls: type[Layer]) -> type[Layer]:
        TYPES[kind] = cls
        return cls

    return register


def register_data(kind: str, factory: Factory) -> None:
    """Registers a data layer: `factory(parameter, phase, data)` gives its source; `data` is what the Net was given."""
    DATA[kind] = factory


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
            unknown = ", ".join(f"'{field.name}'" for field in parameter.foreign)
            raise NetError(f"a layer of Caffe's own has no field {unknown}: remove it, or register a type of your own")
        if cls is None:
            return DataLayer(parameter, DATA[kind](parameter, phase, data))
        return cls(parameter, shapes, phase)
    names = [kind]
    if kind == "Python":
        python = parameter.python_param
        names = [f"{python.module}.{python.layer}", python.layer]
    for name in names:
        if name in USERS:
            return UserLayer(parameter, shapes, phase, USERS[name](parameter, shapes))
    for what, kinds in LEFT_OUT.items():
        if kind in kinds:
            raise NetError(
                f"{what} is left out: register a module of yours, bascule_caffe.register_layer('{kind}', ...)"
            )
    raise NetError(
        f"its type is unknown: register a module of yours, bascule_caffe.register_layer('{names[-1]}', ...), "
        f"or use one of {', '.join(sorted({*TYPES, *DATA, *USERS}))}"
    )


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
            if len(names) < least or (most is not None and len(names) > most):
                wanted = f"{least}" if least == most else f"at least {least}" if most is None else f"{least} to {most}"
                raise NetError(f"it has {len(names)} {what}s, and takes {wanted}")
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
        self.blobs.append(nn.Parameter(torch.empty(tuple(shape), device="meta")))
        self.fillers.append(filler if filler is not None else FillerParameter(**default))
        self.shapes.append(tuple(shape))

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
        return [tuple(shape) for shape in self.source.shapes]

    def forward(self) -> list[Tensor]:
        return list(next(self.source))


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
        self.statistics = _buffers_as_parameters(module)
        self.blobs = nn.ParameterList([*learnt, *self.statistics])
        self.shapes = [tuple(blob.shape) for blob in self.blobs]

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


def axis_of(axis: int, shape: Sequence[int], field: str = "axis") -> int:
    """An axis from 0 of one that may be counted from the end. Raises NetError if the shape has no such axis."""
    if not -len(shape) <= axis < len(shape):
        raise NetError(f"{field} is {axis}, and its bottom {dims(shape)} has {len(shape)} axes")
    return axis % len(shape)


def each(values: Sequence[T], count: int, field: str) -> list[T]:
    """A field's values, one for each of `count`; a single one is for all. Raises NetError for another number."""
    if len(values) not in (1, count):
        raise NetError(f"it has {len(values)} of {field}, and takes 1 or {count}")
    return list(values) if len(values) == count else list(values) * count


def dims(shape: Sequence[int]) -> str:
    """A shape as people write it: 64x3x224x224."""
    return "x".join(map(str, shape)) or "()"
