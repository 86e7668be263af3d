from __future__ import annotations

import pytest
import torch
from loss import dice_cross_entropy, dice_scores, foreground, one_hot
from torch.nn import functional


def test_dice_of_known_masks() -> None:
    truth = torch.tensor([0, 0, 1, 1, 1, 2, 2, 3]).reshape(2, 2, 2)
    prediction = torch.tensor([0, 1, 1, 1, 2, 2, 2, 0]).reshape(2, 2, 2)
    assert dice_scores(prediction, truth, 4) == [2 * 1 / 4, 2 * 2 / 6, 2 * 2 / 5, 0]


def test_dice_of_the_truth_itself_is_one_even_for_a_class_that_is_not_there() -> None:
    truth = torch.tensor([0, 1, 1, 2]).reshape(1, 2, 2)
    assert dice_scores(truth, truth, 4) == [1, 1, 1, 1]


def test_the_background_does_not_count_towards_the_foreground() -> None:
    assert foreground([0.0, 0.3, 0.6, 0.9]) == pytest.approx(0.6)


def test_one_hot_marks_the_class_of_each_voxel_and_no_other() -> None:
    truth = torch.randint(0, 4, (3, 4, 5))
    marked = one_hot(truth, 4)
    assert marked.shape == (1, 4, 3, 4, 5)
    assert marked.sum(1).eq(1).all()
    assert marked[0].argmax(0).equal(truth)


def test_the_loss_is_cross_entropy_plus_one_minus_the_mean_dice_of_the_foreground() -> None:
    truth = torch.randint(0, 4, (4, 6, 5))
    logits = torch.randn(1, 4, 4, 6, 5, dtype=torch.float64)
    probabilities = logits.softmax(1)[0]
    dice = []
    for number in range(1, 4):
        mask = (truth == number).double()
        dice.append(2 * (probabilities[number] * mask).sum() / (probabilities[number].sum() + mask.sum()))
    expected = functional.cross_entropy(logits, truth[None]) + 1 - sum(dice) / 3
    assert dice_cross_entropy(logits, one_hot(truth, 4).double()).item() == pytest.approx(float(expected), abs=1e-5)


def test_the_loss_of_a_certain_and_correct_prediction_is_zero() -> None:
    truth = one_hot(torch.randint(0, 4, (4, 4, 4)), 4)
    assert dice_cross_entropy(100 * truth, truth).item() == pytest.approx(0, abs=1e-5)


def test_the_gradient_is_that_of_finite_differences() -> None:
    truth = one_hot(torch.randint(0, 4, (2, 2, 2)), 4).double()
    logits = torch.randn(1, 4, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda values: dice_cross_entropy(values, truth), logits)
