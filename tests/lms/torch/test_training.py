"""Training under LMS is training: losses and gradients of models of many kinds, to the last bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lms.torch.session
from lms.torch.cpu.engine import CpuEngine

Step = Callable[[int], Iterable[Tensor]]
Build = Callable[[ModuleType], Step]


def build_mlp(models: ModuleType) -> Step:
    model = models.mlp()
    return models.trained(model, lambda _: model(torch.randn(32, 8)).square().mean())


def build_resnet(models: ModuleType) -> Step:
    model = models.resnet()
    return models.trained(
        model, lambda _: functional.cross_entropy(model(torch.randn(4, 3, 12, 12)), torch.randint(5, (4,)))
    )


def build_gpt(models: ModuleType) -> Step:
    model = models.GPT()
    return models.trained(model, lambda _: model.loss(torch.randint(32, (2, 17))))


def build_unet(models: ModuleType) -> Step:
    model = models.UNet()
    return models.trained(
        model, lambda _: functional.cross_entropy(model(torch.randn(1, 1, 8, 8, 8)), torch.randint(3, (1, 8, 8, 8)))
    )


def build_autocast(models: ModuleType) -> Step:
    model = models.GPT()

    def loss(_: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model.loss(torch.randint(32, (2, 17)))

    return models.trained(model, loss)


def build_compiled(models: ModuleType) -> Step:
    """Block by block: the hooks are called between the blocks."""
    torch._dynamo.reset()
    block = torch.compile(models.Attention(16, 2), backend="aot_eager")
    block.eval()  # dropout's seeds differ between compiled and recompiled code
    model = nn.Sequential(nn.Linear(16, 16), block, nn.Tanh())
    return models.trained(model, lambda _: model(torch.randn(2, 8, 16)).square().mean())


def build_recurrent(models: ModuleType) -> Step:
    cells = nn.ModuleList([nn.GRU(16, 16), nn.LSTM(16, 16, proj_size=8), nn.LSTM(8, 16)])

    def loss(_: int) -> Tensor:
        x = torch.randn(5, 32, 16)
        for cell in cells:
            x = cell(x)[0]
        return x.square().mean()

    return models.trained(cells, loss)


KINDS: dict[str, Build] = {
    "a multilayer perceptron": build_mlp,
    "a residual net with batch norm and in-place ReLU": build_resnet,
    "a GPT with dropout and tied weights": build_gpt,
    "a U-Net in three dimensions": build_unet,
    "bfloat16 under autocast": build_autocast,
    "recurrent nets, whose gates are pieces of one storage": build_recurrent,
    "blocks compiled one by one": build_compiled,
}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_plain_training(
    kind: str, models: ModuleType, same_as_plain: Callable[..., list]
) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)  # a compiler's advice
        few = {"steps": 3, "shares": (1.0, 0.0)} if KINDS[kind] is build_compiled else {}  # compiling takes its time
        same_as_plain(lambda: KINDS[kind](models), **few)


@pytest.mark.parametrize(
    "options", [{"verify": True}, {"prefetch": 0}, {"write_ahead": 0}, {"prefetch": 1, "write_ahead": 1}], ids=str
)
def test_no_option_changes_a_bit(
    options: dict[str, object], same_as_plain: Callable[..., list], models: ModuleType
) -> None:
    same_as_plain(lambda: build_resnet(models), **options)


def test_a_device_that_is_out_of_memory_for_copies_back_changes_no_bit(
    same_as_plain: Callable[..., list], models: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    reload, refused = CpuEngine.reload, []

    def reload_if_nothing_is_held(self: CpuEngine, slot: object) -> object:
        if lms.torch.session._open._swapper.stepper.holdings.held:
            refused.append(slot)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return reload(self, slot)

    monkeypatch.setattr(CpuEngine, "reload", reload_if_nothing_is_held)
    same_as_plain(lambda: build_gpt(models), shares=(1.0, 0.5))
    assert refused


def test_shapes_in_random_order_are_followed_by_a_plan_for_each(
    same_as_plain: Callable[..., list], models: ModuleType
) -> None:
    lengths = [5, 9, 13, 9, 5, 5, 13, 9, 13, 5]

    def build() -> Step:
        model = models.GPT()
        return models.trained(model, lambda index: model.loss(torch.randint(32, (2, lengths[index]))))

    outcomes = same_as_plain(build, steps=len(lengths))
    guides = outcomes[-1].session._planner.guides
    assert len({len(guide.keys) and guide.trace.saved for guide in guides}) == 3
    assert sum(guide.passes for guide in guides) >= len(lengths) - 5, "a shape seen before is led by its plan"


def test_shapes_that_never_repeat_never_raise(same_as_plain: Callable[..., list], models: ModuleType) -> None:
    def build() -> Step:
        model = models.mlp()
        return models.trained(model, lambda index: model(torch.randn(2 + index, 8)).square().mean())

    same_as_plain(build, steps=66, shares=(1.0, 0.0))  # more than there are plans kept
