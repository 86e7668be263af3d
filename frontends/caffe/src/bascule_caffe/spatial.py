"""Layers over windows of an image, of a volume or of a line: convolution, pooling, LRN, ROIPooling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from google.protobuf.message import Message
from torch import Tensor
from torch.nn import functional

from bascule_caffe.layer import Layer, Shape, axis_of, dims, each, layer, require


def _sizes(parameter: Message, name: str, count: int, default: int | None) -> list[int]:
    """A field for each spatial axis: as `kernel_h` and `kernel_w`, once for all, or once an axis."""
    short = name.removesuffix("_size")
    high, wide = f"{short}_h", f"{short}_w"
    given = list(getattr(parameter, name))
    if name != "dilation" and (parameter.HasField(high) or parameter.HasField(wide)):
        require(not given, f"it has {name} and {high} or {wide}: give one of them")
        require(count == 2, f"{high} and {wide} are for 2 spatial axes, and its bottom has {count}: use {name}")
        given = [getattr(parameter, high), getattr(parameter, wide)]
    elif not given and default is not None:
        given = [default]
    sizes = each(given, count, name)
    require(short == "pad" or min(sizes) > 0, f"{name} is {min(sizes)}, and must be at least 1")
    return sizes


def _function(name: str, axes: int) -> Callable[..., Any]:
    """PyTorch's function for so many spatial axes: `conv2d` of "conv"."""
    function: Callable[..., Any] = getattr(functional, f"{name}{axes}d")
    return function


@layer("Convolution")
class Convolution(Layer):
    """A convolution over the axes after `axis`, of one to three axes; each bottom has its top."""

    bottoms_allowed = tops_allowed = (1, None)
    function_name = "conv"

    def setup(self, shapes: list[Shape]) -> None:
        parameter = self.parameter.convolution_param
        ends = f"{len(self.bottoms)} bottoms and {len(self.tops)} tops"
        require(len(self.bottoms) == len(self.tops), f"it has {ends}: each bottom has one top")
        require(len(set(shapes)) == 1, "its bottoms have different shapes")
        self.axis = axis_of(parameter.axis, shapes[0])
        count = len(shapes[0]) - self.axis - 1
        axes = f"its bottom {dims(shapes[0])} has {count} axes after axis {self.axis}"
        require(1 <= count <= 3, f"{axes}, and must have 1 to 3")
        self.function = _function(self.function_name, count)
        kernel = _sizes(parameter, "kernel_size", count, None)
        self.options = {
            "stride": _sizes(parameter, "stride", count, 1),
            "padding": _sizes(parameter, "pad", count, 0),
            "dilation": _sizes(parameter, "dilation", count, 1),
            "groups": int(parameter.group),
        }
        channels, outputs, groups = shapes[0][self.axis], int(parameter.num_output), int(parameter.group)
        found = f"num_output is {outputs}, group is {groups}, and its bottom has {channels} channels"
        multiples = outputs > 0 and groups > 0 and channels % groups == outputs % groups == 0
        require(multiples, f"{found}: num_output and channels must be multiples of group")
        self.add_weight_and_bias([*self.outer_inner(channels, outputs, groups), *kernel], parameter)

    def outer_inner(self, channels: int, outputs: int, groups: int) -> list[int]:
        """The first two axes of the weights."""
        return [outputs, channels // groups]

    def forward(self, *bottoms: Tensor) -> list[Tensor]:
        weight, bias = self.weight_and_bias()
        if self.axis == 1:
            return [self.function(bottom, weight, bias, **self.options) for bottom in bottoms]
        outer = bottoms[0].shape[: self.axis]  # axes before the channels' are all items of the batch
        batches = [bottom.reshape(-1, *bottom.shape[self.axis :]) for bottom in bottoms]
        tops = [self.function(batch, weight, bias, **self.options) for batch in batches]
        return [top.reshape(*outer, *top.shape[1:]) for top in tops]


@layer("Deconvolution")
class Deconvolution(Convolution):
    """A convolution's gradient as a layer: it enlarges by its stride."""

    function_name = "conv_transpose"

    def outer_inner(self, channels: int, outputs: int, groups: int) -> list[int]:
        return [channels, outputs // groups]


@layer("Pooling")
class Pooling(Layer):
    """The maximum or the average of each window.

    The output's size is rounded up, and the last window is left out if it lies in the padding. An average is of the
    window's numbers with the padding up to the bottom's size + pad, as zeros. That is PyTorch's `ceil_mode` with
    `count_include_pad`, unless the padding is more than half a window.
    """

    tops_allowed = (1, 2)

    def setup(self, shapes: list[Shape]) -> None:
        parameter = self.parameter.pooling_param
        require(parameter.pool != parameter.STOCHASTIC, "pool: STOCHASTIC is left out; MAX and AVE can be")
        self.maximum = parameter.pool == parameter.MAX
        require(self.maximum or len(self.tops) == 1, "the second top is the mask of pool: MAX, and its pool is AVE")
        shape, count = shapes[0], len(shapes[0]) - 2
        require(1 <= count <= 3, f"its bottom {dims(shape)} must have 1 to 3 spatial axes after two others")
        self.function = _function("max_pool" if self.maximum else "avg_pool", count)
        self.everywhere, self.ceil = bool(parameter.global_pooling), parameter.round_mode == parameter.CEIL
        self.pad, self.stride = _sizes(parameter, "pad", count, 0), _sizes(parameter, "stride", count, 1)
        if self.everywhere:
            kernel = parameter.kernel_size or parameter.HasField("kernel_h") or parameter.HasField("kernel_w")
            require(
                not kernel, "it has global_pooling, whose kernel is the whole bottom, and a kernel_size: remove one"
            )
            plain = not any(self.pad) and max(self.stride) == 1
            require(plain, "it has global_pooling, which takes no pad and no stride but 1")
        self.kernel = list(shape[2:]) if self.everywhere else _sizes(parameter, "kernel_size", count, None)
        inside = all(pad < kernel for pad, kernel in zip(self.pad, self.kernel, strict=True))
        require(inside, f"pad is {self.pad}, and must be less than the kernel {self.kernel}")
        self.sizes(shape[2:])

    def sizes(self, spatial: tuple[int, ...]) -> list[int]:
        """The top's size along each axis. Raises NetError if a window would be empty."""
        sizes = []
        for size, kernel, stride, pad in zip(spatial, self.kernel, self.stride, self.pad, strict=True):
            steps = (size + 2 * pad - kernel) / stride
            out = (math.ceil(steps) if self.ceil else math.floor(steps)) + 1
            if any(self.pad) and (out - 1) * stride >= size + pad:
                out -= 1
            window = f"a window of kernel {kernel}, stride {stride} and pad {pad} is empty on an axis of {size}"
            require(out > 0 and (out - 1) * stride < size + pad, f"{window}: take a smaller kernel or stride")
            sizes.append(out)
        return sizes

    def forward(self, bottom: Tensor) -> list[Tensor]:
        kernel = list(bottom.shape[2:]) if self.everywhere else self.kernel
        options: dict[str, Any] = {"kernel_size": kernel, "stride": self.stride, "ceil_mode": self.ceil}
        if len(self.tops) == 2:
            top, mask = self.function(bottom, padding=self.pad, return_indices=True, **options)
            return [top, mask.to(bottom.dtype)]
        if all(2 * pad <= size for pad, size in zip(self.pad, kernel, strict=True)):
            return [self.function(bottom, padding=self.pad, **options)]
        # More padding than PyTorch takes is made first; windows that begin in the padding's end are cut off.
        margins = [margin for pad in reversed(self.pad) for margin in (pad, pad)]
        top = self.function(functional.pad(bottom, margins, value=-math.inf if self.maximum else 0.0), **options)
        for axis, size in enumerate(self.sizes(tuple(bottom.shape[2:])), 2):
            top = top.narrow(axis, 0, size)
        return [top]


@layer("LRN")
class LRN(Layer):
    """Local response normalisation, over channels or within a channel. Within a channel Caffe ignores k."""

    def setup(self, shapes: list[Shape]) -> None:
        self.options = self.parameter.lrn_param
        require(self.options.local_size % 2, f"local_size is {self.options.local_size}, and must be odd")
        require(len(shapes[0]) == 4, f"its bottom {dims(shapes[0])} must have 4 axes")

    def forward(self, bottom: Tensor) -> Tensor:
        lrn, size = self.options, int(self.options.local_size)
        if lrn.norm_region == lrn.ACROSS_CHANNELS:
            return functional.local_response_norm(bottom, size, lrn.alpha, lrn.beta, lrn.k)
        square = functional.avg_pool2d(bottom.square(), size, stride=1, padding=size // 2)
        scale: Tensor = (1 + lrn.alpha * square) ** -lrn.beta
        return bottom * scale


@layer("ROIPooling")
class ROIPooling(Layer):
    """The maximum of each cell of each region (Girshick, Fast R-CNN, 2015, section 2.1).

    Bottoms: features (N, C, H, W), and regions (R, 5) as item of the batch, x1, y1, x2, y2. Top: (R, C, rows, columns).
    """

    bottoms_allowed = (2, 2)

    def setup(self, shapes: list[Shape]) -> None:
        roi = self.parameter.roi_pooling_param
        self.rows, self.columns, self.scale = int(roi.pooled_h), int(roi.pooled_w), float(roi.spatial_scale)
        pooled = f"pooled_h is {self.rows}, pooled_w is {self.columns}"
        require(self.rows > 0 and self.columns > 0, f"{pooled}, and both must be at least 1")
        fits = len(shapes[0]) == 4 and math.prod(shapes[1][1:]) == 5
        require(fits, "it takes features of 4 axes, and regions of 5 numbers each")

    def infer(self, shapes: list[Shape]) -> list[Shape]:
        return [(shapes[1][0], shapes[0][1], self.rows, self.columns)]

    def forward(self, features: Tensor, regions: Tensor) -> Tensor:
        regions = regions.detach().float().flatten(1).cpu()
        items = regions[:, 0].int().tolist()
        # The nearest integer, halves away from zero, as C's round().
        corners = regions[:, 1:] * self.scale
        corners = (corners.abs() + 0.5).floor() * corners.sign()
        columns = _windows(corners[:, 0], corners[:, 2], self.columns, features.shape[3])
        rows = _windows(corners[:, 1], corners[:, 3], self.rows, features.shape[2])
        cells = [
            _largest(_largest(features[item], 2, over_columns), 1, over_rows)
            for item, over_columns, over_rows in zip(items, columns, rows, strict=True)
        ]
        return torch.stack(cells) if cells else features.new_zeros(0, features.shape[1], self.rows, self.columns)


def _windows(first: Tensor, last: Tensor, count: int, size: int) -> list[list[list[int]]]:
    """For each region, where its `count` windows begin and end on an axis of `size`; in float32, as in Caffe."""
    width = (last - first + 1).clamp(min=1)[:, None] / count
    steps = torch.arange(count)
    begins = (first[:, None] + (steps * width).floor()).clamp(0, size)
    ends = (first[:, None] + ((steps + 1) * width).ceil()).clamp(0, size)
    windows: list[list[list[int]]] = torch.stack([begins, ends], 2).int().tolist()
    return windows


def _largest(values: Tensor, axis: int, windows: list[list[int]]) -> Tensor:
    """The maximum over each window of an axis, the first of several that are equal; 0 of an empty window."""
    parts = [
        values.narrow(axis, begin, end - begin).max(axis).values if end > begin else values.select(axis, 0) * 0
        for begin, end in windows
    ]
    return torch.stack(parts, axis)
