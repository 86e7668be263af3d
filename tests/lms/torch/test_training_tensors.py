"""Tensors of many kinds in one graph: views, masks, complex, sparse ones, and what is more than bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

Step = Callable[[int], Iterable[Tensor]]
Build = Callable[[ModuleType], Step]


def build_views(models: ModuleType) -> Step:
    """Views of every kind, saved again and again; one storage under several tensors."""
    weight = nn.Parameter(torch.randn(6, 6))
    model = nn.ParameterList([weight])

    def loss(_: int) -> Tensor:
        x = torch.randn(6, 6) @ weight
        strided = x.as_strided((4, 3), (6, 2), 1)
        y = x * x.t() + x[:, ::2].repeat(1, 2) * x[0].expand(6, 6)
        y = y * x.reshape(3, 12).view(6, 6) + x.unfold(0, 3, 1).sum() * strided.sum()
        first, second = x.chunk(2)
        y = y + torch.cat([first * second, second.exp()]) + x.diagonal() * x.diagonal()
        return (y * x.permute(1, 0)).sum() + (x.narrow(1, 2, 3) ** 3).sum()

    return models.trained(model, loss, torch.optim.SGD([weight], 1e-4))


def build_repeated_saves(models: ModuleType) -> Step:
    weight = nn.Parameter(torch.randn(8, 8))

    def loss(_: int) -> Tensor:
        x = torch.tanh(torch.randn(8, 8) @ weight)
        total = x.sum()
        for _ in range(12):
            total = total + (x * x).mean() + (x.view(-1) * x.t().reshape(-1)).sum()
        return total

    return models.trained(nn.ParameterList([weight]), loss, torch.optim.SGD([weight], 1e-4))


def build_complex(models: ModuleType) -> Step:
    weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def loss(_: int) -> Tensor:
        x = torch.randn(8, 8, dtype=torch.complex64) @ weight
        y = x.conj() * x.exp() + x.mH @ weight.conj() + x.imag * x.real
        return (torch.fft.ifft(torch.fft.fft(y) * x)).abs().mean()

    return models.trained(nn.ParameterList([weight]), loss, torch.optim.SGD([weight], 1e-3))


def build_sparse(models: ModuleType) -> Step:
    embedding = nn.Embedding(20, 8, sparse=True)
    mix = nn.Parameter(torch.randn(8, 8))
    graph = torch.eye(12).to_sparse()

    def step(index: int) -> list[Tensor]:
        embedding.zero_grad()
        mix.grad = None
        x = embedding(torch.randint(20, (12,)))
        loss = torch.tanh(torch.sparse.mm(graph, x @ mix)).square().sum()
        loss.backward()
        return [loss, embedding.weight.grad.coalesce(), mix.grad]

    return step


def build_integers(models: ModuleType) -> Step:
    """Operations that save indices and masks."""
    weight = nn.Parameter(torch.randn(10, 8))

    def loss(_: int) -> Tensor:
        x = weight * torch.randn(10, 8)
        best, where = x.max(1)
        y = x.gather(1, where[:, None].expand(10, 8)) + x.sort(1).values * x.masked_fill(x > 0, 0.5)
        y = y + x[torch.randint(10, (10,))] + torch.index_select(x, 0, torch.randperm(10)) + best[:, None]
        return (y * functional.max_pool1d(x[None], 2, stride=1, padding=1)[0, :, :8]).sum()

    return models.trained(nn.ParameterList([weight]), loss, torch.optim.SGD([weight], 1e-3))


class Several(torch.autograd.Function):
    """Saves inputs, an output and something in between."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        between = torch.exp(x * 0.1)
        out, other = between * y, x + y
        ctx.save_for_backward(x, y, between, out)
        ctx.set_materialize_grads(False)
        return out, other

    @staticmethod
    def backward(ctx, grad: Tensor | None, other: Tensor | None) -> tuple[Tensor, Tensor]:
        x, y, between, out = ctx.saved_tensors
        grad = torch.zeros_like(out) if grad is None else grad
        rest = 0 if other is None else other
        return grad * out * 0.1 + rest + 0 * x, grad * between + rest + 0 * y


def build_custom_function(models: ModuleType) -> Step:
    weight = nn.Parameter(torch.randn(8, 8))

    def loss(index: int) -> Tensor:
        x = torch.randn(8, 8) @ weight
        first, second = Several.apply(x, torch.sin(x))
        again, _ = Several.apply(first, second)
        return again.sum() if index % 2 else (again + second).sum()

    return models.trained(nn.ParameterList([weight]), loss, torch.optim.SGD([weight], 1e-3))


KINDS: dict[str, Build] = {
    "views": build_views,
    "one tensor saved again and again": build_repeated_saves,
    "complex numbers": build_complex,
    "sparse tensors": build_sparse,
    "integers and masks": build_integers,
    "a function that saves several tensors": build_custom_function,
}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_plain_training(
    kind: str, models: ModuleType, same_as_plain: Callable[..., list]
) -> None:
    same_as_plain(lambda: KINDS[kind](models))


def test_subclasses_and_functorch_pass_through(same_as_plain: Callable[..., list]) -> None:
    class Named(Tensor):
        pass

    def build() -> Step:
        weight = nn.Parameter(torch.randn(8, 8))

        def step(index: int) -> list[Tensor]:
            weight.grad = None
            named = torch.randn(8, 8).as_subclass(Named)
            mapped = torch.vmap(lambda row: torch.sin(row) * row.exp())(torch.randn(8, 8) @ weight)
            loss = (named * mapped).as_subclass(Tensor).square().sum() + torch.tanh(weight @ weight).sum()
            loss.backward()
            return [loss, weight.grad]

        return step

    same_as_plain(build)
