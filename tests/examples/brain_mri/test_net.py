from __future__ import annotations

import pytest
import torch
from net import UNet3D
from torch.nn import functional


@pytest.mark.parametrize(("width", "depth"), [(2, 1), (4, 2), (4, 3)])
def test_every_voxel_gets_a_logit_for_each_class(width: int, depth: int) -> None:
    net = UNet3D(4, width, depth)
    image = torch.randn(1, 1, 2 * net.multiple, 3 * net.multiple, 2 * net.multiple)
    assert net(image).shape == (1, 4, *image.shape[2:])


def test_the_default_net_has_the_parameters_that_its_layers_add_up_to() -> None:
    def convolution(inputs: int, outputs: int) -> int:
        return 27 * inputs * outputs + 2 * outputs  # the normalisation's scale and shift

    encoder = [(1, 8), (8, 16), (16, 16), (16, 32), (32, 32), (32, 64), (64, 64), (64, 128)]
    decoder = [(128, 64), (64, 64), (64, 32), (32, 32), (32, 16), (16, 16)]
    upwards = sum(8 * 2 * width * width + width for width in (64, 32, 16))
    expected = sum(convolution(*pair) for pair in encoder + decoder) + upwards + 16 * 4 + 4
    assert sum(parameter.numel() for parameter in UNet3D(4).parameters()) == expected


def test_every_parameter_gets_a_gradient() -> None:
    net = UNet3D(4, width=4, depth=2)
    net(torch.randn(1, 1, 8, 8, 8)).square().sum().backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_the_sum_of_two_convolutions_is_that_of_the_concatenation() -> None:
    decoder = UNet3D(4, width=4, depth=1).decoder[0]
    below, skip = torch.randn(1, 8, 4, 4, 4), torch.randn(1, 4, 8, 8, 8)
    whole = torch.cat((decoder.upwards(below), skip), dim=1)
    weights = torch.cat((decoder.of_below.weight, decoder.of_skip.weight), dim=1)
    expected = decoder.rest(functional.conv3d(whole, weights, padding=1))
    torch.testing.assert_close(decoder(below, skip), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("width", "depth", "named"), [(3, 2, "width=3"), (0, 2, "width=0"), (4, 0, "depth=0")])
def test_a_shape_that_cannot_be_built_is_refused_by_name(width: int, depth: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        UNet3D(4, width, depth)


def test_an_image_that_cannot_be_halved_is_refused() -> None:
    with pytest.raises(ValueError, match=r"image of \(8, 12, 8\) voxels: expected multiples of 8"):
        UNet3D(4, 2, 3)(torch.zeros(1, 1, 8, 12, 8))
