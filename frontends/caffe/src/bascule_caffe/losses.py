"""Softmax, losses, accuracy."""

from __future__ import annotations

import math

import torch
from google.protobuf.message import Message
from torch import Tensor
from torch.nn import functional

from bascule_caffe.errors import NetError
from bascule_caffe.layer import Layer, Shape, axis_of, dims, layer

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
        if math.prod(shapes[1]) != shapes[0][0]:
            raise NetError(f"its first bottom {dims(shapes[0])} takes {shapes[0][0]} labels, not {dims(shapes[1])}")


def _divisor(normalization: int, loss: Message, items: int, whole: int, valid: Tensor | None) -> Tensor | float:
    """What a loss is divided by, at least 1: all numbers, those that are not ignored, the items, or 1."""
    if normalization == loss.VALID and valid is not None:
        return valid.sum().clamp(min=1)
    return max(1, {loss.FULL: whole, loss.VALID: whole, loss.BATCH_SIZE: items}.get(normalization, 1))


def _normalization(loss: Message, default: int) -> int:
    if not loss.HasField("normalization") and loss.HasField("normalize"):
        return int(loss.VALID if loss.normalize else loss.BATCH_SIZE)
    return int(loss.normalization) if loss.HasField("normalization") else default


def _ignored(fields: Message) -> int | None:
    return int(fields.ignore_label) if fields.HasField("ignore_label") else None


def _picked(scores: Tensor, labels: Tensor, axis: int, ignored: int | None) -> tuple[Tensor, Tensor | None]:
    """The score of each item's label (0 if it is ignored), and which items are not ignored (None: all)."""
    index = labels.long().reshape(*scores.shape[:axis], *scores.shape[axis + 1 :]).unsqueeze(axis)
    valid = None if ignored is None else index != ignored
    picked = scores.gather(axis, index if valid is None else index.where(valid, 0))
    return (picked, None) if valid is None else (picked.where(valid, 0), valid)


def _check_labels(shapes: list[Shape], axis: int) -> None:
    wanted = (*shapes[0][:axis], *shapes[0][axis + 1 :])
    if math.prod(wanted) != math.prod(shapes[1]):
        raise NetError(f"scores {dims(shapes[0])} over axis {axis} take labels {dims(wanted)}, not {dims(shapes[1])}")


@layer("SoftmaxWithLoss")
class SoftmaxWithLoss(Loss):
    """The mean of -log of each label's probability. Bottoms: scores, labels. A second top has the probabilities."""

    tops_allowed = (1, 2)

    def setup(self, shapes: list[Shape]) -> None:
        self.axis = axis_of(self.parameter.softmax_param.axis, shapes[0])
        _check_labels(shapes, self.axis)
        loss = self.parameter.loss_param
        self.ignored, self.normalization = _ignored(loss), _normalization(loss, loss.VALID)

    def forward(self, scores: Tensor, labels: Tensor) -> list[Tensor]:
        logs = functional.log_softmax(scores, self.axis)
        picked, valid = _picked(logs, labels, self.axis, self.ignored)
        # Caffe stops the value at FLT_MIN, but not the gradient.
        picked = picked + (picked.detach().clamp(min=_LEAST) - picked.detach())
        items = math.prod(scores.shape[: self.axis])
        loss = -picked.sum() / _divisor(self.normalization, self.parameter.loss_param, items, picked.numel(), valid)
        return [loss, logs.exp()][: max(1, len(self.tops))]


@layer("MultinomialLogisticLoss")
class MultinomialLogisticLoss(Loss):
    """The mean of -log of each label's probability. Bottoms: probabilities, labels."""

    def forward(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        picked, _ = _picked(probabilities.flatten(1), labels, 1, None)
        return -picked.clamp(min=1e-20).log().sum() / probabilities.shape[0]


@layer("SigmoidCrossEntropyLoss")
class SigmoidCrossEntropyLoss(Loss):
    """Cross entropy of sigmoids, a batch item's sum on average. Bottoms: scores, targets from 0 to 1."""

    def setup(self, shapes: list[Shape]) -> None:
        _check_counts(shapes)
        loss = self.parameter.loss_param
        self.ignored, self.normalization = _ignored(loss), _normalization(loss, loss.BATCH_SIZE)

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        targets = targets.view_as(scores)
        terms = functional.binary_cross_entropy_with_logits(scores, targets, reduction="none")
        # Caffe compares a target's integer part.
        valid = None if self.ignored is None else targets.trunc() != self.ignored
        terms = terms if valid is None else terms.where(valid, 0)
        loss, items = self.parameter.loss_param, scores.shape[0]
        return terms.sum() / _divisor(self.normalization, loss, items, terms.numel(), valid)


def _check_counts(shapes: list[Shape]) -> None:
    if math.prod(shapes[0]) != math.prod(shapes[1]):
        raise NetError(f"its bottoms {dims(shapes[0])} and {dims(shapes[1])} must have as many numbers")


@layer("EuclideanLoss")
class EuclideanLoss(Loss):
    """The sum of squared differences / 2N."""

    def setup(self, shapes: list[Shape]) -> None:
        _check_counts(shapes)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (a - b.view_as(a)).square().sum() / (2 * a.shape[0])


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
        if shapes[0] != shapes[1] or math.prod(shapes[2]) != shapes[0][0]:
            raise NetError("it takes two bottoms of one shape, and a number for each of their items")

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
        if any(shape != shapes[0] for shape in shapes):
            raise NetError("its bottoms must have one shape")

    def forward(self, prediction: Tensor, target: Tensor, *weights: Tensor) -> Tensor:
        square = self.parameter.smooth_l1_loss_param.sigma**2
        difference = prediction - target
        if weights:
            difference = difference * weights[0]
        size = difference.abs()
        terms = torch.where(size < 1 / square, 0.5 * square * difference.square(), size - 0.5 / square)
        if len(weights) > 1:
            terms = terms * weights[1]
        return terms.sum() / prediction.shape[0]


@layer("Accuracy")
class Accuracy(Layer):
    """The part of items whose label is among the top_k scores. A second top has it for each class."""

    bottoms_allowed = (2, 2)
    tops_allowed = (1, 2)

    def setup(self, shapes: list[Shape]) -> None:
        accuracy = self.parameter.accuracy_param
        self.axis = axis_of(accuracy.axis, shapes[0])
        _check_labels(shapes, self.axis)
        self.ignored = _ignored(accuracy)
        if not 1 <= accuracy.top_k <= shapes[0][self.axis]:
            raise NetError(f"top_k is {accuracy.top_k}, and must be from 1 to {shapes[0][self.axis]}")

    def forward(self, scores: Tensor, labels: Tensor) -> list[Tensor]:
        with torch.no_grad():
            scores = scores.movedim(self.axis, -1).flatten(0, -2)
            classes = scores.shape[1]
            index = labels.long().reshape(-1)
            valid = torch.ones_like(index, dtype=torch.bool) if self.ignored is None else index != self.ignored
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
