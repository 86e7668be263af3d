"""Layers that join, cut and rearrange blobs, and those that make them."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from google.protobuf.message import Message
from torch import Tensor
from torch.nn import functional

from bascule_caffe import fillers
from bascule_caffe.errors import NetError
from bascule_caffe.layer import Layer, Shape, axis_of, dims, each, layer, require
from bascule_caffe.messages import FillerParameter


@layer("Input")
class Input(Layer):
    """Blobs that are given to the net's forward."""

    bottoms_allowed = (0, 0)
    tops_allowed = (1, None)

    def infer(self, shapes: list[Shape]) -> list[Shape]:
        return each([tuple(shape.dim) for shape in self.parameter.input_param.shape], len(self.tops), "shape")


@layer("DummyData")
class DummyData(Layer):
    """Blobs from fillers: constant ones once, others anew at each forward."""

    bottoms_allowed = (0, 0)
    tops_allowed = (1, None)

    def setup(self, shapes: list[Shape]) -> None:
        dummy, count = self.parameter.dummy_data_param, len(self.tops)
        given: list[Shape] = [tuple(shape.dim) for shape in dummy.shape]
        old = {name: list(getattr(dummy, name)) for name in ("num", "channels", "height", "width")}
        if any(old.values()):
            require(not given, "it has shape, and num, channels, height or width: give one form")
            given = list(zip(*(each(sizes, count, name) for name, sizes in old.items()), strict=True))
        self.given = each(given, count, "shape")
        made = each(list(dummy.data_filler) or [FillerParameter()], count, "data_filler")
        self.parts = list(zip(made, self.given, strict=True))
        for index, (filler, shape) in enumerate(self.parts):
            constant = fillers.fill(filler, shape) if filler.type == "constant" else None
            self.register_buffer(f"top{index}", constant, persistent=False)

    def infer(self, shapes: list[Shape]) -> list[Shape]:
        return self.given

    def forward(self) -> list[Tensor]:
        constants = [getattr(self, f"top{index}") for index in range(len(self.parts))]
        return [fillers.fill(*part) if top is None else top for top, part in zip(constants, self.parts, strict=True)]


@layer("Parameter")
class Parameter(Layer):
    """A blob that is learnt, as a top."""

    bottoms_allowed = (0, 0)

    def setup(self, shapes: list[Shape]) -> None:
        self.add_blob(self.parameter.parameter_param.shape.dim)

    def forward(self) -> Tensor:
        return self.blob(0)


@layer("Silence")
class Silence(Layer):
    """Takes blobs, so that they are no outputs."""

    bottoms_allowed = (1, None)
    tops_allowed = (0, 0)

    def forward(self, *bottoms: Tensor) -> list[Tensor]:
        return []


@layer("Split")
class Split(Layer):
    """Its bottom under several names."""

    tops_allowed = (1, None)

    def forward(self, bottom: Tensor) -> list[Tensor]:
        return [bottom] * len(self.tops)


def _named_axis(fields: Message, old: str, shape: Shape) -> int:
    """The axis in a layer's fields; `old` is what it was called before. Raises NetError if both names are there."""
    require(not (fields.HasField("axis") and fields.HasField(old)), f"it has axis and {old}: give one of them")
    return axis_of(getattr(fields, old if fields.HasField(old) else "axis"), shape)


@layer("Concat")
class Concat(Layer):
    """Its bottoms behind one another along an axis."""

    bottoms_allowed = (1, None)

    def setup(self, shapes: list[Shape]) -> None:
        self.axis = _named_axis(self.parameter.concat_param, "concat_dim", shapes[0])
        rest = {(len(shape), *shape[: self.axis], *shape[self.axis + 1 :]) for shape in shapes}
        require(len(rest) == 1, f"its bottoms must agree but for axis {self.axis}")

    def forward(self, *bottoms: Tensor) -> Tensor:
        return torch.cat(bottoms, self.axis)


@layer("Slice")
class Slice(Layer):
    """Its bottom cut along an axis, at the slice points or into equal parts."""

    tops_allowed = (1, None)

    def setup(self, shapes: list[Shape]) -> None:
        cut = self.parameter.slice_param
        self.axis, self.points = _named_axis(cut, "slice_dim", shapes[0]), list(cut.slice_point)

    def forward(self, bottom: Tensor) -> list[Tensor]:
        size, count, points = bottom.shape[self.axis], len(self.tops), self.points
        has = f"axis {self.axis} of its bottom has {size}"
        if points:
            rising = len(points) == count - 1 and all(a < b for a, b in pairwise([0, *points, size]))
            require(rising, f"{has}, which slice_point {points} does not cut into {count} tops")
        else:
            require(size % count == 0, f"{has}, which {count} tops do not divide")
        return list(bottom.tensor_split(points or count, self.axis))


@layer("Flatten")
class Flatten(Layer):
    """Its bottom with the axes from `axis` to `end_axis` as one."""

    def setup(self, shapes: list[Shape]) -> None:
        flatten = self.parameter.flatten_param
        self.axis, self.end = axis_of(flatten.axis, shapes[0]), axis_of(flatten.end_axis, shapes[0], "end_axis")
        require(self.axis <= self.end, f"axis is {self.axis}, which is after end_axis {self.end}")

    def forward(self, bottom: Tensor) -> Tensor:
        return bottom.flatten(self.axis, self.end)


@layer("Reshape")
class Reshape(Layer):
    """Its bottom in another shape, in which 0 keeps an axis and -1 takes what is left."""

    def forward(self, bottom: Tensor) -> Tensor:
        reshape, shape = self.parameter.reshape_param, bottom.shape
        start = reshape.axis if reshape.axis >= 0 else len(shape) + reshape.axis + 1
        end = len(shape) if reshape.num_axes == -1 else start + reshape.num_axes
        wanted = list(reshape.shape.dim)
        kept = [start + index + 1 for index, dim in enumerate(wanted) if dim == 0]
        if not 0 <= start <= end <= len(shape) or max(kept, default=0) > len(shape):
            asked = f"axis {reshape.axis}, num_axes {reshape.num_axes} and shape {wanted}"
            raise NetError(f"{asked} go beyond the axes of its bottom {dims(shape)}")
        wanted = [dim or shape[start + index] for index, dim in enumerate(wanted)]
        return bottom.reshape(*shape[:start], *wanted, *shape[end:])


@layer("Crop")
class Crop(Layer):
    """Its first bottom cut to the size of the second from an axis on."""

    bottoms_allowed = (2, 2)

    def setup(self, shapes: list[Shape]) -> None:
        self.axis = axis_of(self.parameter.crop_param.axis, shapes[0])
        require(len(shapes[0]) == len(shapes[1]), "its bottoms must have as many axes")
        self.offsets = each(list(self.parameter.crop_param.offset) or [0], len(shapes[0]) - self.axis, "offset")
        for axis, offset in enumerate(self.offsets, self.axis):
            size, fits = shapes[0][axis], shapes[1][axis] + offset <= shapes[0][axis]
            require(fits, f"axis {axis} of its first bottom has {size}, which offset {offset} goes beyond")

    def forward(self, bottom: Tensor, like: Tensor) -> Tensor:
        for axis, offset in enumerate(self.offsets, self.axis):
            bottom = bottom.narrow(axis, offset, like.shape[axis])
        return bottom


@layer("Tile")
class Tile(Layer):
    """Its bottom several times behind itself along an axis."""

    def setup(self, shapes: list[Shape]) -> None:
        self.axis, self.tiles = axis_of(self.parameter.tile_param.axis, shapes[0]), self.parameter.tile_param.tiles
        require(self.tiles > 0, f"tiles is {self.tiles}, and must be at least 1")

    def forward(self, bottom: Tensor) -> Tensor:
        return torch.cat([bottom] * self.tiles, self.axis)


@layer("Reduction")
class Reduction(Layer):
    """The sum, the sum of absolute values or squares, or the mean of all axes from one on."""

    def setup(self, shapes: list[Shape]) -> None:
        self.axis = axis_of(self.parameter.reduction_param.axis, shapes[0])

    def forward(self, bottom: Tensor) -> Tensor:
        reduction = self.parameter.reduction_param
        rows = bottom.flatten(self.axis)
        if reduction.operation == reduction.ASUM:
            rows = rows.abs()
        elif reduction.operation == reduction.SUMSQ:
            rows = rows.square()
        return (rows.mean(-1) if reduction.operation == reduction.MEAN else rows.sum(-1)) * float(reduction.coeff)


@layer("ArgMax")
class ArgMax(Layer):
    """The places of the largest numbers, or the numbers; of equal ones the last comes first, as in Caffe."""

    def setup(self, shapes: list[Shape]) -> None:
        argmax = self.parameter.argmax_param
        self.axis = axis_of(argmax.axis, shapes[0]) if argmax.HasField("axis") else None
        size = math.prod(shapes[0][1:]) if self.axis is None else shapes[0][self.axis]
        self.top_k, self.values = int(argmax.top_k), bool(argmax.out_max_val)
        require(1 <= self.top_k <= size, f"top_k is {self.top_k}, and must be from 1 to {size}")

    def forward(self, bottom: Tensor) -> Tensor:
        axis, scores = (1, bottom.flatten(1)) if self.axis is None else (self.axis, bottom)
        values, places = scores.flip(axis).sort(dim=axis, descending=True, stable=True)
        values, places = values.narrow(axis, 0, self.top_k), places.narrow(axis, 0, self.top_k)
        places = (scores.shape[axis] - 1 - places).to(bottom.dtype)
        if self.axis is not None:
            return values if self.values else places
        top = torch.stack([places, values], 1) if self.values else places[:, None]
        return top.reshape(*top.shape, *[1] * (bottom.dim() - 3))


@layer("InnerProduct")
class InnerProduct(Layer):
    """A matrix product with all axes from one on, and a bias."""

    def setup(self, shapes: list[Shape]) -> None:
        inner = self.parameter.inner_product_param
        require(inner.num_output > 0, f"num_output is {inner.num_output}, and must be at least 1")
        self.axis = axis_of(inner.axis, shapes[0])
        shape = [inner.num_output, math.prod(shapes[0][self.axis :])]
        self.transpose = bool(inner.transpose)
        self.add_weight_and_bias(shape[::-1] if self.transpose else shape, inner)

    def forward(self, bottom: Tensor) -> Tensor:
        weight, bias = self.weight_and_bias()
        return functional.linear(bottom.flatten(self.axis), weight.t() if self.transpose else weight, bias)


@layer("Embed")
class Embed(Layer):
    """A row of a table for each index."""

    def setup(self, shapes: list[Shape]) -> None:
        embed = self.parameter.embed_param
        outputs, inputs = embed.num_output, embed.input_dim
        require(outputs and inputs, f"num_output is {outputs}, input_dim is {inputs}: both must be at least 1")
        self.add_weight_and_bias([inputs, outputs], embed)

    def forward(self, bottom: Tensor) -> Tensor:
        weight, bias = self.weight_and_bias()
        top = functional.embedding(bottom.long(), weight)
        return top if bias is None else top + bias
