"""Layers number by number against NumPy in float64."""

import numpy as np
import pytest
import torch

from bascule_caffe import NetError

close = {"rtol": 1e-9, "atol": 1e-12}
f32 = lambda number: float(np.float32(number))  # noqa: E731 - what a file's float is


@pytest.mark.parametrize(
    ("kind", "fields", "function"),
    [
        ("ReLU", "", lambda x: np.maximum(x, 0)),
        ("ReLU", "relu_param { negative_slope: 0.1 }", lambda x: np.where(x > 0, x, f32(0.1) * x)),
        ("AbsVal", "", np.abs),
        ("BNLL", "", lambda x: np.log1p(np.exp(x))),
        ("ELU", "elu_param { alpha: 0.5 }", lambda x: np.where(x > 0, x, 0.5 * np.expm1(x))),
        ("Exp", "", np.exp),
        ("Exp", "exp_param { base: 2 scale: 0.5 shift: 3 }", lambda x: 2 ** (3 + 0.5 * x)),
        ("Log", "log_param { scale: 0.5 shift: 9 }", lambda x: np.log(9 + 0.5 * x)),
        ("Log", "log_param { base: 10 shift: 9 }", lambda x: np.log10(9 + x)),
        ("Power", "power_param { power: 2 scale: 3 shift: 0.5 }", lambda x: (0.5 + 3 * x) ** 2),
        ("Power", "power_param { power: 0.5 shift: 9 }", lambda x: np.sqrt(9 + x)),
        ("Power", "power_param { scale: -2 shift: 1 }", lambda x: 1 - 2 * x),
        ("Sigmoid", "", lambda x: 1 / (1 + np.exp(-x))),
        ("Swish", "swish_param { beta: 2 }", lambda x: x / (1 + np.exp(-2 * x))),
        ("TanH", "", np.tanh),
        ("Threshold", "threshold_param { threshold: 0.25 }", lambda x: (x > 0.25).astype(float)),
        ("Clip", "clip_param { min: -0.5 max: 1 }", lambda x: np.clip(x, -0.5, 1)),
        ("Dropout", "", lambda x: x),
        ("Dropout", "dropout_param { dropout_ratio: 0.25 scale_train: false }", lambda x: 0.75 * x),
    ],
)
def test_functions(one, numbers, kind, fields, function):
    x = numbers(2, 3, 4)
    (y,), _ = one(kind, fields, x)
    np.testing.assert_allclose(y, function(x), **close)


@pytest.mark.parametrize("shared", [False, True])
def test_prelu(one, numbers, shared):
    x = numbers(2, 3, 4, 2)
    (y,), net = one("PReLU", f"prelu_param {{ channel_shared: {str(shared).lower()} }}", x)
    assert net.layers[-1].blobs[0].shape == (() if shared else (3,))
    assert (net.layers[-1].blobs[0] == 0.25).all()
    np.testing.assert_allclose(y, np.where(x > 0, x, 0.25 * x), **close)


@pytest.mark.parametrize(
    ("fields", "function"),
    [
        ("", lambda a, b, c: a + b + c),
        ("operation: SUM coeff: 1 coeff: -2 coeff: 0.5", lambda a, b, c: a - 2 * b + 0.5 * c),
        ("operation: PROD", lambda a, b, c: a * b * c),
        ("operation: MAX", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    ],
)
def test_eltwise(one, numbers, fields, function):
    bottoms = [numbers(2, 3) for _ in range(3)]
    (y,), _ = one("Eltwise", f"eltwise_param {{ {fields} }}", *bottoms)
    np.testing.assert_allclose(y, function(*bottoms), **close)


def test_of_equal_numbers_the_second_bottom_of_a_maximum_has_the_gradient(build):
    text = 'layer { name: "i" type: "Input" top: "a" top: "b" top: "c" input_param { shape { dim: 3 } } }'
    text += 'layer { name: "m" type: "Eltwise" bottom: "a" bottom: "b" bottom: "c" top: "m" '
    text += "eltwise_param { operation: MAX } }"
    a, b, c = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in ([1, 2, 0], [1, 0, 3], [1, 2, 3]))
    build(text)(a=a, b=b, c=c)["m"].sum().backward()
    assert [x.grad.tolist() for x in (a, b, c)] == [[0, 1, 0], [1, 0, 1], [0, 0, 0]]


def test_eltwise_of_other_shapes_names_the_layers_that_made_them(one, numbers):
    with pytest.raises(NetError, match="'b0' 2x3 of layer 'ib0', 'b1' 2x4 of layer 'ib1'"):
        one("Eltwise", "", numbers(2, 3), numbers(2, 4))
    with pytest.raises(NetError, match="it has 2 of coeff"):
        one("Eltwise", "eltwise_param { operation: PROD coeff: 1 coeff: 1 }", numbers(2), numbers(2))


def test_dropout_keeps_the_mean_in_training_and_a_bad_ratio_is_an_error(one):
    torch.manual_seed(3)
    (y,), _ = one("Dropout", "dropout_param { dropout_ratio: 0.2 }", np.ones((100, 100)), phase="TRAIN")
    assert set(np.unique(y)) == {0.0, 1 / (1 - f32(0.2))}
    assert 0.19 < (y == 0).mean() < 0.21
    with pytest.raises(NetError, match=r"dropout_ratio is 1\.0"):
        one("Dropout", "dropout_param { dropout_ratio: 1 }", np.ones(3))
