"""Layers that join, cut and rearrange against NumPy."""

import numpy as np
import pytest
import torch

from bascule_caffe import NetError


@pytest.mark.parametrize(("fields", "axis"), [("", 1), ("axis: -1", 3), ("concat_dim: 0", 0)])
def test_concat_and_slice_are_inverse(one, numbers, fields, axis):
    shapes = [[4, 6, 4, 8], [4, 6, 4, 8]]
    shapes[1][axis] = 2
    bottoms = [numbers(*shape) for shape in shapes]
    (y,), _ = one("Concat", f"concat_param {{ {fields} }}", *bottoms)
    np.testing.assert_array_equal(y, np.concatenate(bottoms, axis))
    fields = fields.replace("concat", "slice") + f" slice_point: {bottoms[0].shape[axis]}"
    parts, _ = one("Slice", f"slice_param {{ {fields} }}", y, tops=2)
    for part, bottom in zip(parts, bottoms, strict=True):
        np.testing.assert_array_equal(part, bottom)


def test_slice_without_points_cuts_into_equal_parts(one, numbers):
    x = numbers(2, 6)
    parts, _ = one("Slice", "", x, tops=3)
    np.testing.assert_array_equal(parts, np.split(x, 3, 1))


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ("shape { dim: 0 dim: -1 }", (2, 60)),
        ("shape { dim: 3 dim: 2 dim: -1 dim: 0 }", (3, 2, 4, 5)),
        ("shape { dim: -1 } axis: 1 num_axes: 2", (2, 12, 5)),
        ("shape { dim: 5 dim: 1 } axis: -2 num_axes: 1", (2, 3, 4, 5, 1)),
        ("shape { dim: 1 } axis: 1 num_axes: 0", (2, 1, 3, 4, 5)),
    ],
)
def test_reshape(one, numbers, fields, shape):
    x = numbers(2, 3, 4, 5)
    (y,), _ = one("Reshape", f"reshape_param {{ {fields} }}", x)
    np.testing.assert_array_equal(y, x.reshape(shape))


@pytest.mark.parametrize(
    ("fields", "shape"), [("", (2, 60)), ("axis: 2", (2, 3, 20)), ("axis: 0 end_axis: -2", (24, 5))]
)
def test_flatten(one, numbers, fields, shape):
    x = numbers(2, 3, 4, 5)
    (y,), _ = one("Flatten", f"flatten_param {{ {fields} }}", x)
    np.testing.assert_array_equal(y, x.reshape(shape))


def test_crop(one, numbers):
    x, like = numbers(2, 5, 8, 9), numbers(2, 3, 4, 5)
    (y,), _ = one("Crop", "crop_param { offset: 2 }", x, like)
    np.testing.assert_array_equal(y, x[:, :, 2:6, 2:7])
    (y,), _ = one("Crop", "crop_param { axis: 1 offset: 1 offset: 0 offset: 3 }", x, like)
    np.testing.assert_array_equal(y, x[:, 1:4, :4, 3:8])
    with pytest.raises(NetError, match="axis 2 of its first bottom has 8, which offset 5 goes beyond"):
        one("Crop", "crop_param { offset: 5 }", x, like)


def test_tile_split_and_silence(build, numbers, one):
    x = numbers(2, 3, 2)
    (y,), _ = one("Tile", "tile_param { tiles: 3 }", x)
    np.testing.assert_array_equal(y, np.tile(x, (1, 3, 1)))
    parts, _ = one("Split", "", x, tops=2)
    np.testing.assert_array_equal(parts, [x, x])
    net = build(
        'layer { name: "i" type: "Input" top: "x" top: "y" input_param { shape { dim: 2 } } }'
        'layer { name: "s" type: "Silence" bottom: "y" }'
    )
    assert net.outputs == ["x"]


@pytest.mark.parametrize(
    ("fields", "function"),
    [
        ("", lambda x: x.sum()),
        ("operation: ASUM axis: 1", lambda x: np.abs(x).sum((1, 2))),
        ("operation: SUMSQ axis: -1 coeff: 0.5", lambda x: 0.5 * (x**2).sum(2)),
        ("operation: MEAN axis: 2", lambda x: x.mean(2)),
    ],
)
def test_reduction(one, numbers, fields, function):
    x = numbers(2, 3, 4)
    (y,), _ = one("Reduction", f"reduction_param {{ {fields} }}", x)
    np.testing.assert_allclose(y, function(x), rtol=1e-12)


def test_argmax(one, numbers):
    x = numbers(2, 3, 4, 5).round()  # rounded: many are equal
    largest = lambda rows, k: [sorted(range(len(row)), key=lambda i: (row[i], i), reverse=True)[:k] for row in rows]  # noqa: E731
    (y,), _ = one("ArgMax", "argmax_param { top_k: 3 }", x)
    places = np.array(largest(x.reshape(2, 60), 3))
    np.testing.assert_array_equal(y, places.reshape(2, 1, 3, 1))
    (y,), _ = one("ArgMax", "argmax_param { top_k: 3 out_max_val: true }", x)
    values = np.take_along_axis(x.reshape(2, 60), places, 1)
    np.testing.assert_array_equal(y, np.stack([places, values], 1).reshape(2, 2, 3, 1))
    (y,), _ = one("ArgMax", "argmax_param { axis: 1 }", x)
    np.testing.assert_array_equal(y, 2 - np.flip(x, 1).argmax(1)[:, None])
    (y,), _ = one("ArgMax", "argmax_param { axis: -1 top_k: 2 out_max_val: true }", x)
    np.testing.assert_array_equal(y, -np.sort(-x, 3)[..., :2])


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("axis", [1, 2])
def test_inner_product(one, numbers, axis, transpose):
    x = numbers(2, 3, 4)
    fields = f"num_output: 5 axis: {axis} transpose: {str(transpose).lower()}"
    (y,), net = one("InnerProduct", f"inner_product_param {{ {fields} }}", x)
    w, b = (blob.detach().numpy() for blob in net.layers[-1].blobs)
    flat = x.reshape(*x.shape[:axis], -1)
    np.testing.assert_allclose(y, flat @ (w if transpose else w.T) + b, rtol=1e-9)


def test_embed(one):
    (y,), net = one("Embed", "embed_param { num_output: 3 input_dim: 7 }", np.array([[1.0, 6.0], [0.0, 1.0]]))
    w, b = (blob.detach().numpy() for blob in net.layers[-1].blobs)
    np.testing.assert_allclose(y, w[[[1, 6], [0, 1]]] + b, rtol=1e-12)


def test_dummy_data_and_parameters(build):
    net = build(
        'layer { name: "d" type: "DummyData" top: "a" top: "b" dummy_data_param { '
        "num: 2 channels: 3 height: 1 width: 1 "
        'data_filler { type: "constant" value: 4 } data_filler { type: "uniform" } } }'
        'layer { name: "p" type: "Parameter" top: "p" parameter_param { shape { dim: 4 } } }'
    )
    first, second = net(), net()
    assert (first["a"] == 4).all()
    assert first["a"].shape == (2, 3, 1, 1)
    assert (first["b"] != second["b"]).any()
    assert first["p"] is net.learnable[0].parameter


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        (
            "Reshape",
            "reshape_param { shape { dim: 7 dim: -1 } }",
            r"'\[7, -1\]' is invalid for .* size 12\. .* 2x6",
        ),
        ("Reshape", "reshape_param { shape { dim: -1 dim: -1 } }", "only one dimension can be inferred"),
        ("Flatten", "flatten_param { axis: 5 }", "axis is 5, and its bottom 2x6 has 2 axes"),
        ("Slice", "slice_param { slice_point: 3 }", r"slice_point \[3\] does not cut into 1 tops"),
        ("ArgMax", "argmax_param { top_k: 9 }", "top_k is 9, and must be from 1 to 6"),
        ("InnerProduct", "", "num_output is 0"),
        (
            "InnerProduct",
            "inner_product_param { num_output: 1 weight_filler { type: 'he' } }",
            "no filler 'he'; allowed",
        ),
        ("Tile", "", "tiles is 0"),
        ("Log", "log_param { base: 1 }", "division by zero"),
        ("DummyData", "dummy_data_param { shape { dim: 1 } num: 1 }", "it has shape, and num"),
        (
            "DummyData",
            "dummy_data_param { num: 1 num: 2 channels: 1 height: 1 width: 1 }",
            "it has 2 of num, and takes 1 or 1",
        ),
        ("DummyData", "dummy_data_param { num: 1 }", "it has 0 of channels"),
    ],
)
def test_fields_that_cannot_be(one, kind, fields, said):
    bottoms = [] if kind == "DummyData" else [np.zeros((2, 6))]
    with pytest.raises(NetError, match=rf"net.prototxt:2: layer 'one' \({kind}\): .*{said}"):
        one(kind, fields, *bottoms)


def test_a_batch_of_another_size_than_the_net_was_built_for(build):
    net = build(
        'layer { name: "i" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 dim: 4 dim: 4 } } }'
        'layer { name: "r" type: "Reshape" bottom: "x" top: "y" reshape_param { shape { dim: 0 dim: -1 } } }'
    )
    assert net(x=torch.zeros(5, 3, 4, 4).double())["y"].shape == (5, 48)


def test_old_fields_of_dummy_data_are_repeated(build):
    net = build(
        'layer { name: "d" type: "DummyData" top: "a" top: "b" dummy_data_param { '
        "num: 2 channels: 3 channels: 4 height: 5 width: 1 } }"
    )
    assert (net.shapes["a"], net.shapes["b"]) == ((2, 3, 5, 1), (2, 4, 5, 1))


@pytest.mark.parametrize(("points", "size", "sizes"), [("slice_point: 1", 7, [1, 6]), ("", 6, [3, 3])])
def test_a_batch_of_another_size_is_sliced_at_the_same_points(one, points, size, sizes):
    _, net = one("Slice", f"slice_param {{ axis: 0 {points} }}", np.zeros((4, 2)), tops=2)
    tops = net({"b0": torch.zeros(size, 2).double()})
    assert [len(tops[name]) for name in ("t0", "t1")] == sizes
    with pytest.raises(NetError, match=r"net.prototxt:2: layer 'one' \(Slice\): axis 0 of its bottom has 1, which"):
        net({"b0": torch.zeros(1, 2).double()})
