"""Modules that run again in the backward: training keeps its bits, and no module runs again that would notice."""

from __future__ import annotations

import copy
import inspect
import io
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from lms.core.link import Link
from lms.core.recompute import Candidate, choose, recompute
from lms.errors import LMSError
from lms.runtime.plan_maker import PlanMaker
from lms.runtime.planner import PassPlanner
from lms.torch.recompute.forward import Forward
from lms.torch.recompute.surroundings import Surroundings
from lms.torch.session import Session
from lms.trace import Trace

Loss = Callable[[nn.Module], Tensor]
STEPS = 20
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are foreseen to take so long that the planner recomputes whatever it can."""
    monkeypatch.setattr(PlanMaker, "link", lambda _: Link("slow", 1e3, 1e3))


def bits(tensor: Tensor) -> tuple[object, ...]:
    """What makes two tensors identical."""
    tensor = tensor.detach().contiguous()
    return tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def standing_in(model: nn.Module) -> set[str]:
    """Names of the modules that have another forward than their class's."""
    return {
        name or type(model).__name__
        for name, module in model.named_modules()
        if isinstance(vars(module).get("forward"), Forward)
    }


def train(model: nn.Module, loss: Loss, steps: int = STEPS, session: Session | None = None) -> Iterable[list[Tensor]]:
    """Each step's loss and gradients, and the parameters and buffers after it."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if session is not None:
        session.open()
    for index in range(steps):
        torch.manual_seed(100 + index)
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        yield [value, *gradients, *model.parameters(), *model.buffers()]
    if session is not None:
        session.close()


@pytest.fixture
def recomputed() -> Callable[..., tuple[set[str], Session]]:
    """Train plain and with recomputation, compare all of each step, and return what was recomputed."""

    def compare(
        build: Callable[[], nn.Module], loss: Loss, steps: int = STEPS, **options: Any
    ) -> tuple[set[str], Session]:
        torch.manual_seed(7)
        plain = [[bits(tensor) for tensor in step] for step in train(build(), loss, steps)]
        torch.manual_seed(7)
        model = build()
        names = list(model.state_dict())
        session = Session(model, recompute=True, **({"min_size": 0, "budget": 24_000} | options))
        chosen: set[str] = set()
        for index, step in enumerate(train(model, loss, steps, session)):
            assert [bits(tensor) for tensor in step] == plain[index], f"step {index} differs"
            assert list(model.state_dict()) == names
            if session._planner.choice is not None:
                chosen = standing_in(model)
                assert chosen == set(session._planner.choice.modules)
        assert session._planner.choice is not None, "nothing was chosen: the test tests nothing"
        assert not standing_in(model)
        return chosen, session

    return compare


def batch(*shape: int) -> Loss:
    return lambda model: model(torch.randn(*shape)).square().mean()


class Twice(nn.Module):
    """One block for two calls, the second of them with a keyword; two inputs, and a tuple and a dict of results."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x: Tensor, *, by: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
            wide = torch.sigmoid(self.one(x))
            return self.two(wide * by if by is not None else wide), {"wide": wide.mean()}

    def __init__(self) -> None:
        super().__init__()
        self.block = self.Block()

    def forward(self, x: Tensor) -> Tensor:
        first, more = self.block(x)
        second, _ = self.block(first.tanh(), by=torch.rand(32, 64))
        return second + more["wide"]


def test_a_gpt_with_dropout_and_tied_weights_is_trained_to_the_last_bit(
    models: ModuleType, recomputed: Callable[..., Any]
) -> None:
    chosen, session = recomputed(models.GPT, lambda model: model.loss(torch.randint(32, (2, 17))))
    assert {name.removesuffix(".mlp") for name in chosen} == {"blocks.0", "blocks.1"}
    plan = session.plan
    assert plan is not None
    assert plan.choice is not None
    assert set(plan.choice.modules) == chosen
    assert all(reason.startswith("running it again takes") for reason in plan.choice.modules.values())


def test_a_unet_whose_stages_work_in_place_is(models: ModuleType, recomputed: Callable[..., Any]) -> None:
    def loss(model: nn.Module) -> Tensor:
        return functional.cross_entropy(model(torch.randn(1, 1, 8, 8, 8)), torch.randint(3, (1, 8, 8, 8)))

    chosen, _ = recomputed(models.UNet, loss)
    assert chosen
    assert not any(name.endswith(".2") for name in chosen), "nn.ReLU(inplace=True) writes to its input"


class Counts(nn.Module):
    """Writes to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x.sigmoid()


def test_a_module_that_writes_to_its_buffers_is_not_recomputed(recomputed: Callable[..., Any]) -> None:
    def build() -> nn.Module:
        blocks = (nn.Sequential(nn.Linear(16, 64), part, nn.Linear(64, 16)) for part in (Counts(), nn.Sigmoid()))
        return nn.Sequential(nn.Linear(16, 16), *blocks, nn.Tanh())

    assert recomputed(build, batch(32, 16), 8, budget=14_000)[0] == {"2"}


@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}])
def test_the_running_statistics_of_batch_norm_move_once(
    options: dict[str, Any], recomputed: Callable[..., Any]
) -> None:
    def build() -> nn.Module:
        norms = (nn.BatchNorm1d(64, **options) for _ in range(3))
        blocks = (nn.Sequential(nn.Linear(16, 64), norm, nn.Sigmoid(), nn.Linear(64, 16)) for norm in norms)
        return nn.Sequential(nn.Linear(16, 16), *blocks, nn.Tanh())

    chosen, _ = recomputed(build, batch(32, 16), 6)
    assert chosen & {"1", "2", "3"}


class ScaledBy(torch.autograd.Function):
    """Gradients are multiplied by a number that the forward saves, and the result is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


class ReadsStatistics(nn.Module):
    """Uses its norm's running statistics, as modules that fold norms into weights do."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.norm.running_var.sqrt()
        x = self.norm(self.one(x) / scale) * scale
        return self.two(ScaledBy.apply(x, self.norm.running_mean.abs().mean() + 1).sigmoid())


class OwnNorm(nn.Module):
    """A norm that counts nothing: its statistics are written to without a new version."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("variance", torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(x, self.mean, self.variance, training=True)


@pytest.mark.parametrize("kind", [ReadsStatistics, OwnNorm])
def test_statistics_that_are_used_or_written_otherwise_are_those_of_plain_training(
    kind: type[nn.Module], recomputed: Callable[..., Any]
) -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), kind(), nn.Sigmoid(), nn.Linear(64, 16)) if kind is OwnNorm else kind()

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), *(block() for _ in range(3)), nn.Tanh())

    chosen, _ = recomputed(build, batch(32, 16), 8, budget=14_000)
    assert bool(chosen & {"1", "2", "3"}) == (kind is ReadsStatistics)


def test_watching_does_not_count_as_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    choose, init = PassPlanner.choose_modules, Surroundings.__init__

    def chosen(self: PassPlanner, candidates: Any) -> Any:
        seen.extend([self.trace.seconds, *(call.seconds for one in candidates for call in one.calls)])
        return choose(self, candidates)

    def slow(self: Any, *args: Any, **options: Any) -> None:
        time.sleep(0.1)
        init(self, *args, **options)

    monkeypatch.setattr(PassPlanner, "choose_modules", chosen)
    monkeypatch.setattr(Surroundings, "__init__", slow)
    blocks = lambda: nn.Sequential(nn.Linear(16, 64), nn.Sigmoid(), nn.Linear(64, 16))  # noqa: E731
    model = nn.Sequential(blocks(), blocks())
    session = Session(model, recompute=True, min_size=0, budget=14_000)
    assert len(list(train(model, batch(32, 16), 6, session))) == 6
    assert seen
    assert max(seen) < 0.5, "nine modules with two delays each"


def test_modules_are_chosen_though_each_step_has_another_length(recomputed: Callable[..., Any]) -> None:
    blocks = lambda: nn.Sequential(nn.Linear(16, 64), nn.Sigmoid(), nn.Linear(64, 16))  # noqa: E731

    def loss(model: nn.Module) -> Tensor:
        length = int(torch.randint(40, 240, ()))
        return model(torch.randn(length, 16)).square().mean()

    assert recomputed(lambda: nn.Sequential(*(blocks() for _ in range(4))), loss, 40)[0]


def test_one_module_for_two_calls_with_keywords_and_several_results_is(recomputed: Callable[..., Any]) -> None:
    assert recomputed(Twice, batch(32, 16), budget=20_000)[0] == {"block"}


class Alike(nn.Module):
    """Works as attention does, which takes another path if query and key are one object."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        wide = torch.tanh(self.layer(x))
        return wide * 2 if x is y else wide + torch.tanh(self.layer(y)).exp()


def test_an_argument_that_is_given_twice_is_one_object_in_the_second_run_too(recomputed: Callable[..., Any]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Alike() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, x)
            return x

    chosen, _ = recomputed(Net, batch(32, 64))
    assert "blocks.1" in chosen


def test_nested_modules_are_chosen_only_once(recomputed: Callable[..., Any]) -> None:
    def build() -> nn.Module:
        inner = lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.5), nn.Sigmoid())  # noqa: E731
        return nn.Sequential(*(nn.Sequential(inner(), inner()) for _ in range(3)))

    chosen, _ = recomputed(build, batch(32, 16), budget=16_384)
    assert chosen
    assert not any(inner != outer and inner.startswith(f"{outer}.") for inner in chosen for outer in chosen)


def test_under_autocast_it_runs_again_under_autocast(models: ModuleType, recomputed: Callable[..., Any]) -> None:
    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model.loss(torch.randint(32, (2, 17)))

    assert recomputed(models.GPT, loss, 12)[0]


# What would notice

GENERATOR = torch.Generator()
GENERATORS: dict[str, Callable[[], object]] = {
    "generator": lambda: GENERATOR,
    "numpy": lambda: np.random.default_rng(1),
    "python": lambda: random.Random(1),
}


class Part(nn.Module):
    """A part that would be recomputed, if it did not do one thing more."""

    def __init__(self, kind: str = "nothing") -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.seen: list[int] = []
        self.one, self.two = nn.Linear(16, 64), nn.Linear(64, 16)
        self.register_buffer("total", torch.zeros(()))
        self.plain = torch.zeros(())
        self.kept = [torch.zeros(())]
        self.generator: object = GENERATORS[kind]() if kind in GENERATORS else None
        if kind == "hook":
            self.one.register_forward_hook(lambda *_: self.seen.append(1))

    def forward(self, x: Tensor, given: list[int]) -> Any:
        if self.kind == "input":
            x.mul_(2)
        elif self.kind == "later":
            x = x + 1
        wide = torch.sigmoid(self.one(x))
        factor: Any = 1.0  # of the result: it is not saved, so memory is no reason against the part
        if self.kind == "buffer":
            self.total += 1
        elif self.kind == "replaced":
            self.total = self.total + 1
        elif self.kind == "tensor":
            self.plain += 1
        elif self.kind == "attribute":
            self.calls += 1
        elif self.kind == "list":
            self.seen.append(1)
        elif self.kind == "item":
            self.kept[0] += 1
        elif self.kind == "argument":
            given.append(1)
        elif self.kind == "random":
            factor = random.random()
        elif self.kind == "generator":
            factor = torch.rand(16, generator=GENERATOR)
        elif isinstance(self.generator, (np.random.Generator, random.Random)):
            factor = self.generator.random()
        elif self.kind == "checkpoint":
            return checkpoint(nn.Sequential(self.two, nn.Tanh()), wide, use_reentrant=False)
        elif self.kind == "func":
            factor = torch.func.grad(lambda one: one.sin().sum())(torch.ones(16))
        elif self.kind == "object":
            return Result(self.two(wide))
        elif self.kind == "backward":
            self.one.bias.sum().backward()  # nothing is saved for it
        return self.two(wide) * factor


class Result:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Static(nn.Module):
    @staticmethod
    def forward(x: Tensor, given: list[int]) -> Tensor:
        return x.sigmoid().exp().sin().cos().tanh()


class Around(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.before, self.part = nn.Linear(16, 16), Part(kind)
        if kind == "another's":
            self.part.forward = Part().forward
        elif kind == "static":
            self.part = Static()

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x).cos()
        if self.kind == "substituted":
            return torch.func.functional_call(self.part, {"two.bias": self.before.bias * 2}, (h, [1]))
        if self.kind == "under":
            return checkpoint(self.part, h, [1], use_reentrant=False)
        result = self.part(h, [1])
        if self.kind == "later":
            with torch.no_grad():
                h.mul_(2)  # nobody has saved it
        return result.tensor if isinstance(result, Result) else result


NOTICED = (
    "buffer", "replaced", "tensor", "attribute", "list", "random", "generator", "input", "checkpoint", "func", "object",
    "hook", "under", "later", "argument", "item", "numpy", "python", "backward", "another's", "static", "substituted",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["nothing", *NOTICED])
def test_what_would_be_noticed_is_not_repeated(kind: str, recomputed: Callable[..., Any]) -> None:
    GENERATOR.manual_seed(1)
    state = random.getstate()

    def build() -> nn.Module:
        GENERATOR.manual_seed(1)
        random.seed(1)
        return Around(kind)

    try:
        chosen, _ = recomputed(build, batch(32, 16), 8, budget=6000)
    finally:
        random.setstate(state)
    assert ("part" in chosen) == (kind == "nothing")


def test_what_runs_while_parametrizations_are_cached_is_not_repeated(recomputed: Callable[..., Any]) -> None:
    def loss(model: nn.Module) -> Tensor:
        with parametrize.cached():
            return batch(32, 16)(model)

    def build() -> nn.Module:
        model = Around("nothing")
        parametrizations.weight_norm(model.part.one)
        return model

    assert recomputed(build, loss, 8, budget=6000)[0] == set()


def recomputing(part: Part, **options: Any) -> tuple[Around, Session, torch.optim.Optimizer]:
    """A model whose part is recomputed from now on, and its open session."""
    model = Around("nothing")
    model.part = part
    session = Session(model, recompute=True, **({"min_size": 0, "budget": 6000} | options)).open()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(5):
        batch(32, 16)(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert "part" in standing_in(model)
    return model, session, optimizer


def test_copies_of_a_model_have_their_own_forward() -> None:
    model, session, _ = recomputing(Part())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    x = torch.randn(32, 16)
    expected = bits(model(x))
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert bits(other(x)) == expected
        with torch.no_grad():
            other.part.two.weight.zero_()
        assert bits(other(x)) != expected, "its own parameters are used"
    session.close()


def test_code_that_looks_at_a_forward_sees_the_modules_own() -> None:
    model, _, _ = recomputing(Part())
    assert inspect.signature(model.part.forward) == inspect.signature(Part("nothing").forward)


def test_an_exception_in_a_forward_leaves_nothing_behind() -> None:
    model, session, _ = recomputing(Part())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.part(torch.randn(32, 15), [])
    batch(32, 16)(model).backward()
    session.close()
    assert not standing_in(model)


@pytest.mark.parametrize("kind", ["attribute", "list", "item", "argument", "random"])
def test_a_forward_that_changes_things_only_later_is_an_error(kind: str) -> None:
    model, _, _ = recomputing(Part())
    batch(32, 16)(model).backward()
    model.part.kind = kind
    with pytest.raises(LMSError, match="module 'part' cannot be recomputed: its forward has changed"):
        batch(32, 16)(model)


@pytest.mark.parametrize("change", ["parameters", "mode"])
def test_what_changes_between_forward_and_backward_is_an_error(change: str) -> None:
    model, _, _ = recomputing(Part())
    loss = batch(32, 16)(model)
    if change == "mode":
        model.eval()
    else:
        with torch.no_grad():
            model.part.one.bias.add_(1)
    with pytest.raises(LMSError, match="module 'part' cannot be recomputed: its parameters, buffers or mode"):
        loss.backward()


@pytest.mark.parametrize(
    "change",
    [
        lambda result: result * torch.rand(16, generator=GENERATOR),
        lambda result: result[torch.randperm(32, generator=GENERATOR)],
    ],
    ids=["factor", "order"],
)
def test_a_forward_that_is_not_the_same_twice_is_an_error_and_never_a_wrong_gradient(
    change: Callable[[Tensor], Tensor],
) -> None:
    class Hidden(Part):
        def forward(self, x: Tensor, given: list[int]) -> Any:
            return change(super().forward(x, given))

    model, _, _ = recomputing(Hidden())
    with pytest.raises(LMSError, match="its forward gave another result the second time; train with recompute=False"):
        batch(32, 16)(model).backward()


def test_a_graph_that_is_used_twice_has_the_same_gradients_twice() -> None:
    model, session, _ = recomputing(Part())
    x = torch.randn(32, 16, requires_grad=True)
    loss = model(x).square().mean()
    (once,) = torch.autograd.grad(loss, x, create_graph=True)
    (again,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(once.sum(), x)
    session.close()
    plain = model(x).square().mean()
    (expected,) = torch.autograd.grad(plain, x, create_graph=True)
    assert bits(once) == bits(again) == bits(expected)
    assert bits(second) == bits(torch.autograd.grad(expected.sum(), x)[0])


def test_without_a_backward_in_a_pause_or_in_another_mode_a_forward_runs_once_and_plainly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, session, _ = recomputing(Part())
    monkeypatch.setattr("lms.torch.recompute.repeat.checkpoint", lambda *_, **__: pytest.fail("it would be recomputed"))
    x = torch.randn(32, 16)
    with torch.no_grad():
        model(x)
    with session.pause():
        model(x).sum().backward()
    model.eval()(x).sum().backward()
    model.train()
    handle = model.part.one.register_forward_hook(lambda *_: None)
    model(x).sum().backward()
    handle.remove()
    with pytest.raises(pytest.fail.Exception, match="would be recomputed"):
        model(x)


def test_batch_norm_that_was_watched_in_evaluation_mode_runs_once_in_training_mode(
    recomputed: Callable[..., Any],
) -> None:
    def loss(model: nn.Module) -> Tensor:
        model.calls = getattr(model, "calls", 0) + 1
        model.train(model.calls > 6)
        return batch(32, 16)(model)

    def build() -> nn.Module:
        block = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Sigmoid(), nn.Linear(64, 16))
        return nn.Sequential(nn.Linear(16, 16), block, nn.Tanh())

    assert recomputed(build, loss, budget=14_000)[0] >= {"1"}


def test_the_mode_that_counts_is_that_of_the_watched_pass() -> None:
    block = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Sigmoid(), nn.Linear(64, 16))
    model = nn.Sequential(nn.Linear(16, 16), block, nn.Tanh())
    session = Session(model, recompute=True, min_size=0, budget=14_000).open()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for index in range(7):
        model.train(index == 6)
        batch(32, 16)(model).backward()
        model.train()  # before LMS starts to watch, and before it chooses
        optimizer.step()
    assert "1" in standing_in(model)
    session.close()
    assert block[1].num_batches_tracked == 1


def test_batches_of_changing_shapes_are_trained_to_the_last_bit(
    models: ModuleType, recomputed: Callable[..., Any]
) -> None:
    def loss(model: nn.Module) -> Tensor:
        return model.loss(torch.randint(32, (int(torch.randint(1, 4, ())), 17)))

    assert recomputed(models.GPT, loss, 12)[0]


def test_shapes_that_never_repeat_do_not_keep_modules_from_being_chosen(recomputed: Callable[..., Any]) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.Sigmoid(), nn.Linear(64, 16)) for _ in range(3)))

    def loss(model: nn.Module) -> Tensor:
        return model(torch.randn(torch.initial_seed() - 60, 16)).square().mean()  # a row more in each step

    assert recomputed(build, loss, 40, budget=14_000)[0]


def test_compiled_modules_are_left_alone(recomputed: Callable[..., Any]) -> None:
    def build() -> nn.Module:
        torch._dynamo.reset()
        parts = [nn.Sequential(nn.Linear(16, 64), nn.Sigmoid(), nn.Linear(64, 16)) for _ in range(3)]
        parts[0].compile(backend="eager")
        return nn.Sequential(parts[0], torch.compile(parts[1], backend="eager"), parts[2])

    assert recomputed(build, batch(32, 16), 8, budget=14_000)[0] == {"2"}


def test_the_planner_takes_the_choice_back_if_it_needs_too_much() -> None:
    model, session, optimizer = recomputing(Part())
    assert session._planner._make_room()
    optimizer.step()
    assert not standing_in(model)
    choice = session._planner.choice
    assert choice is not None
    assert choice.why.startswith("none: the modules that were recomputed need more memory")


def test_state_may_be_away_meanwhile(recomputed: Callable[..., Any]) -> None:
    """Parameters come back before the forward that runs again, and count as unchanged."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Sigmoid(), nn.Linear(128, 128)) for _ in range(2)))

    chosen, session = recomputed(
        build, batch(32, 128), 8, budget=20_000, swap="activations,optimizer,parameters,gradients"
    )
    assert chosen
    assert session.stats()["state_in"]


def test_modules_inside_ddp_are_recomputed(recomputed: Callable[..., Any]) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        chosen, _ = recomputed(
            lambda: nn.parallel.DistributedDataParallel(Around("nothing")), batch(32, 16), budget=6000
        )
    finally:
        torch.distributed.destroy_process_group()
    assert chosen == {"module.part"}


def test_the_step_that_a_choice_foresees_is_the_one_that_comes(
    models: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreseen: list[Trace] = []

    def remember(trace: Trace, link: Link, candidates: Sequence[Candidate], **bounds: Any) -> object:
        choice = choose(trace, link, candidates, **bounds)
        calls = [call for one in candidates if one.name in choice.modules for call in one.calls]
        foreseen.extend([trace, recompute(trace, calls)])
        return choice

    def words(trace: Trace) -> list[tuple[str, int]]:
        return [(access.kind, trace.tensors[access.tensor].nbytes) for access in trace.accesses]

    monkeypatch.setattr("lms.runtime.planner.choose", remember)
    torch.manual_seed(7)
    model = models.GPT()
    session = Session(model, recompute=True, min_size=0, budget=24_000)
    for _ in train(model, lambda model: model.loss(torch.randint(32, (2, 17))), 7, session):
        step = session.trace
    before, expected = foreseen
    assert step is not None
    assert words(step) != words(before)
    # What runs again is no record: it was made after the first read.
    first = next(at for at, access in enumerate(expected.accesses) if access.kind == "read")
    own = [index for index, touches in enumerate(expected.touches) if touches[0] < first]
    there = [access for access in expected.accesses if access.tensor in own]
    backward = [access for access in there[first:] if access.kind == "read"]
    assert words(step) == words(replace(expected, accesses=(*there[:first], *backward)))
