"""Softmax, losses, accuracy."""

from __future__ import annotations

import math

import torch
from google.protobuf.message import Message
from torch import Tensor
from torch.nn import functional

from bascule_caffe.layer import Layer, Shape, axis_of, dims, layer, require

_LEAST = math.log(torch.finfo(torch.float32).tiny)  # no probability counts as less than FLT_MIN


@layer("Softmax")
class Softmax(Layer):
    """Softmax along an axis."""

    def setup(self, shapes: list[Shape]) -> None:
        self.axis = axis_of(self.parameter.softmax_param.axis, shapes[0])

    def forward(self, bottom: Tensor) -> Tensor:
        return functional.softmax(bottom, self.axis)


class Loss(Layer):
    """A layer whose first top counts into the net's loss, with weight 1 unless loss_weight says otherwise."""

    bottoms_allowed = (2, 2)
    is_loss = True

    def setup(self, shapes: list[Shape]) -> None:
        """One label for each item of the first bottom."""
        wanted = f"its first bottom {dims(shapes[0])} takes {shapes[0][0]} labels"
        require(math.prod(shapes[1]) == shapes[0][0], f"{wanted}, not {dims(shapes[1])}")


def _divisor(loss: Message, default: int, items: int, valid: Tensor) -> Tensor | int:
    """What a loss is divided by, at least 1: all numbers, those that are not ignored, the items, or 1."""
    kind = default
    if loss.HasField("normalization"):
        kind = loss.normalization
    elif loss.HasField("normalize"):
        kind = loss.VALID if loss.normalize else loss.BATCH_SIZE
    if kind == loss.VALID:
        return valid.sum().clamp(min=1)
    return max(1, {loss.FULL: valid.numel(), loss.BATCH_SIZE: items}.get(kind, 1))


def _valid(labels: Tensor, fields: Message) -> Tensor:
    """Which labels are not to be ignored."""
    ignores = fields.HasField("ignore_label")
    return labels != fields.ignore_label if ignores else torch.ones_like(labels, dtype=torch.bool)


def _check_labels(shapes: list[Shape], axis: int) -> None:
    wanted = (*shapes[0][:axis], *shapes[0][axis + 1 :])
    labels = f"scores {dims(shapes[0])} over axis {axis} take labels {dims(wanted)}"
    require(math.prod(wanted) == math.prod(shapes[1]), f"{labels}, not {dims(shapes[1])}")


@layer("SoftmaxWithLoss")
class SoftmaxWithLoss(Loss):
    """The mean of -log of each label's probability. Bottoms: scores, labels. A second top has the probabilities."""

    tops_allowed = (1, 2)

    def setup(self, shapes: list[Shape]) -> None:
        self.axis = axis_of(self.parameter.softmax_param.axis, shapes[0])
        _check_labels(shapes, self.axis)

    def forward(self, scores: Tensor, labels: Tensor) -> list[Tensor]:
        fields, axis = self.parameter.loss_param, self.axis
        logs = functional.log_softmax(scores, axis)
        index = labels.long().reshape(*scores.shape[:axis], *scores.shape[axis + 1 :]).unsqueeze(axis)
        valid = _valid(index, fields)
        picked = logs.gather(axis, index.where(valid, 0)).where(valid, 0)
        # Caffe stops the value at FLT_MIN, but not the gradient.
        picked = picked + (picked.detach().clamp(min=_LEAST) - picked.detach())
        loss = -picked.sum() / _divisor(fields, fields.VALID, math.prod(scores.shape[:axis]), valid)
        return [loss, logs.exp()][: max(1, len(self.tops))]


@layer("MultinomialLogisticLoss")
class MultinomialLogisticLoss(Loss):
    """The mean of -log of each label's probability. Bottoms: probabilities, labels."""

    def forward(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        picked = probabilities.flatten(1).gather(1, labels.long().view(-1, 1))
        return -picked.clamp(min=1e-20).log().sum() / probabilities.shape[0]


@layer("SigmoidCrossEntropyLoss")
class SigmoidCrossEntropyLoss(Loss):
    """Cross entropy of sigmoids, a batch item's sum on average. Bottoms: scores, targets from 0 to 1."""

    def setup(self, shapes: list[Shape]) -> None:
        _check_counts(shapes)

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        targets = targets.view_as(scores)
        terms = functional.binary_cross_entropy_with_logits(scores, targets, reduction="none")
        fields = self.parameter.loss_param
        valid = _valid(targets.trunc(), fields)  # Caffe compares a target's integer part
        return terms.where(valid, 0).sum() / _divisor(fields, fields.BATCH_SIZE, scores.shape[0], valid)


def _check_counts(shapes: list[Shape]) -> None:
    alike = math.prod(shapes[0]) == math.prod(shapes[1])
    require(alike, f"its bottoms {dims(shapes[0])} and {dims(shapes[1])} must have as many numbers")


@layer("EuclideanLoss")
class EuclideanLoss(Loss):
    """The sum of squared differences / 2N."""

    def setup(self, shapes: list[Shape]) -> None:
        _check_counts(shapes)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return functional.mse_loss(a, b.view_as(a), reduction="sum") / (2 * a.shape[0])


@layer("HingeLoss")
class HingeLoss(Loss):
    """The hinge loss of one against all others, or its square. Bottoms: scores, labels."""

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        scores, hinge = scores.flatten(1), self.parameter.hinge_loss_param
        signs = torch.ones_like(scores).scatter(1, labels.long().view(-1, 1), -1.0)
        margins = functional.relu(1 + signs * scores)
        return (margins.square() if hinge.norm == hinge.L2 else margins).sum() / scores.shape[0]


@layer("ContrastiveLoss")
class ContrastiveLoss(Loss):
    """Pulls pairs together that are alike, and others a margin apart. Bottoms: two of vectors, 1 if they are alike."""

    bottoms_allowed = (3, 3)

    def setup(self, shapes: list[Shape]) -> None:
        fits = shapes[0] == shapes[1] and math.prod(shapes[2]) == shapes[0][0]
        require(fits, "it takes two bottoms of one shape, and a number for each of their items")

    def forward(self, a: Tensor, b: Tensor, alike: Tensor) -> Tensor:
        contrastive = self.parameter.contrastive_loss_param
        square = (a - b).flatten(1).square().sum(1)
        alike = alike.view(-1)
        if contrastive.legacy_version:
            apart = (contrastive.margin - square).clamp(min=0)
        else:
            # The gradient is divided by the distance + 1e-4, as Caffe does it: it is finite for equal vectors.
            distance = square.detach().sqrt()
            short = (contrastive.margin - distance).clamp(min=0)
            apart = short.square() - short / (distance + 1e-4) * (square - square.detach())
        return torch.where(alike != 0, square, apart).sum() / (2 * a.shape[0])


@layer("SmoothL1Loss")
class SmoothL1Loss(Loss):
    """Square near 0 and linear beyond (Girshick, Fast R-CNN, 2015, equation 3).

    Bottoms: predictions, targets, and weights inside and outside of the function.
    """

    bottoms_allowed = (2, 4)

    def setup(self, shapes: list[Shape]) -> None:
        require(len(set(shapes)) == 1, "its bottoms must have one shape")

    def forward(self, prediction: Tensor, target: Tensor, *weights: Tensor) -> Tensor:
        beta = self.parameter.smooth_l1_loss_param.sigma**-2
        inside, outside, *_ = [*weights, 1.0, 1.0]
        difference = (prediction - target) * inside
        terms = functional.smooth_l1_loss(difference, torch.zeros_like(difference), reduction="none", beta=beta)
        return (terms * outside).sum() / prediction.shape[0]


@layer("Accuracy")
class Accuracy(Layer):
    """The part of items whose label is among the top_k scores. A second top has it for each class."""

    bottoms_allowed = (2, 2)
    tops_allowed = (1, 2)

    def setup(self, shapes: list[Shape]) -> None:
        accuracy = self.parameter.accuracy_param
        self.axis = axis_of(accuracy.axis, shapes[0])
        _check_labels(shapes, self.axis)
        top_k, most = accuracy.top_k, shapes[0][self.axis]
        require(1 <= top_k <= most, f"top_k is {top_k}, and must be from 1 to {most}")

    def forward(self, scores: Tensor, labels: Tensor) -> list[Tensor]:
        with torch.no_grad():
            scores = scores.movedim(self.axis, -1).flatten(0, -2)
            classes = scores.shape[1]
            index = labels.long().reshape(-1)
            valid = _valid(index, self.parameter.accuracy_param)
            index = index.where(valid, 0)
            # As many scores as this or more, itself included, decide: ties count against the label.
            rank = (scores >= scores.gather(1, index[:, None])).sum(1)
            right = ((rank <= self.parameter.accuracy_param.top_k) & valid).to(scores.dtype)
            tops = [right.sum() / valid.sum().clamp(min=1)]
            if len(self.tops) == 2:
                zeros = scores.new_zeros(classes)
                seen = zeros.scatter_add(0, index, valid.to(scores.dtype))
                tops.append(zeros.scatter_add(0, index, right) / seen.clamp(min=1))
            return tops
