"""Loops of many kinds around a model: what happens between forward, backward and step changes no bit."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable
from copy import deepcopy
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

Step = Callable[[int], Iterable[Tensor]]
Build = Callable[[ModuleType], Step]


def build_accumulation(models: ModuleType) -> Step:
    model = models.mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(index: int) -> list[Tensor]:
        shown = []
        for _ in range(3):
            loss = model(torch.randn(16, 8)).square().mean() / 3
            loss.backward()
            shown.append(loss)
        shown += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        return shown

    return step


def build_gan(models: ModuleType) -> Step:
    """Two models and two optimizers; the discriminator's loss twice, the generator's through the discriminator."""
    maker, judge = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)), models.mlp()
    optimizers = [torch.optim.Adam(m.parameters(), 1e-2) for m in (maker, judge)]

    def step(index: int) -> list[Tensor]:
        fake = maker(torch.randn(16, 4))
        optimizers[1].zero_grad()
        real_loss = functional.softplus(-judge(torch.randn(16, 8))).mean()
        fake_loss = functional.softplus(judge(fake.detach())).mean()
        (real_loss + fake_loss).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss = functional.softplus(-judge(fake)).mean()
        loss.backward()
        optimizers[0].step()
        return [real_loss, fake_loss, loss, *maker.parameters(), *judge.parameters()]

    return step


def build_lbfgs(models: ModuleType) -> Step:
    model = models.mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def step(index: int) -> list[Tensor]:
        x = torch.randn(16, 8)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return [optimizer.step(closure), *model.parameters()]

    return step


def build_skipped_step(models: ModuleType) -> Step:
    """As a gradient scaler does it after an overflow: backward, and then no optimizer step."""
    model = models.mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(index: int) -> list[Tensor]:
        optimizer.zero_grad()
        loss = model(torch.randn(16, 8)).square().mean() * (float("inf") if index == 1 else 1.0)
        scaler.scale(loss).backward()
        grads = [p.grad.clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        return [loss, *grads, *model.parameters(), torch.tensor(scaler.get_scale())]

    return step


def build_optimizer_in_backward(models: ModuleType) -> Step:
    model = models.mlp()
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], 0.1)

        def hook(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(hook)

    def step(index: int) -> list[Tensor]:
        loss = model(torch.randn(16, 8)).square().mean()
        loss.backward()
        return [loss, *model.parameters()]

    return step


def build_two_backwards(models: ModuleType) -> Step:
    model = models.mlp()

    def step(index: int) -> list[Tensor]:
        model.zero_grad()
        out = model(torch.randn(16, 8))
        out.mean().backward(retain_graph=True)
        first = [p.grad.clone() for p in model.parameters()]
        out.square().mean().backward()
        return [out, *first, *(p.grad for p in model.parameters())]

    return step


def build_double_backward(models: ModuleType) -> Step:
    """A gradient penalty."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 1))

    def loss(_: int) -> Tensor:
        x = torch.randn(16, 8, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (grad.norm(dim=1) - 1).square().mean()

    return models.trained(model, loss)


def checkpointed_gpt(reentrant: bool) -> Build:
    def build(models: ModuleType) -> Step:
        model = models.GPT()
        model.checkpointed = reentrant
        return models.trained(model, lambda _: model.loss(torch.randint(32, (2, 17))))

    return build


def build_evaluation(models: ModuleType) -> Step:
    model = models.resnet()
    step = models.trained(model, lambda _: model(torch.randn(4, 3, 12, 12)).square().mean())

    def both(index: int) -> list[Tensor]:
        shown = list(step(index))
        model.eval()
        with torch.no_grad() if index % 2 else torch.inference_mode():
            shown.append(model(torch.randn(2, 3, 12, 12)).clone())
        model.train()
        return shown

    return both


def build_graph_dropped(models: ModuleType) -> Step:
    """Every second forward is never followed by a backward."""
    model = models.resnet()
    step = models.trained(model, lambda _: model(torch.randn(4, 3, 12, 12)).square().mean())

    def both(index: int) -> list[Tensor]:
        out = model(torch.randn(4, 3, 12, 12))
        dropped = out.detach().clone()
        del out
        return [dropped, *step(index)]

    return both


def build_forking_loader(models: ModuleType) -> Step:
    model = models.mlp()
    data = DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=8, num_workers=2, multiprocessing_context="fork")

    def step(index: int) -> list[Tensor]:
        shown = []
        for (x,) in data:
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            shown += [loss, *(p.grad.clone() for p in model.parameters())]
        return shown

    return step


def build_checkpoint(models: ModuleType) -> Step:
    """Model and optimizer are written while a graph is open, and read into others, which go on."""
    making = [models.mlp(), models.mlp()]
    optimizers = [torch.optim.Adam(model.parameters(), 1e-2) for model in making]

    def step(index: int) -> list[Tensor]:
        (model, other), (optimizer, next_one) = making, optimizers
        loss = model(torch.randn(16, 8)).square().mean()
        written = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, written)
        loss.backward()
        written.seek(0)
        read = torch.load(written)
        other.load_state_dict(read["model"])
        next_one.load_state_dict(read["optimizer"])
        again = deepcopy(other)(torch.randn(16, 8)).square().mean()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            theirs.grad = mine.grad
            mine.grad = None
        next_one.step()
        making.reverse()
        optimizers.reverse()
        return [loss, again, *other.parameters()]

    return step


KINDS: dict[str, Build] = {
    "gradient accumulation": build_accumulation,
    "two models and two optimizers": build_gan,
    "LBFGS and its closures": build_lbfgs,
    "a gradient scaler that skips a step": build_skipped_step,
    "the optimizer in the backward": build_optimizer_in_backward,
    "two backwards over one graph": build_two_backwards,
    "double backward": build_double_backward,
    "reentrant checkpoints": checkpointed_gpt(True),
    "checkpoints that are not reentrant": checkpointed_gpt(False),
    "evaluation between steps": build_evaluation,
    "graphs that are dropped": build_graph_dropped,
    "a loader with forking workers": build_forking_loader,
    "checkpoints that are written and read": build_checkpoint,
}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_plain_training(
    kind: str, models: ModuleType, same_as_plain: Callable[..., list]
) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # fork in a process with threads
        same_as_plain(lambda: KINDS[kind](models))
