"""Losses, softmax and accuracy against NumPy in float64."""

import numpy as np
import pytest
import torch

from bascule_caffe import NetError

close = {"rtol": 1e-9, "atol": 1e-12}


def softmax(x, axis=1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


@pytest.mark.parametrize(
    ("loss", "divisor"),
    [
        ("", lambda labels: labels.size),
        ("ignore_label: 2", lambda labels: (labels != 2).sum()),
        ("ignore_label: 2 normalization: FULL", lambda labels: labels.size),
        ("ignore_label: 2 normalization: BATCH_SIZE", lambda labels: 3),
        ("normalization: NONE", lambda labels: 1),
        ("ignore_label: 2 normalize: false", lambda labels: 3),
        ("ignore_label: 2 normalize: true", lambda labels: (labels != 2).sum()),
        ("normalize: false normalization: FULL", lambda labels: labels.size),
    ],
)
def test_softmax_with_loss(build, numbers, loss, divisor):
    net = build(
        'layer { name: "i" type: "Input" top: "x" top: "l" input_param { shape { dim: 3 dim: 4 dim: 2 dim: 2 } '
        "shape { dim: 3 dim: 1 dim: 2 dim: 2 } } }"
        f'layer {{ name: "s" type: "SoftmaxWithLoss" bottom: "x" bottom: "l" top: "loss" top: "p" '
        f"loss_param {{ {loss} }} }}"
    )
    x = torch.tensor(numbers(3, 4, 2, 2), requires_grad=True)
    labels = np.arange(12).reshape(3, 1, 2, 2) % 4
    outputs = net(x=x, l=torch.tensor(labels).double())
    p = softmax(x.detach().numpy())
    used = labels != (2 if "ignore" in loss else -1)
    picked = np.take_along_axis(p, labels, 1)
    wanted = -(np.log(picked) * used).sum() / divisor(labels)
    np.testing.assert_allclose(outputs["loss"].item(), wanted, **close)
    np.testing.assert_allclose(outputs["p"].detach().numpy(), p, **close)
    assert net.loss.item() == outputs["loss"].item()
    net.loss.backward()
    gradient = (p - (np.arange(4).reshape(1, 4, 1, 1) == labels)) * used / divisor(labels)
    np.testing.assert_allclose(x.grad.numpy(), gradient, **close)


def test_softmax_with_loss_of_nothing_but_ignored_labels_is_0_and_a_tiny_probability_is_cut_off(build, numbers):
    text = (
        'layer { name: "i" type: "Input" top: "x" top: "l" input_param { shape { dim: 1 dim: 2 } shape { dim: 1 } } }'
        'layer { name: "s" type: "SoftmaxWithLoss" bottom: "x" bottom: "l" %s }'
    )
    x, one = torch.tensor([[400.0, 0.0]], requires_grad=True, dtype=torch.float64), torch.ones(1).double()
    net = build(text % "loss_param { ignore_label: 1 }")
    net(x=x, l=one)
    assert net.loss.item() == 0
    net = build(text % "loss_weight: 2")
    assert net.outputs == []  # a loss without a top still counts
    net(x=x, l=one)
    np.testing.assert_allclose(net.loss.item(), -2 * np.log(float(np.finfo(np.float32).tiny)), **close)
    net.loss.backward()
    np.testing.assert_allclose(x.grad.numpy(), [[2, -2]], **close)


def test_softmax_of_an_axis(one, numbers):
    x = numbers(2, 3, 4)
    (y,), _ = one("Softmax", "softmax_param { axis: -1 }", x)
    np.testing.assert_allclose(y, softmax(x, 2), **close)


def test_multinomial_logistic_loss(one, numbers):
    p, labels = softmax(numbers(3, 4)), np.array([1.0, 0.0, 3.0])
    p[1, 0] = 0
    (y,), _ = one("MultinomialLogisticLoss", "", p, labels)
    wanted = -np.log(np.maximum(p[range(3), labels.astype(int)], 1e-20)).sum() / 3
    np.testing.assert_allclose(y, wanted, **close)


@pytest.mark.parametrize(
    ("loss", "divisor"), [("", 3), ("normalization: FULL", 12), ("normalization: VALID ignore_label: -1", 9)]
)
def test_sigmoid_cross_entropy(one, numbers, loss, divisor):
    x, t = numbers(3, 4), np.array([[0, 1, -1, 0.5]] * 3)
    used = t != (-1 if "ignore" in loss else 9)
    (y,), _ = one("SigmoidCrossEntropyLoss", f"loss_param {{ {loss} }}", x, t)
    p = 1 / (1 + np.exp(-x))
    wanted = -((t * np.log(p) + (1 - t) * np.log(1 - p)) * used).sum() / divisor
    np.testing.assert_allclose(y, wanted, **close)


def test_euclidean_hinge_and_smooth_l1(one, numbers):
    a, b, inside, outside = (numbers(3, 4) for _ in range(4))
    (y,), _ = one("EuclideanLoss", "", a, b)
    np.testing.assert_allclose(y, ((a - b) ** 2).sum() / 6, **close)
    labels = np.array([0.0, 3.0, 1.0])
    signs = np.where(np.arange(4) == labels[:, None], -1, 1)
    for norm, power in (("L1", 1), ("L2", 2)):
        (y,), _ = one("HingeLoss", f"hinge_loss_param {{ norm: {norm} }}", a, labels)
        np.testing.assert_allclose(y, (np.maximum(0, 1 + signs * a) ** power).sum() / 3, **close)
    d = inside * (a - b)
    for sigma, weights in ((1, ()), (3, (inside, outside))):
        d = (a - b) * inside if weights else a - b
        terms = np.where(abs(d) < 1 / sigma**2, 0.5 * (sigma * d) ** 2, abs(d) - 0.5 / sigma**2)
        (y,), _ = one("SmoothL1Loss", f"smooth_l1_loss_param {{ sigma: {sigma} }}", a, b, *weights)
        np.testing.assert_allclose(y, (terms * outside if weights else terms).sum() / 3, **close)


@pytest.mark.parametrize("legacy", [False, True])
def test_contrastive_loss_and_its_gradient(build, numbers, legacy):
    net = build(
        'layer { name: "i" type: "Input" top: "a" top: "b" top: "y" input_param { shape { dim: 4 dim: 3 } '
        "shape { dim: 4 dim: 3 } shape { dim: 4 } } }"
        'layer { name: "c" type: "ContrastiveLoss" bottom: "a" bottom: "b" bottom: "y" top: "l" '
        f"contrastive_loss_param {{ margin: 3 legacy_version: {str(legacy).lower()} }} }}"
    )
    a, b = torch.tensor(numbers(4, 3), requires_grad=True), torch.tensor(numbers(4, 3))
    b[3] = a.detach()[3]  # equal, and not alike
    alike = np.array([1.0, 0.0, 0.0, 0.0])
    loss = net(a=a, b=b, y=torch.tensor(alike))["l"]
    difference = a.detach().numpy() - b.numpy()
    square = (difference**2).sum(1)
    distance = np.sqrt(square)
    apart = np.maximum(3 - square, 0) if legacy else np.maximum(3 - distance, 0) ** 2
    np.testing.assert_allclose(loss.item(), np.where(alike, square, apart).sum() / 8, **close)
    loss.backward()
    pushed = (square < 3).astype(float) if legacy else np.maximum(3 - distance, 0) / (distance + 1e-4)
    np.testing.assert_allclose(a.grad.numpy(), difference * np.where(alike, 1, -pushed)[:, None] / 4, **close)


@pytest.mark.parametrize(("fields", "top_k"), [("", 1), ("top_k: 2", 2), ("ignore_label: 1", 1)])
def test_accuracy(one, numbers, fields, top_k):
    x, labels = numbers(4, 3, 2).round(1), np.arange(8).reshape(4, 1, 2) % 3
    x[0, :, 0] = 1  # a tie counts against the label
    tops, _ = one("Accuracy", f"accuracy_param {{ {fields} }}", x, labels.astype(float), tops=2)
    right, seen = np.zeros(3), np.zeros(3)
    for item in range(4):
        for place in range(2):
            label = labels[item, 0, place]
            if label == 1 and "ignore" in fields:
                continue
            seen[label] += 1
            right[label] += (x[item, :, place] >= x[item, label, place]).sum() <= top_k
    np.testing.assert_allclose(tops[0], right.sum() / seen.sum(), **close)
    np.testing.assert_allclose(tops[1], right / np.maximum(seen, 1), **close)


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        ("SoftmaxWithLoss", [(3, 4), (4,)]),
        ("Accuracy", [(3, 4), (2,)]),
        ("EuclideanLoss", [(3, 4), (3, 3)]),
        ("HingeLoss", [(3, 4), (2,)]),
        ("ContrastiveLoss", [(3, 4), (3, 4), (2,)]),
        ("SmoothL1Loss", [(3, 4), (4, 3)]),
    ],
)
def test_labels_that_do_not_fit_are_named_with_the_layers_that_made_them(one, kind, shapes):
    with pytest.raises(NetError, match=rf"net.prototxt:2: layer 'one' \({kind}\): .*'b1' .* of layer 'ib1'"):
        one(kind, "", *map(np.zeros, shapes))


def test_a_label_beyond_the_classes_says_which_layer(build):
    net = build(
        'layer { name: "i" type: "Input" top: "x" top: "l" input_param { shape { dim: 2 dim: 3 } shape { dim: 2 } } }'
        'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "x" bottom: "l" }'
    )
    said = r"net.prototxt:1: layer 'loss' \(SoftmaxWithLoss\): .*out of bounds.* \(over x 2x3, l 2\)"
    with pytest.raises(NetError, match=said):
        net(x=torch.zeros(2, 3).double(), l=torch.tensor([0.0, 3.0]).double())
