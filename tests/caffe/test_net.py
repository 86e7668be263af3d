"""Nets: rules, names, sharing, gradients, models, and what is said of bad ones."""

# ruff: noqa: E501 - a layer stands in a line

import numpy as np
import pytest
import torch
from torch import nn

from bascule_caffe import FileError, Net, NetError, NetParameter, foreign, register_layer
from bascule_caffe.layer import DATA, USERS
from bascule_caffe.messages import Model, parse_string, read_binary, write_binary

INPUT = 'layer { name: "i" type: "Input" top: "x" input_param { shape { dim: 2 dim: 3 } } }\n'
IP = 'layer { name: "%s" type: "InnerProduct" bottom: "%s" top: "%s" inner_product_param { num_output: 3 } %s }\n'


def layer_names(text: str, phase: str, **state: object) -> list[str]:
    return [layer.name for layer in Net(parse_string(text, NetParameter), phase, **state).layers]


def test_layers_are_included_by_phase_level_and_stage():
    text = "".join(
        f'layer {{ name: "{name}" type: "DummyData" top: "{name}" dummy_data_param {{ shape {{ dim: 1 }} }} {rules} }}'
        for name, rules in {
            "all": "",
            "train": "include { phase: TRAIN }",
            "not_train": "exclude { phase: TRAIN }",
            "high": "include { min_level: 2 }",
            "low": "include { max_level: 1 }",
            "deploy": 'include { stage: "deploy" not_stage: "val" }',
            "either": 'include { phase: TEST } include { stage: "val" }',
        }.items()
    )
    assert layer_names(text, "TRAIN") == ["all", "train", "low"]
    assert layer_names(text, "TEST", level=2) == ["all", "not_train", "high", "either"]
    assert layer_names(text, "TRAIN", stages=["deploy"]) == ["all", "train", "low", "deploy"]
    assert layer_names(text, "TRAIN", stages=["deploy", "val"]) == ["all", "train", "low", "either"]
    assert layer_names('state { level: 3 stage: "deploy" }' + text, "TRAIN") == ["all", "train", "high", "deploy"]
    with pytest.raises(NetError, match=r"layer 'a' .*it has include and exclude"):
        layer_names('layer { name: "a" type: "ReLU" include { } exclude { } }', "TEST")


def test_an_in_place_layer_takes_the_name_over(build):
    net = build(
        INPUT
        + IP % ("a", "x", "a", "")
        + 'layer { name: "r" type: "ReLU" bottom: "a" top: "a" }'
        + IP % ("b", "a", "b", "")
    )
    x = torch.ones(2, 3).double()
    outputs = net({"x": x}, keep=["a"])
    weight, bias = net.layers[1].blobs
    torch.testing.assert_close(outputs["a"], (x @ weight.T + bias).relu())
    assert net.outputs == ["b"]
    assert net.shapes == {"x": (2, 3), "a": (2, 3), "b": (2, 3)}


def test_shared_blobs_are_one_and_are_learnt_with_the_multipliers_that_one_of_them_names(build):
    share = 'param { name: "w" %s } param { name: "b" }'
    net = build(INPUT + IP % ("a", "x", "a", share % "") + IP % ("b", "a", "b", share % "lr_mult: 2 decay_mult: 0"))
    assert net.layers[1].blobs[0] is net.layers[2].blobs[0]
    assert [(one.lr_mult, one.decay_mult, one.owner) for one in net.learnable] == [
        (2, 0, "a[0]"),
        (1, 1, "a[1]"),
    ]
    net(x=torch.ones(2, 3).double())["b"].sum().backward()
    w, _ = (one.parameter.detach() for one in net.learnable)
    torch.testing.assert_close(net.learnable[1].parameter.grad, 2 * (1 + w.sum(0)))
    with pytest.raises(NetError, match=r"blob 0 shares 'w' with a\[0\]: its lr_mult is 2, that one's is 3"):
        build(INPUT + IP % ("a", "x", "a", share % "lr_mult: 3") + IP % ("b", "a", "b", share % "lr_mult: 2"))


def test_a_blob_is_shared_in_another_shape_only_if_that_is_permitted(build):
    parameter = (
        'layer { name: "p" type: "Parameter" top: "p" param { name: "w" } parameter_param { shape { dim: 9 } } }'
    )
    net = build(INPUT + parameter + IP % ("a", "x", "a", 'param { name: "w" share_mode: PERMISSIVE }'))
    assert net.learnable[0].parameter.shape == (9,)
    x = torch.ones(2, 3).double()
    wanted = x @ net.learnable[0].parameter.view(3, 3).T + net.learnable[1].parameter
    torch.testing.assert_close(net(x=x)["a"], wanted)
    with pytest.raises(NetError, match="its shape is 3x3, that one's is 9"):
        build(INPUT + parameter + IP % ("a", "x", "a", 'param { name: "w" }'))


def test_no_gradient_flows_where_lr_mult_is_0_or_propagate_down_is_false(build):
    frozen = "param { lr_mult: 0 }"
    net = build(
        INPUT + IP % ("a", "x", "a", "") + IP % ("b", "a", "b", frozen) + IP % ("c", "b", "c", "propagate_down: false")
    )
    net(x=torch.ones(2, 3).double())["c"].sum().backward()
    assert [one.parameter.grad is not None for one in net.learnable] == [False, False, False, False, True, True]
    assert not net.learnable[2].parameter.requires_grad


def test_every_weighted_top_counts_into_the_loss(build):
    net = build(
        INPUT
        + IP % ("a", "x", "a", "loss_weight: 0.5")
        + 'layer { name: "e" type: "EuclideanLoss" bottom: "a" bottom: "x" }'
    )
    x = torch.ones(2, 3).double()
    a = net({"x": x}, keep=["a"])["a"]
    torch.testing.assert_close(net.loss, 0.5 * a.sum() + (a - x).square().sum() / 4)
    assert net.loss_weights == {"a": 0.5, "e (automatic)": 1.0}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            IP % ("a", "y", "a", ""),
            r"f:2: layer 'a' \(InnerProduct\): no layer before it makes its bottom 'y'; there are 'x'",
        ),
        (IP % ("a", "x", "a", "") * 2, "its top 'a' is one of layer 'a' already"),
        (IP % ("a", "x", "a", "param { } param { } param { }"), "it has 3 of param, and 2 blobs"),
        (IP % ("a", "x", "a", "loss_weight: 1 loss_weight: 1"), "it has 2 of loss_weight, and 1 tops"),
        (IP % ("a", "x", "a", "bottom: 'x'"), r"it has 2 bottoms, and takes 1"),
        (
            IP % ("a", "x", "a", "inner_produkt_param { num_output: 2 }"),
            r"f:2: layer 'a' \(InnerProduct\): LayerParameter has no field 'inner_produkt_param' \(did you mean "
            r"'inner_product_param'\?\); it has accuracy_param, ",
        ),
        (
            'layer { name: "p" type: "PriorBox" prior_box_param { min_size: 3 } }',
            r"f:2: layer 'p' \(PriorBox\): SSD is left out",
        ),
        ('layer { name: "p" type: "PSROIPooling" }', "R-FCN is left out"),
        ('layer { name: "w" type: "WindowData" }', "windows is left out"),
        ('layer { name: "p" type: "Convolutoin" }', "its type is unknown: .* or use one of .*Convolution"),
        ('layer { name: "p" type: "Python" python_param { module: "m" layer: "L" } }', r"register_layer\('L'"),
        ('layers { name: "c" type: RELU }', "f:2: the net has both"),
    ],
)
def test_nets_that_cannot_be_built_are_errors_with_file_line_layer_and_type(text, said):
    with pytest.raises(NetError, match=said):
        Net(parse_string(INPUT + text, NetParameter, "f"))


def test_bad_calls_of_a_net_are_errors(build):
    net = build(INPUT + IP % ("a", "x", "a", ""))
    with pytest.raises(NetError, match="needs its input 'x'"):
        net()
    with pytest.raises(NetError, match="has no blob 'z'; there are 'x', 'a'"):
        net(x=torch.ones(2, 3), z=torch.ones(2))
    with pytest.raises(NetError, match="has no blob 'fc7'"):
        net({"x": torch.ones(2, 3)}, keep=["fc7"])
    with pytest.raises(ValueError, match="allowed are 'TRAIN' and 'TEST'"):
        Net(NetParameter(), "train")


def test_a_forward_over_bottoms_that_do_not_fit_is_an_error_with_file_line_and_layer():
    net = Net(parse_string(INPUT + IP % ("a", "x", "a", ""), NetParameter, "f"))
    with pytest.raises(NetError, match=r"f:2: layer 'a' \(InnerProduct\): .* \(over x 2x4\)"):
        net(x=torch.ones(2, 4))


def test_a_model_is_read_and_written_by_the_names_of_layers(build, tmp_path):
    text = INPUT + IP % ("a", "x", "a", "") + IP % ("b", "a", "b", "")
    net = build(text)
    path = tmp_path / "net.caffemodel"
    write_binary(path, net.float().to_parameter())
    other = build(text.replace('name: "b"', 'name: "c"'))
    before = other.layers[2].blobs[0].clone()
    assert other.load_caffemodel(path) == ["a"]
    assert torch.equal(other.layers[1].blobs[0], net.layers[1].blobs[0].double())
    assert torch.equal(other.layers[2].blobs[0], before)
    wider = IP.replace("num_output: 3", "num_output: 4") % ("b", "a", "b", "")
    with pytest.raises(NetError, match=r"net.caffemodel: layer 'b': blob 0 is 3x3, and 4x3 in net ''"):
        build(INPUT + IP % ("a", "x", "a", "") + wider).load_caffemodel(path)
    with pytest.raises(NetError, match=r"has no layer of net '': it has 'i', 'a', 'b'"):
        build(INPUT + IP % ("z", "x", "z", "")).load_caffemodel(path)
    unbiased = IP.replace("num_output: 3", "num_output: 3 bias_term: false") % ("a", "x", "a", "")
    with pytest.raises(NetError, match="layer 'a' has 2 blobs, and 1 in net ''"):
        build(INPUT + unbiased).load_caffemodel(path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(FileError, match=r"net.caffemodel: its .* bytes are no Model"):
        other.load_caffemodel(path)


def test_of_a_model_only_names_types_and_blobs_are_read(tmp_path):
    path = tmp_path / "fork.caffemodel"
    # A layer with a field 139 that is a number, where Caffe has BatchNormParameter.
    layer = b"\x0a\x01a\x12\x04ReLU" + b"\xd8\x08\x07"
    path.write_bytes(b"\xa2\x06" + bytes([len(layer)]) + layer)
    assert read_binary(path, Model).layer[0].name == "a"


def test_a_v1_model_with_four_axes(build, tmp_path):
    model = Model()
    old = model.layers.add(name="a")
    weight, bias = (
        old.blobs.add(num=1, channels=1, height=3, width=3),
        old.blobs.add(num=1, channels=1, height=1, width=3),
    )
    weight.data.append(np.arange(9, dtype="<f4").tobytes())
    bias.data.append(np.arange(3, dtype="<f4").tobytes())
    write_binary(tmp_path / "old.caffemodel", model)
    net = build(INPUT + IP % ("a", "x", "a", ""))
    net.load_caffemodel(tmp_path / "old.caffemodel")
    assert net.layers[1].blobs[0].flatten().tolist() == list(range(9))
    assert net.layers[1].blobs[1].tolist() == [0, 1, 2]


def test_a_v1_net_and_its_inputs_are_upgraded(build):
    net = build(
        'name: "old" input: "x" input_dim: 2 input_dim: 3 input_dim: 4 input_dim: 4\n'
        'layers { name: "c" type: CONVOLUTION bottom: "x" top: "c" blobs_lr: 1 blobs_lr: 2 weight_decay: 1 weight_decay: 0 '
        'param: "w" convolution_param { num_output: 2 kernel_size: 3 } }\n'
        'layers { name: "p" type: SIGMOID_CROSS_ENTROPY_LOSS bottom: "c" bottom: "c" top: "p" loss_weight: 3 '
        "include { phase: TEST } }"
        'layers { name: "q" type: DECONVOLUTION bottom: "c" top: "q" convolution_param { num_output: 2 kernel_size: 3 } }'
    )
    assert [layer.kind for layer in net.layers] == ["Input", "Convolution", "SigmoidCrossEntropyLoss", "Deconvolution"]
    assert [(one.lr_mult, one.decay_mult) for one in net.learnable[:2]] == [(1, 1), (2, 0)]
    assert net.loss_weights == {"p": 3}
    assert net.shapes["c"] == (2, 2, 2, 2)
    with pytest.raises(NetError, match="V0, the form of 2013, is left out"):
        build('layers { layer { name: "c" type: "conv" } }')
    with pytest.raises(NetError, match="2 of input, and 4 of input_dim"):
        build('input: "a" input: "b" input_dim: 1 input_dim: 1 input_dim: 1 input_dim: 1')


def test_the_transformation_of_old_data_layers_is_found_by_their_factory(monkeypatch):
    seen = []

    class Source:
        shapes = ((2, 3), (2,))

        def __next__(self):
            return torch.ones(2, 3), torch.zeros(2)

    def factory(parameter, phase, data):
        seen.append((parameter.transform_param.crop_size, parameter.transform_param.mirror, phase, data))
        return Source()

    monkeypatch.setitem(DATA, "Data", factory)
    text = 'layers { name: "d" type: DATA top: "x" top: "l" data_param { crop_size: 5 mirror: true } }'
    net = Net(parse_string(text, NetParameter), "TRAIN", data=7).double()
    assert seen == [(5, True, "TRAIN", 7)]
    outputs = net()
    assert outputs["x"].dtype == torch.float64
    assert list(outputs) == ["l", "x"]  # in the order of the alphabet


def test_inputs_take_the_place_of_a_data_layer():
    text = 'layer { name: "d" type: "Data" top: "x" top: "l" }' + IP % ("a", "x", "a", "")
    net = Net(parse_string(text, NetParameter), inputs={"x": (4, 5), "l": (4,)})
    assert net.shapes == {"x": (4, 5), "l": (4,), "a": (4, 3)}


class Zoom(nn.Module):
    """A user's layer: enlarges by a factor that it learns."""

    def __init__(self, parameter, shapes):
        super().__init__()
        self.weight = nn.Parameter(torch.full(shapes[0][1:], 2.0))
        self.rate = int(foreign(parameter, "zoom_param").strip("{} ").split(":")[1]) if parameter.foreign else 1

    def forward(self, bottom):
        return torch.cat([bottom * self.weight] * self.rate, 1)


def test_a_users_module_is_a_layer(tmp_path):
    with pytest.raises(ValueError, match="'ReLU' is a layer of Caffe's own"):
        register_layer("ReLU", Zoom)
    register_layer("Zoom", Zoom)
    register_layer("tools.ZoomLayer", Zoom)
    try:
        text = (
            INPUT
            + 'layer { name: "z" type: "Zoom" bottom: "x" top: "z" zoom_param { factor: 3 } param { lr_mult: 5 } }'
            + 'layer { name: "p" type: "Python" bottom: "x" top: "p" python_param { module: "tools" layer: "ZoomLayer" } }'
        )
        net = Net(parse_string(text, NetParameter))
        assert net.shapes["z"] == (2, 9)
        assert net(x=torch.ones(2, 3))["z"].tolist() == [[2.0] * 9] * 2
        assert [(one.lr_mult, one.owner) for one in net.learnable] == [(5, "z[0]"), (1, "p[0]")]
        assert next(iter(net.parameters())) is net.learnable[0].parameter
    finally:
        del USERS["Zoom"], USERS["tools.ZoomLayer"]


def test_a_users_module_has_its_statistics_as_blobs_and_is_tested_in_test_mode(tmp_path):
    register_layer("Norm", lambda parameter, shapes: nn.BatchNorm1d(shapes[0][1]))
    try:
        text = INPUT + 'layer { name: "n" type: "Norm" bottom: "x" top: "n" param { lr_mult: 5 } }'
        train, test, other = (Net(parse_string(text, NetParameter), phase) for phase in ("TRAIN", "TEST", "TEST"))
        test.share(train)
        train(x=torch.tensor([[1.0, 2, 3], [3.0, 2, 1]]))
        mean = train.layers[1].module.running_mean
        assert mean.tolist() == pytest.approx([0.2, 0.2, 0.2])
        x = torch.randn(2, 3)
        wanted = test(x=x)["n"]
        assert mean.tolist() == pytest.approx([0.2, 0.2, 0.2])  # as before
        train(x=x)
        assert mean.tolist() != pytest.approx([0.2, 0.2, 0.2])
        assert [(one.lr_mult, one.parameter.requires_grad) for one in train.learnable] == [
            (5, True),
            (1, True),
            (0, False),
            (0, False),
        ]
        write_binary(tmp_path / "x.caffemodel", train.to_parameter())
        other.load_caffemodel(tmp_path / "x.caffemodel")
        assert torch.equal(other(x=x)["n"], test(x=x)["n"])
        assert not torch.equal(other(x=x)["n"], wanted)
    finally:
        del USERS["Norm"]


def test_a_test_net_uses_the_blobs_of_its_training_net(build):
    text = INPUT + IP % ("a", "x", "a", "") + 'layer { name: "n" type: "BatchNorm" bottom: "a" top: "n" }'
    text += 'layer { name: "s" type: "Scale" bottom: "n" top: "n" }'
    train, test = build(text, "TRAIN"), build(text, "TEST")
    test.share(train)
    train(x=torch.randn(2, 3).double())
    assert test.layers[2].blobs[2].item() == 1
    train.layers[3].blobs[0].data.fill_(0)
    assert (test(x=torch.ones(2, 3).double())["n"] == 0).all()
    with pytest.raises(NetError, match="layer 'a' has other blobs"):
        test.share(build(text.replace("num_output: 3", "num_output: 4")))


@pytest.mark.parametrize("between", ["", 'layer { name: "q" type: "Sigmoid" bottom: "a" top: "q" }'])
def test_a_relu_in_place_has_the_gradients_of_one_that_is_not(build, between):
    text = INPUT + IP % ("a", "x", "a", "") + between + 'layer { name: "r" type: "ReLU" bottom: "a" top: "%s" }'
    gradients = []
    for top in ("a", "r"):
        net = build(text % top)
        outputs = net(x=torch.tensor([[1.0, -2.0, 3.0], [-1.0, 0.5, 2.0]]).double())
        sum(
            (index + 1) * outputs[name].square().sum() for index, name in enumerate([top, "q"][: 1 + bool(between)])
        ).backward()
        gradients.append([entry.parameter.grad for entry in net.learnable])
    for in_place, apart in zip(*gradients, strict=True):
        assert torch.equal(in_place, apart)
