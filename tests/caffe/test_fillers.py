"""What blobs begin with."""

import math

import numpy as np
import pytest
import torch

from bascule_caffe import NetError
from bascule_caffe.fillers import fill
from bascule_caffe.messages import FillerParameter, parse_string

SHAPE = (200, 50, 3, 3)
FAN_IN, FAN_OUT = 450, 1800


def filled(text: str, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return fill(parse_string(text, FillerParameter), shape, torch.Generator().manual_seed(5)).double()


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ('type: "uniform" min: -2 max: 3', -2, 3),
        ('type: "xavier"', -math.sqrt(3 / FAN_IN), math.sqrt(3 / FAN_IN)),
        ('type: "xavier" variance_norm: FAN_OUT', -math.sqrt(3 / FAN_OUT), math.sqrt(3 / FAN_OUT)),
        ('type: "xavier" variance_norm: AVERAGE', -math.sqrt(3 / 1125), math.sqrt(3 / 1125)),
    ],
)
def test_uniform_ones_fill_their_range(text, low, high):
    values = filled(text)
    assert low <= values.min() < low + (high - low) / 1000
    assert high - (high - low) / 1000 < values.max() <= high
    assert abs(values.mean() - (low + high) / 2) < (high - low) / 200


@pytest.mark.parametrize(
    ("text", "mean", "std"),
    [
        ('type: "gaussian" mean: 3 std: 0.5', 3, 0.5),
        ('type: "msra"', 0, math.sqrt(2 / FAN_IN)),
        ('type: "msra" variance_norm: FAN_OUT', 0, math.sqrt(2 / FAN_OUT)),
    ],
)
def test_gaussian_ones_have_their_mean_and_deviation(text, mean, std):
    values = filled(text)
    assert abs(values.mean() - mean) < 0.02 * std
    assert abs(values.std() / std - 1) < 0.02


def test_a_sparse_gaussian_has_as_many_numbers_an_output_on_average():
    values = filled('type: "gaussian" sparse: 20')
    assert abs((values != 0).double().mean() - 20 / 200) < 0.01


def test_a_unit_ball_is_positive_and_each_row_sums_to_1():
    values = filled('type: "positive_unitball"')
    assert (values >= 0).all()
    torch.testing.assert_close(values.flatten(1).sum(1), torch.ones(200).double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("size", "line"), [(4, [0.25, 0.75, 0.75, 0.25]), (3, [0.5, 1, 0.5]), (5, [1 / 3, 2 / 3, 1, 2 / 3, 1 / 3])]
)
def test_bilinear(size, line):
    np.testing.assert_allclose(
        filled('type: "bilinear"', (2, 1, size, size)), np.outer(line, line)[None, None].repeat(2, 0), rtol=1e-6
    )


def test_a_constant_is_0_unless_it_says_more_and_others_are_errors():
    assert (filled("") == 0).all()
    assert (filled("value: 2", ()) == 2).all()
    with pytest.raises(NetError, match="no filler 'he'; allowed are bilinear, constant"):
        filled('type: "he"')
    with pytest.raises(NetError, match="square kernels"):
        filled('type: "bilinear"', (2, 2))
