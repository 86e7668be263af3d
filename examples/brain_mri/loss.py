"""Dice + cross-entropy, the loss, and the Dice score, the figure of merit, for one volume and several classes.

Soft Dice after Milletari et al., "V-Net" (3DV 2016, arXiv:1606.04797). The sum with cross-entropy is what nnU-Net
(Isensee et al., Nature Methods 2021) trains with: Dice weighs a rare class as much as a common one, cross-entropy has
the steadier gradient.

The cross-entropy is written with a one-hot truth, not with `functional.cross_entropy`: on a GPU the latter has no
deterministic form for volumes, and two runs could then not be compared bit for bit.
"""

from __future__ import annotations

import torch
from torch.nn import functional

_EPSILON = 1e-5  # a class that is neither there nor predicted scores 1


def one_hot(truth: torch.Tensor, classes: int) -> torch.Tensor:
    """Classes (x, y, z), integers, to float32 (1, classes, x, y, z)."""
    return functional.one_hot(truth, classes).permute(3, 0, 1, 2)[None].float().contiguous()


def dice_cross_entropy(logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """1 - mean foreground Dice + cross-entropy, of logits and a one-hot truth, both (1, classes, x, y, z)."""
    logarithms = functional.log_softmax(logits, dim=1)
    cross_entropy = -(truth * logarithms).mean() * logits.shape[1]  # the mean over voxels, not over voxels and classes
    probabilities = logarithms.exp()
    voxels = (0, 2, 3, 4)
    overlap = (probabilities * truth).sum(voxels)
    sizes = probabilities.sum(voxels) + truth.sum(voxels)
    soft_dice = (2 * overlap + _EPSILON) / (sizes + _EPSILON)
    return 1 - soft_dice[1:].mean() + cross_entropy


def dice_scores(prediction: torch.Tensor, truth: torch.Tensor, classes: int) -> list[float]:
    """Dice of each class, 0 to 1, from two volumes of class numbers: twice the overlap over the sum of the sizes."""
    scores = []
    for number in range(classes):
        predicted, true = prediction == number, truth == number
        size = int(predicted.sum() + true.sum())
        scores.append(2 * int((predicted & true).sum()) / size if size else 1.0)
    return scores


def foreground(scores: list[float]) -> float:
    """Mean Dice over every class but the background, which is three quarters of the volume and easy."""
    return sum(scores[1:]) / (len(scores) - 1)
