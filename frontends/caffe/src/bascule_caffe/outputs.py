"""A net's outputs as the log has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from bascule_caffe.net import Net


def numbers_of(net: Net, outputs: Mapping[str, Tensor]) -> Iterator[tuple[str, float]]:
    """Each number of each output, in the net's order, with the output's name."""
    for name in net.outputs:
        for value in outputs[name].flatten().tolist():
            yield name, value


def described(net: Net, name: str, value: float) -> str:
    """A number of an output, with its part of the loss."""
    weight = net.loss_weights.get(name, 0)
    loss = f" (* {weight:g} = {weight * value:g} loss)" if weight else ""
    return f"{name} = {value:g}{loss}"
