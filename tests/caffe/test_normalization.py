"""BatchNorm, Scale, Bias and MVN against NumPy in float64."""

import numpy as np
import pytest
import torch

close = {"rtol": 1e-9, "atol": 1e-11}
f32 = lambda number: float(np.float32(number))  # noqa: E731 - what a file's float is


def normalised(x, mean, variance):
    shape = (-1, *[1] * (x.ndim - 2))
    return (x - mean.reshape(shape)) / np.sqrt(variance.reshape(shape) + f32(1e-5))


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5, 2), (2, 3, 2, 3, 2), (1, 3)])
def test_batch_norm_in_training_uses_the_batch_and_adds_to_the_statistics(one, numbers, shape):
    x = numbers(*shape)
    (y,), net = one("BatchNorm", "batch_norm_param { moving_average_fraction: 0.9 }", x, phase="TRAIN")
    rows = np.moveaxis(x, 1, 0).reshape(3, -1)
    mean, variance, count = rows.mean(1), rows.var(1), rows.shape[1]
    np.testing.assert_allclose(y, normalised(x, mean, variance), **close)
    net({"b0": torch.tensor(x)})
    unbiased = variance * count / max(1, count - 1)
    weight = f32(0.9) + 1  # a batch twice
    for blob, wanted in zip(net.layers[-1].blobs, (mean * weight, unbiased * weight, [weight]), strict=True):
        np.testing.assert_allclose(blob.detach().numpy(), wanted, **close)
    assert [(entry.lr_mult, entry.decay_mult) for entry in net.learnable] == [(0, 0)] * 3


def test_batch_norm_over_one_number_a_channel_has_no_gradient(build, numbers):
    net = build(
        'layer { name: "i" type: "Input" top: "x" input_param { shape { dim: 1 dim: 3 } } }'
        'layer { name: "n" type: "BatchNorm" bottom: "x" top: "n" }'
        'layer { name: "s" type: "Eltwise" bottom: "x" bottom: "n" top: "s" }',
        "TRAIN",
    )
    x = torch.tensor(numbers(1, 3), requires_grad=True)
    net(x=x)["s"].sum().backward()
    assert x.grad.tolist() == [[1, 1, 1]]


@pytest.mark.parametrize(("phase", "fields"), [("TEST", ""), ("TRAIN", "batch_norm_param { use_global_stats: true }")])
def test_batch_norm_divides_its_statistics_by_their_weight(one, numbers, phase, fields):
    x = numbers(2, 3, 4, 4)
    _, net = one("BatchNorm", fields, x, phase=phase)
    mean, variance = numbers(3), numbers(3) ** 2
    net.load_blobs({"one": [mean * 5, variance * 5, np.array([5.0])]}, "here")
    y = net({"b0": torch.tensor(x)})["t0"].numpy()
    np.testing.assert_allclose(y, normalised(x, mean, variance), **close)
    np.testing.assert_allclose(net.layers[-1].blobs[0].detach().numpy(), mean * 5)  # as before
    net.load_blobs({"one": [mean, variance, np.array([0.0])]}, "here")  # of no batch at all: as if all were 0
    y = net({"b0": torch.tensor(x)})["t0"].numpy()
    np.testing.assert_allclose(y, x / np.sqrt(f32(1e-5)), **close)


@pytest.mark.parametrize("phase", ["TRAIN", "TEST"])
def test_a_scale_behind_a_batch_norm_gives_what_both_give_apart(build, numbers, phase):
    text = (
        'layer { name: "i" type: "Input" top: "x" input_param { shape { dim: 4 dim: 3 dim: 5 dim: 5 } } }'
        'layer { name: "n" type: "BatchNorm" bottom: "x" top: "y" }'
        'layer { name: "s" type: "Scale" bottom: "y" top: "%s" scale_param { bias_term: true } }'
    )
    x = torch.tensor(numbers(4, 3, 5, 5))
    blobs = {"n": [numbers(3), numbers(3) ** 2, np.ones(1)], "s": [numbers(3), numbers(3)]}
    results = []
    for top in ("y", "z"):  # in place, and not
        net = build(text % top, phase)
        assert net.layers[2].folded == (top == "y")
        net.load_blobs(blobs, "here")
        results.append([net(x=x)[top]])
        results[-1][0].sum().backward()
        results[-1] += [net.layers[2].blobs[0].grad, net.layers[2].blobs[1].grad, net.layers[1].blobs[1]]
    for together, apart in zip(*results, strict=True):
        torch.testing.assert_close(together, apart, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("fields", "shape"),
    [("", (3,)), ("axis: 0 num_axes: 2", (2, 3)), ("num_axes: -1", (3, 4, 5)), ("axis: -1", (5,)), ("num_axes: 0", ())],
)
def test_scale_and_bias(one, numbers, fields, shape):
    x = numbers(2, 3, 4, 5)
    axis = 0 if "axis: 0" in fields else 3 if "axis: -1" in fields and "num" not in fields else 1
    spread = lambda array: array.reshape(*array.shape, *[1] * (4 - axis - array.ndim))  # noqa: E731
    (y,), net = one(
        "Scale",
        f"scale_param {{ {fields} bias_term: true filler {{ type: 'xavier' }} }}"
        if shape
        else f"scale_param {{ {fields} bias_term: true }}",
        x,
    )
    scale, bias = (blob.detach().numpy() for blob in net.layers[-1].blobs)
    assert scale.shape == bias.shape == shape
    np.testing.assert_allclose(y, x * spread(scale) + spread(bias), **close)
    given = numbers(*shape)
    if "num_axes" not in fields:
        (y,), net = one("Scale", f"scale_param {{ {fields} bias_term: true }}", x, given)
        (bias,) = (blob.detach().numpy() for blob in net.layers[-1].blobs)
        np.testing.assert_allclose(y, x * spread(given) + spread(bias), **close)
        (y,), _ = one("Bias", f"bias_param {{ {fields} }}", x, given)
        np.testing.assert_allclose(y, x + spread(given), **close)
    (y,), net = one("Bias", f"bias_param {{ {fields} }}", x)
    np.testing.assert_allclose(y, x + spread(net.layers[-1].blobs[0].detach().numpy()), **close)


@pytest.mark.parametrize(
    ("fields", "axes", "divide"),
    [("", (2, 3), True), ("across_channels: true", (1, 2, 3), True), ("normalize_variance: false", (2, 3), False)],
)
def test_mvn(one, numbers, fields, axes, divide):
    x = numbers(2, 3, 4, 5)
    (y,), _ = one("MVN", f"mvn_param {{ {fields} }}", x)
    wanted = x - x.mean(axes, keepdims=True)
    if divide:
        wanted /= x.std(axes, keepdims=True) + f32(1e-9)
    np.testing.assert_allclose(y, wanted, **close)
