"""Layers that join, cut and rearrange blobs, and those that make them."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from google.protobuf.message import Message
from torch import Tensor

from bascule_caffe import fillers
from bascule_caffe.errors import NetError
from bascule_caffe.layer import Layer, Shape, axis_of, dims, each, layer
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
            if given:
                raise NetError("it has shape, and num, channels, height or width: give one form")
            given = list(zip(*(each(sizes, count, name) for name, sizes in old.items()), strict=True))
        self.given = each(given, count, "shape")
        self.made = each(list(dummy.data_filler) or [FillerParameter()], count, "data_filler")
        for index, (filler, shape) in enumerate(zip(self.made, self.given, strict=True)):
            constant = filler.type == "constant"
            self.register_buffer(f"top{index}", fillers.fill(filler, shape) if constant else None, persistent=False)

    def infer(self, shapes: list[Shape]) -> list[Shape]:
        return self.given

    def forward(self) -> list[Tensor]:
        constants = [getattr(self, f"top{index}") for index in range(len(self.made))]
        parts = zip(constants, self.made, self.given, strict=True)
        return [fillers.fill(filler, shape) if blob is None else blob for blob, filler, shape in parts]


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
    if fields.HasField("axis") and fields.HasField(old):
        raise NetError(f"it has axis and {old}: give one of them")
    return axis_of(getattr(fields, old if fields.HasField(old) else "axis"), shape)


@layer("Concat")
class Concat(Layer):
    """Its bottoms behind one another along an axis."""

    bottoms_allowed = (1, None)

    def setup(self, shapes: list[Shape]) -> None:
        self.axis = _named_axis(self.parameter.concat_param, "concat_dim", shapes[0])
        rest = [(*shape[: self.axis], *shape[self.axis + 1 :]) for shape in shapes]
        if any(len(shape) != len(shapes[0]) for shape in shapes) or any(one != rest[0] for one in rest):
            raise NetError(f"its bottoms must agree but for axis {self.axis}")

    def forward(self, *bottoms: Tensor) -> Tensor:
        return torch.cat(bottoms, self.axis)


@layer("Slice")
class Slice(Layer):
    """Its bottom cut along an axis, at the slice points or into equal parts."""

    tops_allowed = (1, None)

    def setup(self, shapes: list[Shape]) -> None:
        cut = self.parameter.slice_param
        self.axis = _named_axis(cut, "slice_dim", shapes[0])
        size, count, points = shapes[0][self.axis], len(self.tops), list(cut.slice_point)
        self.equal = not points
        if self.equal:
            if size % count:
                raise NetError(f"axis {self.axis} of its bottom has {size}, which {count} tops do not divide")
            points = [size // count * part for part in range(1, count)]
        self.points = points
        self.parts = [b - a for a, b in pairwise([0, *points, size])]
        if len(points) != count - 1 or min(self.parts) < 1:
            raise NetError(f"slice_point is {points}: {count} tops of an axis of {size} take {count - 1} rising points")

    def infer(self, shapes: list[Shape]) -> list[Shape]:
        return [(*shapes[0][: self.axis], part, *shapes[0][self.axis + 1 :]) for part in self.parts]

    def forward(self, bottom: Tensor) -> list[Tensor]:
        parts, size = self.parts, bottom.shape[self.axis]
        if size != sum(parts):  # a batch of another size than the net was built for
            count = len(parts)
            parts = [size // count] * count if self.equal else [*parts[:-1], size - sum(parts[:-1])]
            if sum(parts) != size or min(parts) < 1:
                how = f"{count} tops do not divide" if self.equal else f"its slice points {self.points} do not cut"
                raise NetError(f"axis {self.axis} of its bottom has {size}, which {how}")
        return list(bottom.split(parts, self.axis))


@layer("Flatten")
class Flatten(Layer):
    """Its bottom with the axes from `axis` to `end_axis` as one."""

    def setup(self, shapes: list[Shape]) -> None:
        flatten = self.parameter.flatten_param
        self.axis, self.end = axis_of(flatten.axis, shapes[0]), axis_of(flatten.end_axis, shapes[0], "end_axis")
        if self.axis > self.end:
            raise NetError(f"axis is {self.axis}, which is after end_axis {self.end}")

    def forward(self, bottom: Tensor) -> Tensor:
        return bottom.flatten(self.axis, self.end)


@layer("Reshape")
class Reshape(Layer):
    """Its bottom in another shape, in which 0 keeps an axis and -1 takes what is left."""

    def forward(self, bottom: Tensor) -> Tensor:
        reshape, shape = self.parameter.reshape_param, tuple(bottom.shape)
        start = reshape.axis if reshape.axis >= 0 else len(shape) + reshape.axis + 1
        end = len(shape) if reshape.num_axes == -1 else start + reshape.num_axes
        wanted = list(reshape.shape.dim)
        if not 0 <= start <= end <= len(shape):
            raise NetError(f"axis {reshape.axis} and num_axes {reshape.num_axes} are beyond its bottom {dims(shape)}")
        if wanted.count(-1) > 1 or min(wanted, default=0) < -1:
            raise NetError(f"shape is {wanted}: one of its dims can be -1, the others must be 0 or more")
        for index, dim in enumerate(wanted):
            if dim == 0:
                if start + index >= len(shape):
                    raise NetError(
                        f"dim {index} of shape is 0, and its bottom {dims(shape)} has no axis {start + index}"
                    )
                wanted[index] = shape[start + index]
        whole, fixed = math.prod(shape[start:end]), math.prod(dim for dim in wanted if dim != -1)
        if whole % fixed if -1 in wanted else whole != fixed:
            raise NetError(f"shape is {wanted}, and the axes of its bottom {dims(shape)} have {whole} numbers")
        return bottom.reshape(*shape[:start], *(whole // fixed if dim == -1 else dim for dim in wanted), *shape[end:])


@layer("Crop")
class Crop(Layer):
    """Its first bottom cut to the size of the second from an axis on."""

    bottoms_allowed = (2, 2)

    def setup(self, shapes: list[Shape]) -> None:
        self.axis = axis_of(self.parameter.crop_param.axis, shapes[0])
        if len(shapes[0]) != len(shapes[1]):
            raise NetError("its bottoms must have as many axes")
        self.offsets = each(list(self.parameter.crop_param.offset) or [0], len(shapes[0]) - self.axis, "offset")
        for axis, offset in enumerate(self.offsets, self.axis):
            if shapes[1][axis] + offset > shapes[0][axis]:
                raise NetError(
                    f"axis {axis} of its first bottom has {shapes[0][axis]}, which offset {offset} goes beyond"
                )

    def forward(self, bottom: Tensor, like: Tensor) -> Tensor:
        for axis, offset in enumerate(self.offsets, self.axis):
            bottom = bottom.narrow(axis, offset, like.shape[axis])
        return bottom


@layer("Tile")
class Tile(Layer):
    """Its bottom several times behind itself along an axis."""

    def setup(self, shapes: list[Shape]) -> None:
        self.axis, self.tiles = axis_of(self.parameter.tile_param.axis, shapes[0]), self.parameter.tile_param.tiles
        if self.tiles < 1:
            raise NetError(f"tiles is {self.tiles}, and must be at least 1")

    def forward(self, bottom: Tensor) -> Tensor:
        return torch.cat([bottom] * self.tiles, self.axis)


@layer("Reduction")
class Reduction(Layer):
    """The sum, the sum of absolute values or squares, or the mean of all axes from one on."""

    def setup(self, shapes: list[Shape]) -> None:
        self.axis = axis_of(self.parameter.reduction_param.axis, shapes[0])

    def forward(self, bottom: Tensor) -> Tensor:
        reduction = self.parameter.reduction_param
        rows, coeff = bottom.flatten(self.axis), float(reduction.coeff)
        if reduction.operation == reduction.MEAN:
            return rows.mean(-1) * coeff
        if reduction.operation == reduction.ASUM:
            rows = rows.abs()
        elif reduction.operation == reduction.SUMSQ:
            rows = rows.square()
        return rows.sum(-1) * coeff


@layer("ArgMax")
class ArgMax(Layer):
    """The places of the largest numbers, or the numbers; of equal ones the last comes first, as in Caffe."""

    def setup(self, shapes: list[Shape]) -> None:
        argmax = self.parameter.argmax_param
        self.axis = axis_of(argmax.axis, shapes[0]) if argmax.HasField("axis") else None
        size = math.prod(shapes[0][1:]) if self.axis is None else shapes[0][self.axis]
        self.top_k, self.values = int(argmax.top_k), bool(argmax.out_max_val)
        if not 1 <= argmax.top_k <= size:
            raise NetError(f"top_k is {argmax.top_k}, and must be from 1 to {size}")

    def forward(self, bottom: Tensor) -> Tensor:
        axis = 1 if self.axis is None else self.axis
        values = bottom.flatten(1) if self.axis is None else bottom
        values, places = values.flip(axis).sort(dim=axis, descending=True, stable=True)
        values, places = values.narrow(axis, 0, self.top_k), places.narrow(axis, 0, self.top_k)
        places = ((bottom.shape[axis] if self.axis is not None else bottom[0].numel()) - 1 - places).to(bottom.dtype)
        if self.axis is not None:
            return values if self.values else places
        top = torch.stack([places, values], 1) if self.values else places[:, None]
        return top.reshape(*top.shape, *[1] * (bottom.dim() - 3))


@layer("InnerProduct")
class InnerProduct(Layer):
    """A matrix product with all axes from one on, and a bias."""

    def setup(self, shapes: list[Shape]) -> None:
        inner = self.parameter.inner_product_param
        if inner.num_output < 1:
            raise NetError(f"num_output is {inner.num_output}, and must be at least 1")
        self.axis = axis_of(inner.axis, shapes[0])
        shape = [inner.num_output, math.prod(shapes[0][self.axis :])]
        self.add_blob(shape[::-1] if inner.transpose else shape, inner.weight_filler)
        if inner.bias_term:
            self.add_blob([inner.num_output], inner.bias_filler)

    def forward(self, bottom: Tensor) -> Tensor:
        weight, bias = self.blob(0), self.blob(1) if len(self.blobs) > 1 else None
        rows = bottom.flatten(self.axis)
        return torch.nn.functional.linear(
            rows, weight.t() if self.parameter.inner_product_param.transpose else weight, bias
        )


@layer("Embed")
class Embed(Layer):
    """A row of a table for each index."""

    def setup(self, shapes: list[Shape]) -> None:
        embed = self.parameter.embed_param
        if embed.num_output < 1 or embed.input_dim < 1:
            raise NetError(f"num_output is {embed.num_output}, input_dim is {embed.input_dim}: both must be at least 1")
        self.add_blob([embed.input_dim, embed.num_output], embed.weight_filler)
        if embed.bias_term:
            self.add_blob([embed.num_output], embed.bias_filler)

    def forward(self, bottom: Tensor) -> Tensor:
        top = torch.nn.functional.embedding(bottom.long(), self.blob(0))
        return top + self.blob(1) if len(self.blobs) > 1 else top
