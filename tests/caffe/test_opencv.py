"""Whole nets and their models against OpenCV's own reader of Caffe's files.

OpenCV is silently wrong about Axpy, a deconvolution's dilation, InnerProduct's transpose and LRN's k: these are only
compared with NumPy.
"""

# ruff: noqa: E501 - a layer stands in a line

import cv2
import numpy as np
import pytest
import torch

from bascule_caffe import Net, NetParameter
from bascule_caffe.messages import parse_string

CONV = 'layer {{ name: "{0}" type: "Convolution" bottom: "{1}" top: "{0}" convolution_param {{ {2} weight_filler {{ type: "msra" }} bias_filler {{ type: "uniform" }} }} }}'
POOL = 'layer {{ name: "{0}" type: "Pooling" bottom: "{1}" top: "{0}" pooling_param {{ {2} }} }}'
PLAIN = 'layer {{ name: "{0}" type: "{1}" bottom: "{2}" top: "{3}" {4} }}'
NETS = {
    "lenet": [
        CONV.format("c1", "data", "num_output: 6 kernel_size: 5"),
        POOL.format("p1", "c1", "pool: MAX kernel_size: 2 stride: 2"),
        CONV.format("c2", "p1", "num_output: 8 kernel_size: 3 group: 2"),
        POOL.format("p2", "c2", "pool: AVE kernel_size: 3 stride: 2"),
        PLAIN.format(
            "ip", "InnerProduct", "p2", "ip", 'inner_product_param { num_output: 5 weight_filler { type: "xavier" } }'
        ),
        PLAIN.format("r", "ReLU", "ip", "ip", "relu_param { negative_slope: 0.1 }"),
        PLAIN.format("prob", "Softmax", "ip", "prob", ""),
    ],
    "caffenet": [
        CONV.format("c1", "data", "num_output: 8 kernel_size: 5 stride: 2"),
        PLAIN.format("r1", "ReLU", "c1", "c1", ""),
        POOL.format("p1", "c1", "pool: MAX kernel_size: 3 stride: 2"),
        PLAIN.format("n1", "LRN", "p1", "n1", "lrn_param { local_size: 5 alpha: 0.01 beta: 0.75 }"),
        CONV.format("c2", "n1", "num_output: 8 kernel_size: 3 pad: 2 dilation: 2 group: 2"),
        PLAIN.format("pr", "PReLU", "c2", "c2", ""),
        PLAIN.format("d", "Dropout", "c2", "c2", ""),
        PLAIN.format("n2", "LRN", "c2", "n2", "lrn_param { local_size: 3 alpha: 0.01 norm_region: WITHIN_CHANNEL }"),
        PLAIN.format("e", "ELU", "n2", "e", "") + PLAIN.format("t", "TanH", "e", "t", ""),
        PLAIN.format("f", "Flatten", "t", "f", ""),
    ],
    "resnet": [
        CONV.format("c1", "data", "num_output: 8 kernel_size: 3 pad: 1 bias_term: false"),
        PLAIN.format("bn", "BatchNorm", "c1", "c1", ""),
        PLAIN.format(
            "s",
            "Scale",
            "c1",
            "c1",
            'scale_param { bias_term: true filler { type: "uniform" } bias_filler { type: "uniform" } }',
        ),
        PLAIN.format("r", "ReLU", "c1", "c1", ""),
        CONV.format("c2", "c1", "num_output: 8 kernel_size: 1"),
        'layer { name: "sum" type: "Eltwise" bottom: "c1" bottom: "c2" top: "sum" eltwise_param { coeff: 1 coeff: -0.5 } }',
        'layer { name: "max" type: "Eltwise" bottom: "sum" bottom: "c2" top: "max" eltwise_param { operation: MAX } }',
        POOL.format("g", "max", "pool: AVE global_pooling: true"),
        PLAIN.format("pow", "Power", "g", "pow", "power_param { power: 2 scale: 0.5 shift: 1 }"),
    ],
    "inception": [
        CONV.format("a", "data", "num_output: 4 kernel_size: 1")
        + CONV.format("b", "data", "num_output: 4 kernel_size: 3 pad: 1"),
        POOL.format("p", "data", "pool: MAX kernel_size: 3 stride: 1 pad: 1")
        + CONV.format("pp", "p", "num_output: 4 kernel_size: 1"),
        'layer { name: "cat" type: "Concat" bottom: "a" bottom: "b" bottom: "pp" top: "cat" }',
        'layer { name: "cut" type: "Slice" bottom: "cat" top: "s1" top: "s2" slice_param { slice_point: 5 } }',
        'layer { name: "up" type: "Deconvolution" bottom: "s2" top: "up" convolution_param { num_output: 3 kernel_size: 4 stride: 2 pad: 1 weight_filler { type: "gaussian" } } }',
        'layer { name: "crop" type: "Crop" bottom: "up" bottom: "s1" top: "crop" crop_param { offset: 2 } }',
        'layer { name: "sig" type: "Sigmoid" bottom: "crop" top: "sig" } layer { name: "quiet" type: "Silence" bottom: "s1" }',
    ],
}


@pytest.mark.parametrize("name", NETS)
def test_opencv_reads_the_same_from_our_files(name):
    text = 'layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 2 dim: 3 dim: 23 dim: 26 } } }'
    text += "\n".join(NETS[name])
    net = Net(parse_string(text, NetParameter), generator=torch.Generator().manual_seed(2))
    for layer in net.layers:
        if layer.kind == "BatchNorm":
            random = np.random.default_rng(1)
            net.load_blobs({layer.name: [random.normal(size=8), random.uniform(1, 3, 8), np.array([2.0])]}, "here")
    x = torch.rand(2, 3, 23, 26, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        ours = net(data=x)[net.outputs[-1]].numpy()
    reader = cv2.dnn.readNetFromCaffe(
        np.frombuffer(text.encode(), np.uint8), np.frombuffer(net.to_parameter().SerializeToString(), np.uint8)
    )
    reader.setInput(x.numpy())
    theirs = reader.forward(net.outputs[-1])
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())
