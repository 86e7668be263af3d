"""The models that are measured: the same bits in every process, and checkpointed as their users would."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from models import BUILDERS, GPT, SIZES, Bottleneck, Job, ResNet, build, checkpoint_blocks
from torch import Tensor

CPU = torch.device("cpu")
every_model = pytest.mark.parametrize("name", list(BUILDERS))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors gain nothing from more."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


def saved_by(job: Job) -> tuple[int, list[Tensor]]:
    """Bytes of what one forward saves, parameters included, and the loss with every gradient."""
    saved = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = job.loss()
    nbytes = sum(saved.values())
    loss.backward()
    return nbytes, [loss.detach(), *(parameter.grad for parameter in job.model.parameters())]


@every_model
def test_a_job_is_the_same_to_the_last_bit_whenever_it_is_built(name: str) -> None:
    torch.manual_seed(1)
    _, first = saved_by(build(name, "quick", CPU))
    torch.manual_seed(2)
    _, again = saved_by(build(name, "quick", CPU))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@every_model
def test_every_parameter_gets_a_gradient(name: str) -> None:
    job = build(name, "quick", CPU)
    job.loss().backward()
    for parameter_name, parameter in job.model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert bool(parameter.grad.isfinite().all()), parameter_name
        assert bool(parameter.grad.any()), parameter_name


@every_model
def test_checkpointing_saves_less_and_changes_no_bit(name: str) -> None:
    plain, expected = saved_by(build(name, "quick", CPU))
    job = build(name, "quick", CPU)
    checkpoint_blocks(job)
    less, found = saved_by(job)
    assert less < 0.7 * plain
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_an_unknown_model_is_an_error() -> None:
    with pytest.raises(KeyError, match="vgg"):
        build("vgg", "quick", CPU)


def test_every_size_can_split_its_width_among_its_heads() -> None:
    for size in SIZES.values():
        _, _, _, width, heads, _ = size.gpt
        assert width % heads == 0


@pytest.mark.parametrize(
    ("inputs", "stride", "shape", "plain"),
    [(16, 1, (2, 16, 8, 8), True), (8, 1, (2, 16, 8, 8), False), (16, 2, (2, 16, 4, 4), False)],
    ids=["same", "wider", "smaller"],
)
def test_a_bottleneck_has_a_plain_shortcut_where_the_shape_stays(
    inputs: int, stride: int, shape: tuple[int, ...], plain: bool
) -> None:
    block = Bottleneck(inputs, 4, stride)
    assert block(torch.randn(2, inputs, 8, 8)).shape == shape
    assert isinstance(block.shortcut, torch.nn.Identity) is plain


def test_each_stage_of_a_resnet_but_the_first_halves_the_image_and_doubles_the_channels() -> None:
    net = ResNet((2, 1, 1), 4, classes=7)
    image = net.stem(torch.randn(1, 3, 64, 64))
    shapes = []
    for block in net.stages:
        image = block(image)
        shapes.append(tuple(image.shape[1:]))
    assert shapes == [(16, 16, 16), (16, 16, 16), (32, 8, 8), (64, 4, 4)]
    assert net(torch.randn(2, 3, 64, 64)).shape == (2, 7)


def test_a_gpt_sees_no_later_token_and_every_earlier_one() -> None:
    torch.manual_seed(0)
    net = GPT(vocabulary=11, length=8, width=8, heads=2, depth=1)
    tokens = torch.randint(11, (1, 8))
    other = tokens.clone()
    other[0, 4] = (other[0, 4] + 1) % 11
    with torch.no_grad():
        before, after = net(tokens), net(other)
    assert before.shape == (1, 8, 11)
    differs = (before != after).any(2)[0].tolist()
    assert differs == [False] * 4 + [True] * 4


def test_a_gpts_embedding_is_its_heads_weight() -> None:
    net = GPT(vocabulary=11, length=8, width=8, heads=2, depth=1)
    assert net.head.weight is net.words.weight
