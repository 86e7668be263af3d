"""Random small autograd graphs: a seed decides what a program does, so that it can be run with LMS and without."""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

SIDE = 6  # tensors are SIDE x SIDE at first
TILES = 24  # in a row of a large tensor, which is one of the page pool's

Outcome = list[object]  # what a pass computed: bits of tensors, and names of errors


class Interrupt(KeyboardInterrupt):
    """Ctrl-C as the program itself raises it, and catches it. A real one ends the pass."""


ERRORS = (RuntimeError, ValueError, IndexError, Interrupt)


class Several(torch.autograd.Function):
    """Saves an input, its output, something in between and a view of the input."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor) -> Tensor:
        between = x * 0.5 + y
        out = torch.tanh(between) * y
        ctx.save_for_backward(x, between, out, x.t()[1:])
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, between, out, part = ctx.saved_tensors
        tail = part.t().sum() * 0.01
        return grad * between + out * tail, grad * x + tail


class Scaled(torch.autograd.Function):
    """Changes its input in place and says so."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.mul_(0.75)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 0.75 + 0 * x


class Rewriting(torch.autograd.Function):
    """Its backward writes into what it saved, so a second backward through it is an error."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x * 1.5)
        return x * 1.5

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (kept,) = ctx.saved_tensors
        result = grad * 1.5 + kept
        kept.mul_(2)
        return result


class Nested(torch.autograd.Function):
    """Its backward runs a forward and a backward of its own over what it saved."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sin(x) * x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            (inner,) = torch.autograd.grad(torch.sin(again) * again, again, grad)
        return inner


class Failing(torch.autograd.Function):
    """Its backward reads what it saved and raises."""

    @staticmethod
    def forward(ctx, x: Tensor, error: type[BaseException]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.error = error
        return x * 2

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        raise ctx.error(f"in the backward, {tuple(x.shape)}")


def block(x: Tensor) -> Tensor:
    """Something to checkpoint."""
    return functional.layer_norm(torch.sin(x) * x, x.shape[-1:]) + torch.sigmoid(x)


def tiled(x: Tensor) -> Tensor:
    """A larger tensor."""
    return x.repeat(TILES, TILES)


def square(x: Tensor) -> Tensor:
    """Any tensor as SIDE x SIDE, by a copy or by views alone, as it happens."""
    flat = x.reshape(-1)
    if flat.numel() < SIDE * SIDE:
        flat = flat.repeat(-(-SIDE * SIDE // flat.numel()))
    return flat[: SIDE * SIDE].view(SIDE, SIDE)


def large(a: Tensor, b: Tensor) -> Tensor:
    """Computes with large tensors."""
    out = torch.sin(tiled(a)) * tiled(b)
    return torch.tanh(out).view(TILES, SIDE, TILES, SIDE).mean((0, 2))


def hooked(x: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    """A copy of `x` with a hook on its gradient."""
    out = x * 1
    if out.requires_grad:
        out.register_hook(hook)
    return out


def under(hooks: AbstractContextManager[object], a: Tensor, b: Tensor) -> Tensor:
    """Computes under saved-tensor hooks of the script's own."""
    with hooks:
        return torch.sin(a) * b


def listed(a: Tensor, b: Tensor) -> Tensor:
    """Changes several tensors in place at once."""
    some = [a * 1, b * 2]
    torch._foreach_mul_(some, [b, a])
    torch._foreach_add_(some, 0.5)
    return some[0] * some[1]


def rewritten(program: Program, a: Tensor, b: Tensor) -> Tensor:
    """Changes in place what a graph saved that is kept, and never used: only what is saved of it afterwards counts."""
    x = a * 1
    program.aside += [torch.sin(x), torch.tanh(b) * b]
    x.mul_(0.5)
    return torch.sin(x)


def gates(a: Tensor, b: Tensor) -> Tensor:
    """Pieces of one storage, each with a version of its own, that change in place as in a recurrent cell."""
    one, other = (a * b).unsafe_chunk(2)
    return torch.exp(one.tanh_()) * other.sigmoid_()


def written(a: Tensor, b: Tensor) -> Tensor:
    """Writes into a tensor that is given."""
    with torch.no_grad():
        out = torch.empty(SIDE, SIDE)
        torch.mul(a, b, out=out)
    return a * out


Op = Callable[["Program", Tensor, Tensor], Tensor | None]
OUT_OF_PLACE: list[Op] = [
    lambda p, a, b: torch.exp(-a.abs()),
    lambda p, a, b: torch.sin(a),
    lambda p, a, b: torch.tanh(a),
    lambda p, a, b: functional.relu(a),
    lambda p, a, b: torch.sigmoid(a) * a,
    lambda p, a, b: a * b,
    lambda p, a, b: a + b,
    lambda p, a, b: a @ b,
    lambda p, a, b: a / (b * b + 2),
    lambda p, a, b: torch.where(a > b, a, b * 0.5),
    lambda p, a, b: torch.maximum(a, b),
    lambda p, a, b: gates(a, b),
    lambda p, a, b: torch.softmax(a, -1),
    lambda p, a, b: functional.layer_norm(a, a.shape[-1:], b[0]),
    lambda p, a, b: functional.dropout(a, 0.3),
    lambda p, a, b: torch.cat([a, b])[2 : 2 + SIDE],
    lambda p, a, b: torch.cat([a[:, :0] * b[:, :0], a * b], 1),
    lambda p, a, b: a.index_select(0, p.indices),
    lambda p, a, b: a.gather(1, p.indices[:, None].expand(SIDE, SIDE)),
    lambda p, a, b: a.cumsum(0) * 0.3,
    lambda p, a, b: functional.conv1d(a[None], b[:, :, None])[0],
    lambda p, a, b: functional.batch_norm(a, None, None, training=True),
    lambda p, a, b: (a.bfloat16() * b.bfloat16()).float(),
    lambda p, a, b: (a.double() * b.double()).float(),
    lambda p, a, b: torch.complex(a, b).mul(1j).abs(),
    lambda p, a, b: (torch.complex(a, b).conj() * torch.complex(b, a)).real * 0.5,
    lambda p, a, b: Several.apply(a, b),
    lambda p, a, b: Rewriting.apply(a),
    lambda p, a, b: Nested.apply(a),
    lambda p, a, b: large(a, b),
    lambda p, a, b: listed(a, b),
    lambda p, a, b: written(a, b),
    rewritten,
    lambda p, a, b: hooked(torch.sin(a), lambda grad: grad * 0.5 + b.detach()),
    lambda p, a, b: torch.linalg.solve(torch.eye(SIDE) * 3 + torch.tanh(a), b),
    lambda p, a, b: a.clone(),
]
WITH_CONTEXTS: list[Op] = [  # a real interrupt may leave PyTorch's own contexts open
    lambda p, a, b: checkpoint(block, a, use_reentrant=False),
    lambda p, a, b: checkpoint(block, a, use_reentrant=True),
    lambda p, a, b: checkpoint(large, a, b, use_reentrant=False),
    lambda p, a, b: checkpoint(lambda x: checkpoint(block, x, use_reentrant=False) * x, a, use_reentrant=False),
    lambda p, a, b: under(save_on_cpu(), a, b),
    lambda p, a, b: under(saved_tensors_hooks(lambda x: x * 1, lambda x: x), a, b),
]
VIEWS: list[Op] = [
    lambda p, a, b: a.t(),
    lambda p, a, b: a.flip(0),
    lambda p, a, b: a[1:4].reshape(-1)[:9],
    lambda p, a, b: a[:, 2],
    lambda p, a, b: a[::2],
    lambda p, a, b: a[0].expand(SIDE, SIDE),
    lambda p, a, b: a.as_strided((SIDE - 1, 3), (SIDE, 1), 1) if a.is_contiguous() else a.narrow(0, 1, 2),
    lambda p, a, b: a.unfold(0, 2, 2),
    lambda p, a, b: a.diagonal(),
    lambda p, a, b: a.chunk(2)[1],
    lambda p, a, b: a.unsqueeze(1).transpose(0, 2),
    lambda p, a, b: torch.view_as_complex(a.contiguous().view(SIDE, -1, 2)).imag,
    lambda p, a, b: a.detach(),
    lambda p, a, b: a.unbind(0)[3],
]
IN_PLACE: list[Op] = [
    lambda p, a, b: a.add_(0.25),
    lambda p, a, b: a.mul_(b),
    lambda p, a, b: a.relu_(),
    lambda p, a, b: a.tanh_(),
    lambda p, a, b: a[1].mul_(0.5).detach(),
    lambda p, a, b: a.detach().mul_(0.5),
    lambda p, a, b: a.t().add_(b),
    lambda p, a, b: a.copy_(b),
    lambda p, a, b: a[:2].zero_(),
    lambda p, a, b: a.masked_fill_(b > 0, 0.5),
    lambda p, a, b: functional.relu(a * 1, inplace=True),
    lambda p, a, b: Scaled.apply(a * 1),
    lambda p, a, b: Scaled.apply(a),
]
STEPS = {  # what a step may be, and how often it is
    "compute": 48, "view": 14, "in place": 10, "drop": 8, "no grad": 3, "collect": 2, "differentiate": 4,
    "differentiate twice": 4, "fail": 4, "look": 1, "old graph": 2, "aside": 3,
}  # fmt: skip


class Program:
    """A pass that a seed decides: the same seed does the same, whoever watches.

    After step `turn` the decisions are those of another seed: a pass that diverges from the one before. What a pass
    leaves open a later one may use. `around` makes a context for each step, in which nothing is computed by itself.
    """

    collects = True  # the collector runs now and then

    def __init__(
        self,
        seed: int,
        bits: Callable[[Tensor], object],
        *,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        contexts: bool = True,
    ) -> None:
        self.seed = seed
        self.bits = bits
        self.around = around
        self.contexts = contexts
        self.operations = [*OUT_OF_PLACE, *(WITH_CONTEXTS if contexts else ())]
        rng = random.Random(seed)
        self.steps = rng.randint(4, 16)
        generator = torch.Generator().manual_seed(seed)
        self.leaves = [torch.randn(SIDE, SIDE, generator=generator).requires_grad_() for _ in range(rng.randint(1, 3))]
        self.batch = torch.randn(SIDE, SIDE, generator=generator)  # the same storage in each pass
        self.indices = torch.randint(SIDE, (SIDE,), generator=generator)
        self.optimizer = torch.optim.Adam(self.leaves, 1e-2) if rng.random() < 0.4 else None
        self.open: list[Tensor] = []  # results whose graphs stay open when their pass is over

    def run(self, turn: int | None = None) -> Outcome:
        """One pass; what can be seen of it."""
        rng = random.Random(self.seed + 1)
        torch.default_generator.manual_seed(self.seed)  # without asking all other devices
        self.results: Outcome = []
        self.aside: list[Tensor] = []  # results of this pass that no backward goes through
        for leaf in self.leaves:
            leaf.grad = None
        pool = [leaf * 1.25 for leaf in self.leaves] + [self.batch, self.leaves[0]]
        for step in range(self.steps):
            if step == turn:
                rng = random.Random(self.seed + 2)
            with self.around():
                self._attempt(lambda rng=rng: self._step(rng, pool))
        total: list[Tensor] = []
        for x in pool:
            if x.requires_grad:
                self._attempt(lambda x=x: total.append(square(x.float()).mean()))
        x = None
        if total and rng.random() < 0.9:
            loss = torch.stack(total).sum()
            pool.clear() if rng.random() < 0.5 else None
            backwards = rng.choice((1, 1, 1, 2, 3))
            stays = rng.random() < 0.1
            for more in reversed(range(backwards)):
                with self.around():
                    self._attempt(lambda more=more: loss.backward(retain_graph=more > 0 or stays))
            if stays:
                self.open.append(loss)
        self.results += [self.bits(leaf.grad) for leaf in self.leaves if leaf.grad is not None]
        if self.optimizer is not None and rng.random() < 0.8:
            self._attempt(self.optimizer.step)
            self.results += [self.bits(leaf) for leaf in self.leaves]
        return self.results

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except ERRORS as error:
            self.results.append((type(error).__name__, str(error)[:95]))

    def _step(self, rng: random.Random, pool: list[Tensor]) -> None:
        a, b = rng.choice(pool), rng.choice(pool)
        (kind,) = rng.choices(list(STEPS), list(STEPS.values()))
        if kind == "compute":
            pool.append(rng.choice(self.operations)(self, square(a), square(b)))
        elif kind == "view":
            pool.append(rng.choice(VIEWS)(self, square(a), b))
        elif kind == "in place":
            result = rng.choice(IN_PLACE)(self, a if a.shape == (SIDE, SIDE) else square(a), square(b))
            if result is not None:
                pool.append(result)
        elif kind == "drop":
            if len(pool) > 2:
                pool.pop(rng.randrange(len(pool)))  # a branch that nobody needs
        elif kind == "no grad":
            with torch.no_grad():
                pool.append(torch.sin(square(a)) * square(b))
        elif kind == "collect":
            generation = rng.randint(0, 1)
            if self.collects:
                gc.collect(generation)
        elif kind == "differentiate":
            self._differentiate(a, retain=rng.random() < 0.7)
        elif kind == "differentiate twice":
            self._differentiate_twice(a)
        elif kind == "fail":
            pool.append(self._fail(rng, square(a), square(b)))
        elif kind == "aside":
            self.aside.append(rng.choice(self.operations)(self, square(a), square(b)))
        elif kind == "look":
            self._look(a)
        elif self.open:
            self.open.pop(rng.randrange(len(self.open))).backward(retain_graph=rng.random() < 0.3)

    def _differentiate(self, x: Tensor, *, retain: bool) -> None:
        grads = torch.autograd.grad(x.float().square().mean(), self.leaves, retain_graph=retain, allow_unused=True)
        self.results += [self.bits(grad) for grad in grads if grad is not None]

    def _differentiate_twice(self, x: Tensor) -> None:
        grads = torch.autograd.grad(x.float().sin().sum(), self.leaves, create_graph=True, allow_unused=True)
        size = sum(grad.square().sum() for grad in grads if grad is not None)
        size.backward()

    def _fail(self, rng: random.Random, a: Tensor, b: Tensor) -> Tensor:
        """Something that raises: now, in the forward, or when the backward comes to it."""
        error, where = rng.choice(ERRORS), rng.randrange(5 if self.contexts else 3)
        calls: list[None] = []

        def at_last(x: Tensor, *, call: int = 1) -> Tensor:
            out = torch.sin(x) * x
            calls.append(None)
            if len(calls) == call:
                raise error(f"at call {call}")
            return out

        if where == 0:
            return at_last(a * b)
        if where == 1:
            return Failing.apply(torch.sin(a) * b, error)
        if where == 2:
            return hooked(torch.sin(a) * b, at_last)
        if where == 3:
            return checkpoint(at_last, a * b, call=2, use_reentrant=False)
        return under(saved_tensors_hooks(at_last, lambda x: x), a, b)

    def _look(self, x: Tensor) -> None:
        """Read what was saved for the operation that made `x`, as tools that draw graphs do."""
        for name in dir(x.grad_fn):
            if name.startswith("_saved_") and isinstance(saved := getattr(x.grad_fn, name), Tensor):
                self.results.append(self.bits(saved))


def passes(program: Program, turn: int | None) -> list[Outcome]:
    """By rule, then by plan; now and then one that diverges on its way, and one by plan again."""
    results = [program.run() for _ in range(3)]
    if turn is not None:
        results += [program.run(turn), program.run()]
    return results


@contextmanager
def quietly() -> Iterator[None]:
    """Random programs do what scripts are warned of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deprecated")
        warnings.filterwarnings("ignore", message=".*None of the inputs have requires_grad")
        warnings.filterwarnings("ignore", message=".*Using backward.. with create_graph=True")
        warnings.filterwarnings("ignore", message=".*an optimizer steps again")
        warnings.filterwarnings("ignore", message=".*an earlier step's graph is still open")
        yield
