"""A net over LMS gives the same bits as without it."""

# ruff: noqa: E501 - a layer stands in a line

import torch

import lms

TEXT = """layer { name: "i" type: "Input" top: "x" top: "l" input_param { shape { dim: 4 dim: 3 dim: 12 dim: 12 } shape { dim: 4 } } }
layer { name: "c" type: "Convolution" bottom: "x" top: "c" convolution_param { num_output: 8 kernel_size: 3 pad: 1 } }
layer { name: "n" type: "BatchNorm" bottom: "c" top: "c" }
layer { name: "s" type: "Scale" bottom: "c" top: "c" scale_param { bias_term: true } }
layer { name: "r" type: "ReLU" bottom: "c" top: "c" }
layer { name: "m" type: "LRN" bottom: "c" top: "m" }
layer { name: "p" type: "Pooling" bottom: "m" top: "p" pooling_param { kernel_size: 3 stride: 2 } }
layer { name: "d" type: "Dropout" bottom: "p" top: "p" }
layer { name: "ip" type: "InnerProduct" bottom: "p" top: "ip" inner_product_param { num_output: 5 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "l" }
"""


def trained(build, swapped: bool) -> list[torch.Tensor]:
    net = build(TEXT, "TRAIN").float()
    learnt = [entry.parameter for entry in net.learnable if entry.lr_mult]
    optimizer = torch.optim.SGD(learnt, 0.1)
    generator = torch.Generator().manual_seed(4)
    torch.manual_seed(5)  # Dropout's

    def steps() -> None:
        for _ in range(4):
            net(x=torch.rand(4, 3, 12, 12, generator=generator), l=torch.tensor([0.0, 1, 2, 3]))
            net.loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    if swapped:
        with lms.LMS(net, optimizer, budget=0, min_size=0) as session:
            steps()
        assert session.stats()["swapped_out"] > 0
    else:
        steps()
    return [entry.parameter.detach().clone() for entry in net.learnable]


def test_lms_with_a_budget_of_nothing_gives_the_same_bits(build):
    for plain, swapped in zip(trained(build, False), trained(build, True), strict=True):
        assert torch.equal(plain, swapped)
