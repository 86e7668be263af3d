"""Layers that compute each number by itself, or join bottoms number by number."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from google.protobuf.message import Message
from torch import Tensor
from torch.nn import functional

from bascule_caffe.layer import TYPES, Layer, Shape, dims, layer, require


@layer("ReLU")
class ReLU(Layer):
    """max(x, 0), or x times negative_slope below 0."""

    overwrites = False  # its bottom, which the net allows if nobody else needs that

    def forward(self, bottom: Tensor) -> Tensor:
        slope = self.parameter.relu_param.negative_slope
        if slope:
            return functional.leaky_relu(bottom, slope, self.overwrites)
        return functional.relu(bottom, self.overwrites)


@layer("PReLU")
class PReLU(Layer):
    """A ReLU whose slope below 0 is learnt, one for all or one a channel."""

    def setup(self, shapes: list[Shape]) -> None:
        parameter = self.parameter.prelu_param
        require(len(shapes[0]) > 1, f"its bottom {dims(shapes[0])} must have at least 2 axes")
        filler = parameter.filler if parameter.HasField("filler") else None
        self.add_blob([] if parameter.channel_shared else [shapes[0][1]], filler, value=0.25)

    def forward(self, bottom: Tensor) -> Tensor:
        return functional.prelu(bottom, self.blob(0).view(-1))


@layer("Dropout")
class Dropout(Layer):
    """Sets numbers to 0 in training and enlarges the others; `scale_train: false` makes all smaller in testing."""

    def setup(self, shapes: list[Shape]) -> None:
        self.ratio = float(self.parameter.dropout_param.dropout_ratio)
        self.scale_train = bool(self.parameter.dropout_param.scale_train)
        require(0 <= self.ratio < 1, f"dropout_ratio is {self.ratio}, and must be at least 0 and below 1")

    def forward(self, bottom: Tensor) -> Tensor:
        top = functional.dropout(bottom, self.ratio, self.training)
        return top if self.scale_train else top * (1 - self.ratio)


@layer("Eltwise")
class Eltwise(Layer):
    """The product, the weighted sum or the maximum of bottoms of one shape."""

    bottoms_allowed = (2, None)

    def setup(self, shapes: list[Shape]) -> None:
        self.options = self.parameter.eltwise_param
        self.coefficients = list(self.options.coeff)
        require(len(set(shapes)) == 1, "its bottoms must have one shape")
        count = len(self.coefficients)
        fits = count in (0, len(shapes) if self.options.operation == self.options.SUM else 0)
        require(fits, f"it has {count} of coeff: operation SUM takes one a bottom, the others none")

    def forward(self, *bottoms: Tensor) -> Tensor:
        operation = self.options.operation
        factors = self.coefficients or [1.0] * len(bottoms)
        bottoms = tuple(b if factor == 1 else factor * b for factor, b in zip(factors, bottoms, strict=True))
        top = bottoms[0]
        for index, bottom in enumerate(bottoms[1:]):
            if operation == self.options.SUM:
                top = top + bottom
            elif operation == self.options.PROD:
                top = top * bottom
            else:  # of equal ones the second bottom has the gradient, and no later one, as in Caffe on a CPU
                top = torch.where(bottom > top if index else bottom >= top, bottom, top)
        return top


def _elementwise(kind: str, field: str, function: Callable[[Tensor, Message], Tensor]) -> None:
    """Registers a layer that is a function of its bottom and of the message in a field."""

    def forward(self: Layer, bottom: Tensor) -> Tensor:
        return function(bottom, getattr(self.parameter, field) if field else self.parameter)

    TYPES[kind] = type(kind, (Layer,), {"forward": forward, "__doc__": f"Caffe's {kind}.", "__module__": __name__})


def _exp(x: Tensor, exp: Message) -> Tensor:
    rate = 1.0 if exp.base == -1 else math.log(exp.base)
    return torch.exp(rate * (exp.shift + exp.scale * x))


def _log(x: Tensor, log: Message) -> Tensor:
    rate = 1.0 if log.base == -1 else 1 / math.log(log.base)
    return rate * torch.log(log.shift + log.scale * x)


def _power(x: Tensor, power: Message) -> Tensor:
    inner: Tensor = x * power.scale + power.shift
    return inner if power.power == 1 else inner**power.power


_elementwise("AbsVal", "", lambda x, _: x.abs())
_elementwise("BNLL", "", lambda x, _: functional.softplus(x, threshold=50))
_elementwise("Clip", "clip_param", lambda x, clip: x.clamp(clip.min, clip.max))
_elementwise("ELU", "elu_param", lambda x, elu: functional.elu(x, elu.alpha))
_elementwise("Exp", "exp_param", _exp)
_elementwise("Log", "log_param", _log)
_elementwise("Power", "power_param", _power)
_elementwise("Sigmoid", "", lambda x, _: torch.sigmoid(x))
_elementwise("Swish", "swish_param", lambda x, swish: x * torch.sigmoid(swish.beta * x))
_elementwise("TanH", "", lambda x, _: torch.tanh(x))
_elementwise("Threshold", "threshold_param", lambda x, threshold: (x > threshold.threshold).to(x.dtype))
