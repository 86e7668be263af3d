"""Training under LMS is training: losses and gradients of many kinds of step, to the last bit."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lms.torch.session import Session

Step = Callable[[int], Iterable[Tensor]]
Build = Callable[[], Step]


def trained(
    model: nn.Module, loss_of: Callable[[int], Tensor], optimizer: torch.optim.Optimizer | None = None
) -> Callable[[int], list[Tensor]]:
    """A step that goes backward, shows loss and gradients, and moves the parameters."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-3)

    def step(index: int) -> list[Tensor]:
        optimizer.zero_grad()
        loss = loss_of(index)
        loss.backward()
        shown = [loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        return shown

    return step


def mlp(width: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 4),
    )


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.two = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.two(self.relu(self.norm1(self.one(x)))))
        out += x
        return self.relu(out)


def resnet(width: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        Residual(width),
        nn.MaxPool2d(2),
        Residual(width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 5),
    )


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int = 16, layers: int = 2, words: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(64, width) * 0.02)
        self.blocks = nn.ModuleList(Attention(width, 2) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.checkpointed: bool | None = None  # use_reentrant, or None for no checkpoints

    def forward(self, x: Tensor) -> Tensor:
        h = functional.dropout(self.words(x) + self.places[: x.shape[1]], 0.1)
        for block in self.blocks:
            h = block(h) if self.checkpointed is None else checkpoint(block, h, use_reentrant=self.checkpointed)
        return self.head(h)

    def loss(self, x: Tensor) -> Tensor:
        return functional.cross_entropy(self(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


class UNet(nn.Module):
    """Two levels in three dimensions, with a skip connection."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down = self.stage(1, width)
        self.deep = self.stage(width, 2 * width)
        self.up = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.last = self.stage(2 * width, width)
        self.head = nn.Conv3d(width, 3, 1)

    @staticmethod
    def stage(inner: int, outer: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv3d(inner, outer, 3, padding=1), nn.InstanceNorm3d(outer, affine=True), nn.ReLU(True)
        )

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        up = self.up(self.deep(functional.max_pool3d(skip, 2)))
        return self.head(self.last(torch.cat([skip, up], 1)))


def build_mlp() -> Step:
    model = mlp()
    return trained(model, lambda _: model(torch.randn(32, 8)).square().mean())


def build_resnet() -> Step:
    model = resnet()
    return trained(model, lambda _: functional.cross_entropy(model(torch.randn(4, 3, 12, 12)), torch.randint(5, (4,))))


def build_gpt() -> Step:
    model = GPT()
    return trained(model, lambda _: model.loss(torch.randint(32, (2, 17))))


def build_unet() -> Step:
    model = UNet()
    return trained(
        model, lambda _: functional.cross_entropy(model(torch.randn(1, 1, 8, 8, 8)), torch.randint(3, (1, 8, 8, 8)))
    )


def build_autocast() -> Step:
    model = GPT()

    def loss(_: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model.loss(torch.randint(32, (2, 17)))

    return trained(model, loss)


def build_accumulation() -> Step:
    model = mlp()
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


def build_gan() -> Step:
    """Two models and two optimizers; the discriminator's loss twice, the generator's through the discriminator."""
    maker, judge = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)), mlp()
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


def build_lbfgs() -> Step:
    model = mlp()
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


def build_skipped_step() -> Step:
    """As a gradient scaler does it after an overflow: backward, and then no optimizer step."""
    model = mlp()
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


def build_optimizer_in_backward() -> Step:
    model = mlp()
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


def build_two_backwards() -> Step:
    model = mlp()

    def step(index: int) -> list[Tensor]:
        model.zero_grad()
        out = model(torch.randn(16, 8))
        out.mean().backward(retain_graph=True)
        first = [p.grad.clone() for p in model.parameters()]
        out.square().mean().backward()
        return [out, *first, *(p.grad for p in model.parameters())]

    return step


def build_double_backward() -> Step:
    """A gradient penalty."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Softplus(), nn.Linear(16, 1))

    def loss(_: int) -> Tensor:
        x = torch.randn(16, 8, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (grad.norm(dim=1) - 1).square().mean()

    return trained(model, loss)


def checkpointed_gpt(reentrant: bool) -> Build:
    def build() -> Step:
        model = GPT()
        model.checkpointed = reentrant
        return trained(model, lambda _: model.loss(torch.randint(32, (2, 17))))

    return build


def build_evaluation() -> Step:
    model = resnet()
    step = trained(model, lambda _: model(torch.randn(4, 3, 12, 12)).square().mean())

    def both(index: int) -> list[Tensor]:
        shown = list(step(index))
        model.eval()
        with torch.no_grad() if index % 2 else torch.inference_mode():
            shown.append(model(torch.randn(2, 3, 12, 12)).clone())
        model.train()
        return shown

    return both


def build_views() -> Step:
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

    return trained(model, loss, torch.optim.SGD([weight], 1e-4))


def build_repeated_saves() -> Step:
    weight = nn.Parameter(torch.randn(8, 8))

    def loss(_: int) -> Tensor:
        x = torch.tanh(torch.randn(8, 8) @ weight)
        total = x.sum()
        for _ in range(12):
            total = total + (x * x).mean() + (x.view(-1) * x.t().reshape(-1)).sum()
        return total

    return trained(nn.ParameterList([weight]), loss, torch.optim.SGD([weight], 1e-4))


def build_complex() -> Step:
    weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))

    def loss(_: int) -> Tensor:
        x = torch.randn(8, 8, dtype=torch.complex64) @ weight
        y = x.conj() * x.exp() + x.mH @ weight.conj() + x.imag * x.real
        return (torch.fft.ifft(torch.fft.fft(y) * x)).abs().mean()

    return trained(nn.ParameterList([weight]), loss, torch.optim.SGD([weight], 1e-3))


def build_sparse() -> Step:
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


def build_integers() -> Step:
    """Operations that save indices and masks."""
    weight = nn.Parameter(torch.randn(10, 8))

    def loss(_: int) -> Tensor:
        x = weight * torch.randn(10, 8)
        best, where = x.max(1)
        y = x.gather(1, where[:, None].expand(10, 8)) + x.sort(1).values * x.masked_fill(x > 0, 0.5)
        y = y + x[torch.randint(10, (10,))] + torch.index_select(x, 0, torch.randperm(10)) + best[:, None]
        return (y * functional.max_pool1d(x[None], 2, stride=1, padding=1)[0, :, :8]).sum()

    return trained(nn.ParameterList([weight]), loss, torch.optim.SGD([weight], 1e-3))


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


def build_custom_function() -> Step:
    weight = nn.Parameter(torch.randn(8, 8))

    def loss(index: int) -> Tensor:
        x = torch.randn(8, 8) @ weight
        first, second = Several.apply(x, torch.sin(x))
        again, _ = Several.apply(first, second)
        return again.sum() if index % 2 else (again + second).sum()

    return trained(nn.ParameterList([weight]), loss, torch.optim.SGD([weight], 1e-3))


def build_graph_dropped() -> Step:
    """Every second forward is never followed by a backward."""
    model = resnet()
    step = trained(model, lambda _: model(torch.randn(4, 3, 12, 12)).square().mean())

    def both(index: int) -> list[Tensor]:
        out = model(torch.randn(4, 3, 12, 12))
        dropped = out.detach().clone()
        del out
        return [dropped, *step(index)]

    return both


def build_compiled() -> Step:
    """Block by block: the hooks are called between the blocks."""
    torch._dynamo.reset()
    block = torch.compile(Attention(16, 2), backend="aot_eager")
    block.eval()  # dropout's seeds differ between compiled and recompiled code
    model = nn.Sequential(nn.Linear(16, 16), block, nn.Tanh())
    return trained(model, lambda _: model(torch.randn(2, 8, 16)).square().mean())


def build_forking_loader() -> Step:
    model = mlp()
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


KINDS: dict[str, Build] = {
    "a multilayer perceptron": build_mlp,
    "a residual net with batch norm and in-place ReLU": build_resnet,
    "a GPT with dropout and tied weights": build_gpt,
    "a U-Net in three dimensions": build_unet,
    "bfloat16 under autocast": build_autocast,
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
    "views": build_views,
    "one tensor saved again and again": build_repeated_saves,
    "complex numbers": build_complex,
    "sparse tensors": build_sparse,
    "integers and masks": build_integers,
    "a function that saves several tensors": build_custom_function,
    "graphs that are dropped": build_graph_dropped,
    "blocks compiled one by one": build_compiled,
    "a loader with forking workers": build_forking_loader,
}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_plain_training(kind: str, same_as_plain: Callable[..., list]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # fork in a process with threads
        if KINDS[kind] is build_compiled:  # compiling takes its time
            same_as_plain(build_compiled, steps=3, shares=(1.0, 0.0))
        else:
            same_as_plain(KINDS[kind])


@pytest.mark.parametrize(
    "options", [{"verify": True}, {"prefetch": 0}, {"write_ahead": 0}, {"prefetch": 1, "write_ahead": 1}], ids=str
)
def test_no_option_changes_a_bit(options: dict[str, object], same_as_plain: Callable[..., list]) -> None:
    same_as_plain(build_resnet, **options)


def test_shapes_in_random_order_are_followed_by_a_plan_for_each(same_as_plain: Callable[..., list]) -> None:
    lengths = [5, 9, 13, 9, 5, 5, 13, 9, 13, 5]

    def build() -> Step:
        model = GPT()
        return trained(model, lambda index: model.loss(torch.randint(32, (2, lengths[index]))))

    outcomes = same_as_plain(build, steps=len(lengths))
    guides = outcomes[-1].session._planner.guides
    assert len({len(guide.keys) and guide.trace.saved for guide in guides}) == 3
    assert sum(guide.passes for guide in guides) >= len(lengths) - 5, "a shape seen before is led by its plan"


def test_shapes_that_never_repeat_never_raise(same_as_plain: Callable[..., list]) -> None:
    def build() -> Step:
        model = mlp()
        return trained(model, lambda index: model(torch.randn(2 + index, 8)).square().mean())

    same_as_plain(build, steps=66, shares=(1.0, 0.0))  # more than there are plans kept


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


def test_what_refuses_hooks_says_so_and_training_goes_on(same_as_plain: Callable[..., list]) -> None:
    """`torch.func.grad` refuses to run under any saved-tensor hooks; docs/lms.md says what to do."""

    def build() -> Step:
        model = mlp()
        step = trained(model, lambda _: model(torch.randn(16, 8)).square().mean())

        def both(index: int) -> list[Tensor]:
            with contextlib.suppress(RuntimeError):  # plain does not raise
                torch.func.grad(lambda x: model(x).sum())(torch.randn(4, 8))
            return list(step(index))

        return both

    same_as_plain(build)


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_compiled_blocks_are_compiled_once_more_at_most_when_the_recording_ends(lms: Callable[..., Session]) -> None:
    torch._dynamo.reset()
    compiled = 0

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., object]:
        nonlocal compiled
        compiled += 1
        return graph.forward

    block = torch.compile(mlp(), backend=backend)
    with lms():
        for _ in range(5):
            block(torch.randn(16, 8)).sum().backward()
    assert 1 <= compiled <= 2
