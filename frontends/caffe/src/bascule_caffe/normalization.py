"""Layers that normalise, scale and shift."""

from __future__ import annotations

import math

import torch
from google.protobuf.message import Message
from torch import Tensor
from torch.nn import functional

from bascule_caffe.layer import Layer, Shape, axis_of, dims, layer, require


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

    def learns(self, index: int) -> bool:
        return False

    def forward(self, bottom: Tensor) -> Tensor:
        weight, bias = self.scale[0].weight_and_bias() if self.scale else (None, None)
        total_mean, total_variance, total = (blob.detach() for blob in self.blobs)
        values = bottom if bottom.dim() > 1 else bottom[:, None]
        by_batch = not self.use_global
        # The batch's own, which batch_norm writes here, or those of all batches.
        factor = total.new_zeros(1) if by_batch else torch.where(total == 0, 0.0, 1 / total)
        mean, variance = total_mean * factor, total_variance * factor
        if by_batch and values.numel() <= values.shape[1]:
            # One number a channel, which PyTorch refuses: it is its own mean, so its gradient is 0.
            values, mean, by_batch = values.detach(), values.detach().flatten(), False
        top = functional.batch_norm(values, mean, variance, weight, bias, by_batch, 1.0, self.eps)
        if not self.use_global:
            with torch.no_grad():
                total_mean.mul_(self.fraction).add_(mean)
                total_variance.mul_(self.fraction).add_(variance)
                total.mul_(self.fraction).add_(1)
        return top if bottom.dim() > 1 else top.view_as(bottom)


class Along(Layer):
    """What does something with a blob along some axes: its own blob, or its second bottom."""

    bottoms_allowed = (1, 2)

    def covered(self, fields: Message, shapes: list[Shape]) -> Shape:
        """The blob's shape: num_axes from `axis` on (all for -1), or the second bottom's."""
        self.axis = axis_of(fields.axis, shapes[0]) if shapes[0] else 0
        rest, count = shapes[0][self.axis :], fields.num_axes
        if len(shapes) == 2:
            shape = shapes[1]
            fits = rest[: len(shape)] == shape
            require(fits, f"its second bottom {dims(shape)} must be its first's shape from axis {self.axis} on")
        else:
            beyond = f"axis {self.axis} and num_axes {count} go beyond its bottom {dims(shapes[0])}"
            require(-1 <= count <= len(rest), beyond)
            shape = rest if count == -1 else rest[:count]
        self.tail = len(rest) - len(shape)  # axes after those that it has
        return shape

    def spread(self, blob: Tensor) -> Tensor:
        """The blob with an axis of 1 for each that it does not have."""
        return blob.reshape(*blob.shape, *[1] * self.tail)


@layer("Scale")
class Scale(Along):
    """Multiplies by a blob along some axes, its own or its second bottom, and adds a bias."""

    folded = False  # into the BatchNorm before it

    def setup(self, shapes: list[Shape]) -> None:
        scale = self.parameter.scale_param
        shape = self.covered(scale, shapes)
        if len(shapes) == 1:
            self.add_blob(shape, scale.filler if scale.HasField("filler") else None, value=1)
        if scale.bias_term:
            self.add_blob(shape, scale.bias_filler)

    def forward(self, bottom: Tensor, factor: Tensor | None = None) -> Tensor:
        if self.folded:
            return bottom
        top = bottom * self.spread(self.blob(0) if factor is None else factor)
        return top + self.spread(self.blob(-1)) if self.parameter.scale_param.bias_term else top


@layer("Bias")
class Bias(Along):
    """Adds a blob along some axes, its own or its second bottom."""

    def setup(self, shapes: list[Shape]) -> None:
        bias = self.parameter.bias_param
        shape = self.covered(bias, shapes)
        if len(shapes) == 1:
            self.add_blob(shape, bias.filler)

    def forward(self, bottom: Tensor, bias: Tensor | None = None) -> Tensor:
        return bottom + self.spread(self.blob(0) if bias is None else bias)


@layer("MVN")
class MVN(Layer):
    """Subtracts the mean of each channel, or of each item, and divides by the standard deviation + eps."""

    def setup(self, shapes: list[Shape]) -> None:
        require(len(shapes[0]) > 1, f"its bottom {dims(shapes[0])} must have at least 2 axes")

    def forward(self, bottom: Tensor) -> Tensor:
        mvn = self.parameter.mvn_param
        start = 1 if mvn.across_channels else 2
        rows = bottom.reshape(*bottom.shape[:start], math.prod(bottom.shape[start:]))
        rows = rows - rows.mean(-1, keepdim=True)
        if mvn.normalize_variance:
            rows = rows / (rows.square().mean(-1, keepdim=True).sqrt() + mvn.eps)
        return rows.view_as(bottom)
