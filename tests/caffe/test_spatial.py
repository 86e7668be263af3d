"""Convolution, pooling, LRN and ROIPooling against NumPy in float64."""

import itertools
import math

import numpy as np
import pytest
import torch

from bascule_caffe import NetError

close = {"rtol": 1e-9, "atol": 1e-11}


def convolution(x, w, b, stride, pad, dilation, group):
    """As its definition has it: a sum over the kernel's places."""
    count = x.ndim - 2
    x = np.pad(x, [(0, 0), (0, 0)] + [(p, p) for p in pad])
    kernel = w.shape[2:]
    out = [(x.shape[2 + i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in range(count)]
    y = np.zeros((x.shape[0], w.shape[0], *out))
    inner, outer = w.shape[1], w.shape[0] // group
    for place in itertools.product(*map(range, kernel)):
        at = tuple(
            slice(place[i] * dilation[i], place[i] * dilation[i] + stride[i] * (out[i] - 1) + 1, stride[i])
            for i in range(count)
        )
        for g in range(group):
            part = x[(slice(None), slice(g * inner, (g + 1) * inner), *at)]
            weight = w[(slice(g * outer, (g + 1) * outer), slice(None), *place)]
            y[:, g * outer : (g + 1) * outer] += np.einsum("nc...,oc->no...", part, weight)
    return y if b is None else y + b.reshape(-1, *[1] * count)


def deconvolution(x, w, b, stride, pad, dilation, group):
    """Each number adds its kernel to the output."""
    count = x.ndim - 2
    kernel = w.shape[2:]
    full = [stride[i] * (x.shape[2 + i] - 1) + dilation[i] * (kernel[i] - 1) + 1 for i in range(count)]
    y = np.zeros((x.shape[0], w.shape[1] * group, *full))
    inner, outer = x.shape[1] // group, w.shape[1]
    for place in itertools.product(*map(range, kernel)):
        at = tuple(
            slice(place[i] * dilation[i], place[i] * dilation[i] + stride[i] * (x.shape[2 + i] - 1) + 1, stride[i])
            for i in range(count)
        )
        for g in range(group):
            weight = w[(slice(g * inner, (g + 1) * inner), slice(None), *place)]
            part = np.einsum("nc...,co->no...", x[:, g * inner : (g + 1) * inner], weight)
            y[(slice(None), slice(g * outer, (g + 1) * outer), *at)] += part
    y = y[(slice(None), slice(None), *(slice(p, full[i] - p) for i, p in enumerate(pad)))]
    return y if b is None else y + b.reshape(-1, *[1] * count)


@pytest.mark.parametrize("kind", ["Convolution", "Deconvolution"])
@pytest.mark.parametrize(
    ("shape", "fields", "stride", "pad", "dilation", "group"),
    [
        ((2, 4, 7, 6), "kernel_size: 3", (1, 1), (0, 0), (1, 1), 1),
        ((2, 4, 7, 9), "kernel_h: 3 kernel_w: 2 stride_h: 2 stride_w: 1 pad_h: 1 pad_w: 0", (2, 1), (1, 0), (1, 1), 1),
        ((1, 4, 9, 9), "kernel_size: 3 stride: 2 pad: 2 dilation: 2 group: 2", (2, 2), (2, 2), (2, 2), 2),
        ((2, 4, 6, 7), "kernel_size: 2 kernel_size: 3 group: 4 bias_term: false", (1, 1), (0, 0), (1, 1), 4),
        ((1, 4, 5, 6, 7), "kernel_size: 3 pad: 1 stride: 2 stride: 1 stride: 2", (2, 1, 2), (1, 1, 1), (1, 1, 1), 1),
        ((2, 4, 11), "kernel_size: 5 stride: 3 pad: 1 dilation: 2", (3,), (1,), (2,), 1),
    ],
)
def test_convolutions(one, numbers, kind, shape, fields, stride, pad, dilation, group):
    x = numbers(*shape)
    (y,), net = one(kind, f"convolution_param {{ num_output: 8 {fields} }}", x)
    w, *b = (blob.detach().numpy() for blob in net.layers[-1].blobs)
    reference = convolution if kind == "Convolution" else deconvolution
    np.testing.assert_allclose(y, reference(x, w, b[0] if b else None, stride, pad, dilation, group), **close)


def test_a_convolution_behind_another_axis_takes_the_axes_before_as_a_batch(one, numbers):
    x = numbers(2, 3, 4, 6, 5)
    (y,), net = one("Convolution", "convolution_param { num_output: 2 kernel_size: 3 axis: 2 }", x)
    w, b = (blob.detach().numpy() for blob in net.layers[-1].blobs)
    flat = convolution(x.reshape(6, 4, 6, 5), w, b, (1, 1), (0, 0), (1, 1), 1)
    np.testing.assert_allclose(y, flat.reshape(2, 3, 2, 4, 3), **close)


def pooling(x, kernel, stride, pad, average, ceil=True):
    """As Caffe's loops have it: windows are clipped to size + pad for the divisor, then to the bottom."""
    out = []
    for size, k, s, p in zip(x.shape[2:], kernel, stride, pad, strict=True):
        count = (math.ceil if ceil else math.floor)((size + 2 * p - k) / s) + 1
        out.append(count - 1 if any(pad) and (count - 1) * s >= size + p else count)
    y = np.zeros((*x.shape[:2], *out))
    for place in itertools.product(*map(range, out)):
        at, divisor = [], 1
        for i, size in enumerate(x.shape[2:]):
            start = place[i] * stride[i] - pad[i]
            end = min(start + kernel[i], size + pad[i])
            divisor *= end - start
            at.append(slice(max(start, 0), min(end, size)))
        window = x[(slice(None), slice(None), *at)].reshape(*x.shape[:2], -1)
        y[(slice(None), slice(None), *place)] = window.sum(2) / divisor if average else window.max(2)
    return y


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize(
    ("shape", "fields", "kernel", "stride", "pad", "ceil"),
    [
        ((2, 3, 7, 7), "kernel_size: 3 stride: 2", (3, 3), (2, 2), (0, 0), True),
        ((2, 3, 6, 8), "kernel_size: 3 stride: 2", (3, 3), (2, 2), (0, 0), True),  # the last window hangs over
        ((2, 3, 6, 8), "kernel_size: 3 stride: 2 pad: 1", (3, 3), (2, 2), (1, 1), True),
        ((2, 3, 5, 5), "kernel_size: 2 stride: 2 pad: 1", (2, 2), (2, 2), (1, 1), True),  # the last is left out
        ((1, 2, 6, 6), "kernel_size: 3 stride: 2 round_mode: FLOOR", (3, 3), (2, 2), (0, 0), False),
        ((1, 2, 6, 6), "kernel_size: 3 stride: 2 ceil_mode: false", (3, 3), (2, 2), (0, 0), False),
        (
            (1, 2, 6, 7),
            "kernel_h: 3 kernel_w: 2 stride_h: 1 stride_w: 2 pad_h: 2 pad_w: 1",
            (3, 2),
            (1, 2),
            (2, 1),
            True,
        ),
        ((1, 2, 6, 7), "kernel_size: 4 stride: 3 pad: 3", (4, 4), (3, 3), (3, 3), True),
        ((1, 2, 1, 5), "kernel_size: 2 stride: 2", (2, 2), (2, 2), (0, 0), True),  # larger than the bottom
        (
            (2, 2, 5, 6, 7),
            "kernel_size: 3 kernel_size: 2 kernel_size: 3 stride: 2",
            (3, 2, 3),
            (2,) * 3,
            (0,) * 3,
            True,
        ),
        ((2, 3, 5, 4), "global_pooling: true", (5, 4), (1, 1), (0, 0), True),
        ((2, 3, 9), "kernel_size: 4 stride: 3", (4,), (3,), (0,), True),
    ],
)
def test_pooling(one, numbers, average, shape, fields, kernel, stride, pad, ceil):
    x = numbers(*shape)
    (y,), _ = one("Pooling", f"pooling_param {{ pool: {'AVE' if average else 'MAX'} {fields} }}", x)
    np.testing.assert_allclose(y, pooling(x, kernel, stride, pad, average, ceil), **close)


def test_the_second_top_of_pooling_has_the_places_of_the_largest(one, numbers):
    x = numbers(2, 3, 6, 6)
    (y, mask), _ = one("Pooling", "pooling_param { kernel_size: 2 stride: 2 }", x, tops=2)
    np.testing.assert_array_equal(
        np.take_along_axis(x.reshape(2, 3, 36), mask.astype(int).reshape(2, 3, 9), 2), y.reshape(2, 3, 9)
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("kernel_size: 2 stride: 6", "kernel 2, stride 6 and pad 0 is empty on an axis of 6"),
        ("kernel_size: 2 pad: 2", r"pad is \[2, 2\], and must be less than the kernel \[2, 2\]"),
        ("kernel_size: 2 pool: STOCHASTIC", "STOCHASTIC is left out"),
        ("kernel_size: 2 global_pooling: true", "remove one"),
        ("", "it has 0 of kernel_size"),
        ("kernel_size: 2 kernel_h: 2", "it has kernel_size and kernel_h or kernel_w"),
    ],
)
def test_pooling_that_cannot_be(one, numbers, fields, said):
    with pytest.raises(NetError, match=rf"net.prototxt:2: layer 'one' \(Pooling\): .*{said}"):
        one("Pooling", f"pooling_param {{ {fields} }}", numbers(1, 1, 6, 6))


@pytest.mark.parametrize(
    "fields", ["num_output: 3 kernel_size: 3 group: 2", "num_output: 4 kernel_size: 9", "num_output: 4 kernel_size: 0"]
)
def test_convolutions_that_cannot_be_name_the_layer_before(one, numbers, fields):
    with pytest.raises(NetError, match=r"layer 'one' \(Convolution\): .*Its bottoms: 'b0' 1x4x5x5 of layer 'ib0'"):
        one("Convolution", f"convolution_param {{ {fields} }}", numbers(1, 4, 5, 5))


def test_lrn_across_channels(one, numbers):
    x = numbers(2, 7, 3, 3)
    (y,), _ = one("LRN", "lrn_param { local_size: 3 alpha: 0.5 beta: 0.6 k: 2 }", x)
    square = np.pad(x**2, [(0, 0), (1, 1), (0, 0), (0, 0)])
    total = square[:, :-2] + square[:, 1:-1] + square[:, 2:]
    np.testing.assert_allclose(y, x * (2 + 0.5 / 3 * total) ** -np.float64(np.float32(0.6)), **close)


def test_lrn_within_a_channel_takes_no_notice_of_k(one, numbers):
    x = numbers(2, 3, 5, 6)
    (y,), _ = one("LRN", "lrn_param { local_size: 3 alpha: 0.5 beta: 0.75 k: 9 norm_region: WITHIN_CHANNEL }", x)
    mean = pooling(x**2, (3, 3), (1, 1), (1, 1), True)
    np.testing.assert_allclose(y, x * (1 + 0.5 * mean) ** -0.75, **close)


def test_roi_pooling_and_its_gradient(build, numbers):
    net = build(
        'layer { name: "i" type: "Input" top: "x" top: "rois" input_param { shape { dim: 2 dim: 2 dim: 9 dim: 12 } '
        "shape { dim: 3 dim: 5 } } }"
        'layer { name: "roi" type: "ROIPooling" bottom: "x" bottom: "rois" top: "y" '
        "roi_pooling_param { pooled_h: 3 pooled_w: 4 spatial_scale: 0.5 } }"
    )
    x = torch.tensor(numbers(2, 2, 9, 12).round(1), requires_grad=True)  # rounded: some are equal
    rois = np.array([[0, 1, 1, 17, 13], [1, 5, 3, 6, 4], [1, 15, 10, 40, 30]])
    y = net(x=x, rois=torch.tensor(rois, dtype=torch.float64))["y"]
    wanted, gradient = np.zeros((3, 2, 3, 4)), np.zeros(x.shape)
    values = x.detach().numpy()
    for r, (item, *corners) in enumerate(rois):
        x1, y1, x2, y2 = (math.floor(corner * 0.5 + 0.5) for corner in corners)
        high, wide = np.float32(max(y2 - y1 + 1, 1)) / np.float32(3), np.float32(max(x2 - x1 + 1, 1)) / np.float32(4)
        for c, row, column in itertools.product(range(2), range(3), range(4)):
            top, bottom = (min(max(int(edge) + y1, 0), 9) for edge in (np.floor(row * high), np.ceil((row + 1) * high)))
            left, right = (
                min(max(int(edge) + x1, 0), 12) for edge in (np.floor(column * wide), np.ceil((column + 1) * wide))
            )
            window = values[item, c, top:bottom, left:right]
            if window.size:
                wanted[r, c, row, column] = window.max()
                i, j = np.unravel_index(window.argmax(), window.shape)  # the first
                gradient[item, c, top + i, left + j] += r + 1
    np.testing.assert_array_equal(y.detach().numpy(), wanted)
    (y * torch.arange(1.0, 4.0, dtype=torch.float64)[:, None, None, None]).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), gradient)
