"""Random small autograd graphs under random budgets: values, gradients and errors are those of plain autograd.

LMS_FUZZ_SEED repeats one graph: `LMS_FUZZ_SEED=17 pytest tests/lms/torch/test_fuzz.py -s`. LMS_FUZZ_GRAPHS runs more.
"""

from __future__ import annotations

import copy
import gc
import os
import random
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lms.core.plan import Plan
from lms.runtime import planner
from lms.runtime.progress import Progress
from lms.runtime.recorder import Finished
from lms.torch import native_hooks
from lms.torch.passes import Pass
from lms.torch.session import Session
from lms.trace import Trace

GRAPHS = int(os.environ.get("LMS_FUZZ_GRAPHS", "500"))
BATCH = 50  # graphs a test
FAST = 150  # graphs that `make test` has
SIDE = 6  # tensors are SIDE x SIDE at first

Outcome = list[object]  # what a pass computed: bits of tensors, and names of errors


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


def block(x: Tensor) -> Tensor:
    """Something to checkpoint."""
    return functional.layer_norm(torch.sin(x) * x, x.shape[-1:]) + torch.sigmoid(x)


def square(x: Tensor) -> Tensor:
    """Any tensor as SIDE x SIDE, by a copy or by views alone, as it happens."""
    flat = x.reshape(-1)
    if flat.numel() < SIDE * SIDE:
        flat = flat.repeat(-(-SIDE * SIDE // flat.numel()))
    return flat[: SIDE * SIDE].view(SIDE, SIDE)


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
    lambda p, a, b: torch.softmax(a, -1),
    lambda p, a, b: functional.layer_norm(a, a.shape[-1:], b[0]),
    lambda p, a, b: functional.dropout(a, 0.3),
    lambda p, a, b: torch.cat([a, b])[2 : 2 + SIDE],
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
    lambda p, a, b: checkpoint(block, a, use_reentrant=False),
    lambda p, a, b: checkpoint(block, a, use_reentrant=True),
    lambda p, a, b: torch.linalg.solve(torch.eye(SIDE) * 3 + torch.tanh(a), b),
    lambda p, a, b: a.clone(),
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
    lambda p, a, b: a.t().add_(b),
    lambda p, a, b: a.copy_(b),
    lambda p, a, b: a[:2].zero_(),
    lambda p, a, b: a.masked_fill_(b > 0, 0.5),
    lambda p, a, b: functional.relu(a * 1, inplace=True),
    lambda p, a, b: Scaled.apply(a * 1),
    lambda p, a, b: Scaled.apply(a),
]


class Program:
    """A pass that a seed decides: the same seed does the same, whoever watches.

    After step `turn` the decisions are those of another seed: a pass that diverges from the one before.
    """

    collects = True  # the collector runs now and then

    def __init__(self, seed: int, bits: Callable[[Tensor], object]) -> None:
        self.seed = seed
        self.bits = bits
        rng = random.Random(seed)
        self.steps = rng.randint(4, 16)
        generator = torch.Generator().manual_seed(seed)
        self.leaves = [torch.randn(SIDE, SIDE, generator=generator).requires_grad_() for _ in range(rng.randint(1, 3))]
        self.batch = torch.randn(SIDE, SIDE, generator=generator)  # the same storage in each pass
        self.indices = torch.randint(SIDE, (SIDE,), generator=generator)

    def run(self, turn: int | None = None) -> Outcome:
        """One pass; what can be seen of it."""
        rng = random.Random(self.seed + 1)
        torch.default_generator.manual_seed(self.seed)  # without asking all other devices
        self.results: Outcome = []
        for leaf in self.leaves:
            leaf.grad = None
        pool = [leaf * 1.25 for leaf in self.leaves] + [self.batch, self.leaves[0]]
        for step in range(self.steps):
            if step == turn:
                rng = random.Random(self.seed + 2)
            self._attempt(lambda rng=rng: self._step(rng, pool))
        retain = rng.random() < 0.3
        total: list[Tensor] = []
        for x in pool:
            if x.requires_grad:
                self._attempt(lambda x=x: total.append(square(x.float()).mean()))
        x = None
        if total and rng.random() < 0.9:
            loss = torch.stack(total).sum()
            pool.clear() if rng.random() < 0.5 else None
            self._attempt(lambda: loss.backward(retain_graph=retain))
            if retain:
                self._attempt(lambda: loss.backward())
        self.results += [self.bits(leaf.grad) for leaf in self.leaves if leaf.grad is not None]
        return self.results

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except (RuntimeError, ValueError, IndexError) as error:
            self.results.append((type(error).__name__, str(error)[:95]))

    def _step(self, rng: random.Random, pool: list[Tensor]) -> None:
        a, b = rng.choice(pool), rng.choice(pool)
        roll = rng.random()
        if roll < 0.52:
            pool.append(rng.choice(OUT_OF_PLACE)(self, square(a), square(b)))
        elif roll < 0.68:
            pool.append(rng.choice(VIEWS)(self, square(a), b))
        elif roll < 0.78:
            result = rng.choice(IN_PLACE)(self, a if a.shape == (SIDE, SIDE) else square(a), square(b))
            if result is not None:
                pool.append(result)
        elif roll < 0.86:
            if len(pool) > 2:
                pool.pop(rng.randrange(len(pool)))  # a branch that nobody needs
        elif roll < 0.89:
            with torch.no_grad():
                pool.append(torch.sin(square(a)) * square(b))
        elif roll < 0.91:
            generation = rng.randint(0, 1)
            if self.collects:
                gc.collect(generation)
        elif roll < 0.95:
            self._differentiate(a, retain=rng.random() < 0.7)
        else:
            self._differentiate_twice(a)

    def _differentiate(self, x: Tensor, *, retain: bool) -> None:
        grads = torch.autograd.grad(x.float().square().mean(), self.leaves, retain_graph=retain, allow_unused=True)
        self.results += [self.bits(grad) for grad in grads if grad is not None]

    def _differentiate_twice(self, x: Tensor) -> None:
        grads = torch.autograd.grad(x.float().sin().sum(), self.leaves, create_graph=True, allow_unused=True)
        size = sum(grad.square().sum() for grad in grads if grad is not None)
        size.backward()


def passes(program: Program, turn: int | None) -> list[Outcome]:
    """By rule, then by plan; now and then one that diverges on its way, and one by plan again."""
    results = [program.run() for _ in range(3)]
    if turn is not None:
        results += [program.run(turn), program.run()]
    return results


class Saved:
    """What identity hooks keep: its end can be seen."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


def leaks_by_itself(seed: int, turn: int | None, bits: Callable[[Tensor], object]) -> bool:
    """Whether PyTorch never frees some of the graph, whoever holds what is saved: some errors and cycles do that."""
    alive: weakref.WeakSet[Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Saved:
        alive.add(saved := Saved(tensor))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        passes(Program(seed, bits), turn)
    gc.collect()
    return len(alive) > 0


def check(seed: int, bits: Callable[[Tensor], object]) -> None:
    """Compare one graph with plain. The seed decides everything."""
    rng = random.Random(-1 - seed)
    options: dict[str, object] = {
        "budget": rng.choice((0, 0, rng.randrange(1, 400), rng.randrange(400, 4000), 10**6)),
        "min_size": rng.choice((0, 1, 100, SIDE * SIDE * 4)),
        "prefetch": rng.choice((None, None, None, 0, 2)),
        "write_ahead": rng.choice((None, None, None, 0, 1)),
        "verify": rng.random() < 0.3,
    }
    turn = rng.randrange(12) if rng.random() < 0.4 else None
    plain = passes(Program(seed, bits), turn)
    with Session(**options) as session:  # type: ignore[arg-type]
        foretold, plan = [0], session._planner._plan

        def told_of(trace: Trace) -> Plan:
            foretold.append((made := plan(trace)).forecast.held_peak)
            return made

        session._planner._plan = told_of  # type: ignore[method-assign]
        mine = passes(Program(seed, bits), turn)
    told = f"LMS_FUZZ_SEED={seed}: {options}"
    for number, (ours, theirs) in enumerate(zip(mine, plain, strict=True)):
        for place, (our, their) in enumerate(zip(ours, theirs, strict=False)):
            assert our == their, f"{told}: pass {number}, result {place}"
        assert len(ours) == len(theirs), f"{told}: pass {number}"
    gc.collect()
    if session._swapper.live and leaks_by_itself(seed, turn, bits):
        return
    assert session._swapper.live == 0, told
    assert session.engine.usage()["file"] == 0, told
    # An operation may use several records at once, and save one meanwhile; the plans' forecasts know of it.
    peak, largest = session.stats()["held_peak"], session._planner.client.needed
    bound = max(options["budget"] + 4 * largest, *foretold)
    assert peak <= bound, f"{told}: {peak} held, more than {bound}; the largest record has {largest}"


@pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=[] if first < FAST else pytest.mark.slow) for first in range(0, GRAPHS, BATCH)],
)
def test_random_graphs_compute_and_fail_as_they_do_without_lms(first: int, bits: Callable[[Tensor], object]) -> None:
    chosen = os.environ.get("LMS_FUZZ_SEED")
    seeds = [int(chosen)] if chosen else range(first, min(first + BATCH, GRAPHS))
    gc.collect()
    gc.freeze()  # what was imported by now is no garbage, and is not to be looked at for each graph
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deprecated")
        warnings.filterwarnings("ignore", message=".*None of the inputs have requires_grad")
        warnings.filterwarnings("ignore", message=".*Using backward.. with create_graph=True")
        for seed in seeds:
            check(seed, bits)


def watched(seed: int, bits: Callable[[Tensor], object]) -> tuple[object, ...]:
    """All that a session with room for everything does and finds out about one graph."""
    rng = random.Random(-1 - seed)
    turn = rng.randrange(12) if rng.random() < 0.5 else None
    recorded: list[object] = []
    with Session(budget=10**6, min_size=rng.choice((0, 1, 100, SIDE * SIDE * 4))) as session:
        note = session._planner.note

        def noted(finished: Finished) -> None:
            recorder = finished.recorder
            facts = recorder.nbytes, recorder.freed, recorder.pinned, recorder.foreseen, recorder.let_go
            moments = len(recorder.marks), recorder.held, finished.held_peak, finished.guide is not None
            recorded.append(copy.deepcopy((recorder.kinds, recorder.order, recorder.labels, facts, moments)))
            note(finished)

        session._planner.note = noted  # type: ignore[method-assign]
        results = passes(Program(seed, bits), turn)
        stats = session.stats()
    guides = [(guide.keys, guide.pinned, guide.passes, guide.plan.cap) for guide in session._planner.guides]
    figures = {name: value for name, value in stats.items() if not isinstance(value, float) and name not in OF_PROCESS}
    return results, recorded, figures, guides, session._swapper.live


OF_PROCESS = ("peak", "floor", "predicted_peak")  # figures of the whole process


def test_the_hooks_in_cpp_record_random_graphs_as_those_in_python_do(
    bits: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    if native_hooks.find() is None:
        pytest.skip("the hooks are not compiled: `python -m lms.build torch` says what is missing")
    monkeypatch.setattr(Program, "collects", False)  # when it finds what is up to the collector
    monkeypatch.setattr(planner, "REFINED_AFTER", (-1,))  # a plan is final at once, so that C++ leads the next pass
    monkeypatch.setattr(Progress, "early", property(lambda _: False))
    led: list[bool] = []
    take_over = Pass.take_over

    def noting(run: Pass, facts: native_hooks.Led) -> object:
        records = take_over(run, facts)
        led.append(bool(records))
        return records

    monkeypatch.setattr(Pass, "take_over", noting)
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for seed in range(10_000, 10_000 + GRAPHS // 5):
                ours = watched(seed, bits)
                with monkeypatch.context() as without:
                    without.setattr(native_hooks, "find", lambda: None)
                    theirs = watched(seed, bits)
                for our, their in zip(ours, theirs, strict=True):
                    assert our == their, f"seed {seed}"
    finally:
        gc.enable()
    assert led.count(False) > GRAPHS // 10, "C++ led few passes"
    assert led.count(True) > GRAPHS // 50, "Python took few passes over"
