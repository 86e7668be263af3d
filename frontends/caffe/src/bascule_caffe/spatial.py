"""Layers over windows of an image, of a volume or of a line: convolution, pooling, LRN, ROIPooling."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from google.protobuf.message import Message
from torch import Tensor
from torch.nn import functional

from bascule_caffe.errors import NetError
from bascule_caffe.layer import Layer, Shape, axis_of, dims, each, layer


def _sizes(parameter: Message, name: str, count: int, default: int | None) -> list[int]:
    """A field for each spatial axis: as `kernel_h` and `kernel_w`, once for all, or once an axis."""
    short = name.removesuffix("_size")
    high, wide = f"{short}_h", f"{short}_w"
    given = list(getattr(parameter, name))
    if name != "dilation" and (parameter.HasField(high) or parameter.HasField(wide)):
        if given:
            raise NetError(f"it has {name} and {high} or {wide}: give one of them")
        if count != 2:
            raise NetError(f"{high} and {wide} are for 2 spatial axes, and its bottom has {count}: use {name}")
        given = [getattr(parameter, high), getattr(parameter, wide)]
    elif not given and default is not None:
        given = [default]
    sizes = [int(size) for size in each(given, count, name)]
    if min(sizes) < 1 and short != "pad":
        raise NetError(f"{name} is {min(sizes)}, and must be at least 1")
    return sizes


@layer("Convolution")
class Convolution(Layer):
    """A convolution over the axes after `axis`, of one to three axes; each bottom has its top."""

    bottoms_allowed = tops_allowed = (1, None)
    functions: tuple[Callable[..., Tensor], ...] = (functional.conv1d, functional.conv2d, functional.conv3d)

    def setup(self, shapes: list[Shape]) -> None:
        parameter = self.parameter.convolution_param
        if len(self.bottoms) != len(self.tops):
            raise NetError(f"it has {len(self.bottoms)} bottoms and {len(self.tops)} tops: each bottom has one top")
        if any(shape != shapes[0] for shape in shapes):
            raise NetError("its bottoms have different shapes")
        self.axis = axis_of(parameter.axis, shapes[0])
        count = len(shapes[0]) - self.axis - 1
        if not 1 <= count <= 3:
            raise NetError(
                f"its bottom {dims(shapes[0])} has {count} axes after axis {self.axis}, and must have 1 to 3"
            )
        self.function = self.functions[count - 1]
        kernel = _sizes(parameter, "kernel_size", count, None)
        self.options = {
            "stride": _sizes(parameter, "stride", count, 1),
            "padding": _sizes(parameter, "pad", count, 0),
            "dilation": _sizes(parameter, "dilation", count, 1),
            "groups": int(parameter.group),
        }
        channels, outputs, groups = shapes[0][self.axis], int(parameter.num_output), int(parameter.group)
        if outputs < 1 or groups < 1 or channels % groups or outputs % groups:
            raise NetError(
                f"num_output is {outputs}, group is {groups}, and its bottom has {channels} channels: "
                "num_output and channels must be multiples of group"
            )
        self.add_blob([*self.outer_inner(channels, outputs, groups), *kernel], parameter.weight_filler)
        if parameter.bias_term:
            self.add_blob([outputs], parameter.bias_filler)

    def outer_inner(self, channels: int, outputs: int, groups: int) -> list[int]:
        """The first two axes of the weights."""
        return [outputs, channels // groups]

    def forward(self, *bottoms: Tensor) -> list[Tensor]:
        weight, bias = self.blob(0), self.blob(1) if len(self.blobs) > 1 else None
        if self.axis == 1:
            return [self.function(bottom, weight, bias, **self.options) for bottom in bottoms]
        tops = []
        for bottom in bottoms:  # axes before the channels' are all items of the batch
            outer = bottom.shape[: self.axis]
            top = self.function(bottom.reshape(-1, *bottom.shape[self.axis :]), weight, bias, **self.options)
            tops.append(top.reshape(*outer, *top.shape[1:]))
        return tops


@layer("Deconvolution")
class Deconvolution(Convolution):
    """A convolution's gradient as a layer: it enlarges by its stride."""

    functions = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)

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
        if parameter.pool == parameter.STOCHASTIC:
            raise NetError("pool: STOCHASTIC is left out; MAX and AVE can be")
        self.maximum = parameter.pool == parameter.MAX
        if len(self.tops) == 2 and not self.maximum:
            raise NetError("the second top is the mask of pool: MAX, and its pool is AVE")
        shape = shapes[0]
        self.spatial = count = len(shape) - 2
        if not 1 <= count <= 3:
            raise NetError(f"its bottom {dims(shape)} must have 1 to 3 spatial axes after two others")
        self.everywhere = bool(parameter.global_pooling)
        self.pad, self.stride = _sizes(parameter, "pad", count, 0), _sizes(parameter, "stride", count, 1)
        if self.everywhere:
            if parameter.kernel_size or parameter.HasField("kernel_h") or parameter.HasField("kernel_w"):
                raise NetError("it has global_pooling, whose kernel is the whole bottom, and a kernel_size: remove one")
            if any(self.pad) or any(stride != 1 for stride in self.stride):
                raise NetError("it has global_pooling, which takes no pad and no stride but 1")
            self.kernel = list(shape[2:])
        else:
            self.kernel = _sizes(parameter, "kernel_size", count, None)
        self.ceil = parameter.round_mode == parameter.CEIL
        if any(pad >= kernel for pad, kernel in zip(self.pad, self.kernel, strict=True)):
            raise NetError(f"pad is {self.pad}, and must be less than the kernel {self.kernel}")
        self.sizes(shape[2:])

    def sizes(self, spatial: tuple[int, ...]) -> list[int]:
        """The top's size along each axis. Raises NetError if a window would be empty."""
        sizes = []
        for size, kernel, stride, pad in zip(spatial, self.kernel, self.stride, self.pad, strict=True):
            steps = (size + 2 * pad - kernel) / stride
            out = (math.ceil(steps) if self.ceil else math.floor(steps)) + 1
            if any(self.pad) and (out - 1) * stride >= size + pad:
                out -= 1
            if out < 1 or (out - 1) * stride >= size + pad:
                raise NetError(
                    f"a window of kernel {kernel}, stride {stride} and pad {pad} is empty on an axis of {size}: "
                    "take a smaller kernel or stride"
                )
            sizes.append(out)
        return sizes

    def forward(self, bottom: Tensor) -> list[Tensor]:
        kernel = list(bottom.shape[2:]) if self.everywhere else self.kernel
        options: dict[str, Any] = {"kernel_size": kernel, "stride": self.stride, "padding": self.pad}
        options["ceil_mode"] = self.ceil
        if any(2 * pad > size for pad, size in zip(self.pad, kernel, strict=True)):
            return [self._padded(bottom)]
        if self.maximum:
            function = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[self.spatial - 1]
            if len(self.tops) == 1:
                return [function(bottom, **options)]
            top, mask = function(bottom, return_indices=True, **options)
            return [top, mask.to(bottom.dtype)]
        average = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[self.spatial - 1]
        return [average(bottom, count_include_pad=True, **options)]

    def _padded(self, bottom: Tensor) -> Tensor:
        """Pooling with more padding than PyTorch takes: the padding is made first."""
        sizes = self.sizes(tuple(bottom.shape[2:]))
        margins: list[int] = []
        divisor = bottom.new_ones(())
        for size, out, kernel, stride, pad in zip(
            bottom.shape[2:], sizes, self.kernel, self.stride, self.pad, strict=True
        ):
            margins = [pad, max(0, (out - 1) * stride + kernel - size - pad), *margins]
            starts = torch.arange(out, device=bottom.device) * stride - pad
            divisor = divisor[..., None] * ((starts + kernel).clamp(max=size + pad) - starts)
        whole = functional.pad(bottom, margins, value=-math.inf if self.maximum else 0.0)
        for axis in range(self.spatial):
            windows = whole.unfold(2 + axis, self.kernel[axis], self.stride[axis]).narrow(2 + axis, 0, sizes[axis])
            whole = windows.amax(-1) if self.maximum else windows.sum(-1)
        return whole if self.maximum else whole / divisor


@layer("LRN")
class LRN(Layer):
    """Local response normalisation, over channels or within a channel. Within a channel Caffe ignores k."""

    def setup(self, shapes: list[Shape]) -> None:
        self.options = self.parameter.lrn_param
        if self.options.local_size % 2 == 0:
            raise NetError(f"local_size is {self.options.local_size}, and must be odd")
        if len(shapes[0]) != 4:
            raise NetError(f"its bottom {dims(shapes[0])} must have 4 axes")

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
        if min(self.rows, self.columns) < 1:
            raise NetError(f"pooled_h is {self.rows}, pooled_w is {self.columns}, and both must be at least 1")
        if len(shapes[0]) != 4 or math.prod(shapes[1][1:]) != 5:
            raise NetError("it takes features of 4 axes, and regions of 5 numbers each")

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
