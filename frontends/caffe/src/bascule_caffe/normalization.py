"""Layers that normalise, scale and shift."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from bascule_caffe.errors import NetError
from bascule_caffe.layer import Layer, Shape, axis_of, dims, layer


@layer("BatchNorm")
class BatchNorm(Layer):
    """Normalises each channel by the batch's mean and variance, or by those of all batches seen.

    Its blobs are sums of means, of unbiased variances, and of their weights, by which both are divided. They are not
    learnt. `scale` is a Scale layer that the net lets it compute as well, in one go.
    """

    def setup(self, shapes: list[Shape]) -> None:
        norm = self.parameter.batch_norm_param
        self.eps, self.fraction = float(norm.eps), float(norm.moving_average_fraction)
        self.use_global = bool(norm.use_global_stats) if norm.HasField("use_global_stats") else not self.training
        channels = shapes[0][1] if len(shapes[0]) > 1 else 1
        for shape in ([channels], [channels], [1]):
            self.add_blob(shape)
        self.scale: list[Scale] = []  # a list: the layer is the net's, and must not be a module of this one, too

    def forward(self, bottom: Tensor) -> Tensor:
        weight = self.scale[0].blob(0) if self.scale else None
        bias = self.scale[0].blob(1) if self.scale and len(self.scale[0].blobs) > 1 else None
        total_mean, total_variance, total = (blob.detach() for blob in self.blobs)
        values = bottom if bottom.dim() > 1 else bottom[:, None]
        if self.use_global:
            factor = torch.where(total == 0, 0.0, 1 / total)
            mean, variance = total_mean * factor, total_variance * factor
            top = functional.batch_norm(values, mean, variance, weight, bias, False, 0.0, self.eps)
            return top if bottom.dim() > 1 else top.view_as(bottom)
        mean, variance = torch.zeros_like(total_mean), torch.zeros_like(total_variance)
        if values.numel() > values.shape[1]:
            top = functional.batch_norm(values, mean, variance, weight, bias, True, 1.0, self.eps)
        else:  # one number a channel, which PyTorch refuses: it is its own mean, so its gradient is 0
            mean = values.detach().flatten()
            top = functional.batch_norm(values.detach(), mean, variance, weight, bias, False, 0.0, self.eps)
        with torch.no_grad():
            total_mean.mul_(self.fraction).add_(mean)
            total_variance.mul_(self.fraction).add_(variance)
            total.mul_(self.fraction).add_(1)
        return top if bottom.dim() > 1 else top.view_as(bottom)


@layer("Scale")
class Scale(Layer):
    """Multiplies by a blob along some axes, its own or its second bottom, and adds a bias."""

    bottoms_allowed = (1, 2)
    folded = False  # into the BatchNorm before it

    def setup(self, shapes: list[Shape]) -> None:
        scale = self.parameter.scale_param
        self.axis = axis_of(scale.axis, shapes[0]) if shapes[0] else 0
        shape = _covered(shapes, self.axis, scale.num_axes)
        self.tail = len(shapes[0]) - self.axis - len(shape)  # axes after those that it has
        if len(shapes) == 1:
            self.add_blob(shape, scale.filler if scale.HasField("filler") else None, value=1)
        if scale.bias_term:
            self.add_blob(shape, scale.bias_filler)

    def forward(self, bottom: Tensor, factor: Tensor | None = None) -> Tensor:
        if self.folded:
            return bottom
        factor = self.blob(0) if factor is None else factor
        top = bottom * factor.reshape(*factor.shape, *[1] * self.tail)
        if self.parameter.scale_param.bias_term:
            bias = self.blob(-1)
            top = top + bias.reshape(*bias.shape, *[1] * self.tail)
        return top


@layer("Bias")
class Bias(Layer):
    """Adds a blob along some axes, its own or its second bottom."""

    bottoms_allowed = (1, 2)

    def setup(self, shapes: list[Shape]) -> None:
        bias = self.parameter.bias_param
        self.axis = axis_of(bias.axis, shapes[0]) if shapes[0] else 0
        shape = _covered(shapes, self.axis, bias.num_axes)
        self.tail = len(shapes[0]) - self.axis - len(shape)
        if len(shapes) == 1:
            self.add_blob(shape, bias.filler)

    def forward(self, bottom: Tensor, bias: Tensor | None = None) -> Tensor:
        bias = self.blob(0) if bias is None else bias
        return bottom + bias.reshape(*bias.shape, *[1] * self.tail)


def _covered(shapes: list[Shape], axis: int, num_axes: int) -> Shape:
    """The shape along `axis` and on: of num_axes (all for -1), or of the second bottom."""
    if len(shapes) == 2:
        if shapes[0][axis : axis + len(shapes[1])] != shapes[1]:
            raise NetError(f"its second bottom {dims(shapes[1])} must be its first's shape from axis {axis} on")
        return shapes[1]
    if num_axes < -1 or axis + num_axes > len(shapes[0]):
        raise NetError(f"axis {axis} and num_axes {num_axes} go beyond its bottom {dims(shapes[0])}")
    return shapes[0][axis:] if num_axes == -1 else shapes[0][axis : axis + num_axes]


@layer("MVN")
class MVN(Layer):
    """Subtracts the mean of each channel, or of each item, and divides by the standard deviation + eps."""

    def setup(self, shapes: list[Shape]) -> None:
        if len(shapes[0]) < 2:
            raise NetError(f"its bottom {dims(shapes[0])} must have at least 2 axes")

    def forward(self, bottom: Tensor) -> Tensor:
        mvn = self.parameter.mvn_param
        start = 1 if mvn.across_channels else 2
        rows = bottom.reshape(*bottom.shape[:start], math.prod(bottom.shape[start:]))
        rows = rows - rows.mean(-1, keepdim=True)
        if mvn.normalize_variance:
            rows = rows / (rows.square().mean(-1, keepdim=True).sqrt() + mvn.eps)
        return rows.view_as(bottom)
