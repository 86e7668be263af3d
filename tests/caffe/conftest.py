"""One thread for small nets, and nets from text, in float64, for the tests of layers."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from bascule_caffe import Net, NetParameter
from bascule_caffe.messages import parse_string

Built = Callable[..., Net]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Nets this small wait for one another's threads on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def build() -> Built:
    """Builds a net from a text, in float64, with blobs from a seed."""

    def build(text: str, phase: str = "TEST", **options: object) -> Net:
        generator = torch.Generator().manual_seed(1)
        net = Net(parse_string(text, NetParameter, "net.prototxt"), phase, generator=generator, **options)
        for entry in net.learnable:
            if entry.parameter.requires_grad and not entry.parameter.any():
                entry.parameter.data.uniform_(-1, 1, generator=generator)
        return net.double()

    return build


@pytest.fixture
def one(build: Built) -> Callable[..., tuple[list[np.ndarray], Net]]:
    """Runs a layer alone over arrays: its tops, and the net. Options go to the Net."""

    def one(
        kind: str, fields: str, *bottoms: np.ndarray, tops: int = 1, phase: str = "TEST", shapes: Sequence[object] = ()
    ) -> tuple[list[np.ndarray], Net]:
        names = [f"b{index}" for index in range(len(bottoms))]
        made = [f"t{index}" for index in range(tops)]
        ends = " ".join([*(f'bottom: "{name}"' for name in names), *(f'top: "{name}"' for name in made)])
        inputs = " ".join(
            f'layer {{ name: "i{name}" type: "Input" top: "{name}" input_param {{ shape {{ {dims(array.shape)} }} }} }}'
            for name, array in zip(names, bottoms, strict=True)
        )
        net = build(f'{inputs}\nlayer {{ name: "one" type: "{kind}" {ends} {fields} }}', phase)
        outputs = net({name: torch.tensor(array) for name, array in zip(names, bottoms, strict=True)}, keep=made)
        return [outputs[name].detach().numpy() for name in made], net

    return one


def dims(shape: Sequence[int]) -> str:
    return " ".join(f"dim: {size}" for size in shape)


@pytest.fixture
def numbers() -> Callable[..., np.ndarray]:
    """Random numbers of a shape, from a seed."""
    generator = np.random.default_rng(7)
    return lambda *shape: generator.normal(size=shape)
