"""Optimizer state that is away between steps: the training has plain's bits, and other code sees the state as ever.

Here it moves as on a GPU, tensor by tensor. A CPU with a page pool pages it: test_paging.py.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lms.errors import LMSError, SpillError
from lms.memory.file import FileSlab
from lms.torch import state
from lms.torch.optimizer_state import Away, OptimizerState
from lms.torch.session import Session

Make = Callable[[Iterable[Tensor]], Optimizer]
Between = Callable[[nn.Module, Optimizer, int], object]  # what a script does after a step

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "adam-loop": lambda p: torch.optim.Adam(p, 1e-2, foreach=False),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, 1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, 1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p, 1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, 1e-2),
    "muon": lambda p: torch.optim.Muon([one for one in p if one.ndim == 2], 1e-2),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3, history_size=4),
    "two groups": lambda p: torch.optim.AdamW(_halves(p)),
    "of another": lambda p: Another(p, 1e-2),
}


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_pager", lambda *_: None)


class Another(torch.optim.Adam):
    """A class that PyTorch does not know may look at all parameters in its step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        norm = sum(float(self.state[p]["exp_avg"].norm()) for group in self.param_groups for p in group["params"])
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - 1e-3 / (1 + norm))
        return loss


def _halves(parameters: Iterable[Tensor]) -> list[dict[str, Any]]:
    listed = list(parameters)
    return [{"params": listed[:3], "lr": 1e-2}, {"params": listed[3:], "lr": 1e-3, "weight_decay": 0.1}]


def train(
    make: Make, between: Between | None = None, steps: int = 5, **options: Any
) -> tuple[list[Any], Session | None]:
    """Losses, parameters and state of a training, as bits; under a session if there are options for one."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = make(model.parameters())
    session = Session(model, optimizer, **({"min_size": 0} | options)) if options else None
    found: list[Any] = []

    def loss_of() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss

    with session or torch.enable_grad():
        for index in range(steps):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(index))
            if isinstance(optimizer, torch.optim.LBFGS):
                found.append(optimizer.step(loss_of))
            else:
                found.append(loss_of())
                optimizer.step()
            if between is not None:
                found.append(between(model, optimizer, index))
    return [found, list(model.parameters()), optimizer.state_dict()], session


def away(optimizer: Optimizer) -> int:
    """Tensors of the optimizer's state that are below the device."""
    state = optimizer.state
    assert isinstance(state, OptimizerState)
    return sum(isinstance(value, Away) for parameter in state for value in state.entry(parameter).values())


@pytest.fixture
def same(bits: Callable[[Tensor], object]) -> Callable[[Any, Any], bool]:
    def flat(value: Any) -> Iterator[object]:
        if isinstance(value, Tensor):
            yield bits(value)
        elif isinstance(value, dict):
            for key in value:
                yield from (key if not isinstance(key, Tensor) else "parameter", *flat(value[key]))
        elif isinstance(value, (list, tuple)):
            for one in value:
                yield from flat(one)
        else:
            yield value

    return lambda one, other: list(flat(one)) == list(flat(other))


@pytest.mark.parametrize("swap", ["optimizer", "activations,optimizer"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_trains_with_plains_bits(name: str, swap: str, same: Callable[[Any, Any], bool]) -> None:
    plain, _ = train(OPTIMIZERS[name])
    ours, session = train(OPTIMIZERS[name], budget=0, swap=swap)
    assert same(ours, plain)
    assert session is not None
    stats = session.stats()
    assert stats["state_out"] >= 5 * stats["state"] > 0 or name == "lbfgs"
    assert stats["state_in"] > 0
    assert stats["state_held"] == 0
    assert bool(stats["saved"]) == ("activations" in swap)


def test_parameters_step_in_parts(monkeypatch: pytest.MonkeyPatch, same: Callable[[Any, Any], bool]) -> None:
    monkeypatch.setattr("lms.torch.state_pager.CHUNK", 1000)
    parts: list[int] = []
    original = torch.optim.Adam._init_group

    def spy(self: Optimizer, group: dict[str, Any], *rest: Any) -> Any:
        parts.append(len(group["params"]))
        return original(self, group, *rest)  # type: ignore[arg-type]

    plain, _ = train(OPTIMIZERS["adam"], steps=1)
    monkeypatch.setattr(torch.optim.Adam, "_init_group", spy)
    ours, _ = train(OPTIMIZERS["adam"], steps=1, budget=0, swap="optimizer")
    assert same(ours, plain)
    assert len(parts) > 2
    assert sum(parts) == 6


def state_dict(_: nn.Module, optimizer: Optimizer, index: int) -> object:
    return copy.deepcopy(optimizer.state_dict()) if index == 2 else None


def saved_and_loaded(_: nn.Module, optimizer: Optimizer, index: int) -> None:
    if index == 2:
        torch.save(optimizer.state_dict(), file := io.BytesIO())
        file.seek(0)
        optimizer.load_state_dict(torch.load(file))


def copied(_: nn.Module, optimizer: Optimizer, index: int) -> object:
    if index != 2:
        return None
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    assert all(not isinstance(one.state, OptimizerState) for one in copies)
    return [list(one.state.values()) for one in copies]


def read(_: nn.Module, optimizer: Optimizer, index: int) -> object:
    """In all the ways in which a dict is read."""
    state = optimizer.state
    first = next(iter(state))
    ways: list[Callable[[], Any]] = [
        lambda: state[first], lambda: state.get(first), lambda: list(state.values()), lambda: list(state.items()),
        lambda: dict(state), lambda: {**state}, lambda: state.copy(), lambda: copy.copy(state),
    ]  # fmt: skip
    return copy.deepcopy(ways[index]())


def added(model: nn.Module, optimizer: Optimizer, index: int) -> None:
    if index == 1:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    if index >= 1:
        (parameter,) = optimizer.param_groups[-1]["params"]
        parameter.grad = torch.full((3,), float(index))


def frozen(model: nn.Module, _: Optimizer, index: int) -> None:
    model[0].requires_grad_(index % 2 == 1)  # type: ignore[union-attr]


@pytest.mark.parametrize("between", [state_dict, saved_and_loaded, copied, read, added, frozen])
def test_what_a_script_does_between_steps_sees_the_state_as_ever(
    between: Between, same: Callable[[Any, Any], bool]
) -> None:
    plain, _ = train(OPTIMIZERS["adam"], between, steps=8)
    ours, _ = train(OPTIMIZERS["adam"], between, steps=8, budget=0, swap="optimizer")
    assert same(ours, plain)


def test_hooks_closures_and_schedulers_of_the_script(same: Callable[[Any, Any], bool]) -> None:
    def run(**options: Any) -> list[Any]:
        torch.manual_seed(1)
        model = nn.Linear(16, 16)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        order: list[str] = []

        def clip(*_: object) -> None:
            order.append("before")
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        def after(one: Optimizer, *_: object) -> None:
            order.append("after" if one is optimizer else "of another")

        with Session(model, **options) if options else torch.enable_grad():
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
            optimizer.register_step_post_hook(after)
            found = []
            for index in range(4):
                if index == 1:
                    optimizer.register_step_pre_hook(clip)  # later than the session's

                def closure() -> Tensor:
                    optimizer.zero_grad()
                    loss: Tensor = model(torch.ones(4, 16)).square().sum()
                    loss.backward()
                    return loss

                found.append(optimizer.step(closure))
                scheduler.step()
        return [found, order, list(model.parameters()), optimizer.state_dict()]

    assert same(run(budget=0, min_size=0, swap="optimizer"), run())


def test_a_gradient_scaler_that_skips_steps(same: Callable[[Any, Any], bool]) -> None:
    def run(fused: bool, **options: Any) -> list[Any]:
        torch.manual_seed(1)
        model = nn.Linear(16, 16)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        with Session(model, optimizer, **options) if options else torch.enable_grad():
            for index in range(5):
                optimizer.zero_grad()
                factor = float("inf") if index == 2 else 1.0
                scaler.scale((model(torch.ones(4, 16)) * factor).square().sum()).backward()
                scaler.step(optimizer)
                scaler.update()
        return [list(model.parameters()), optimizer.state_dict(), scaler.get_scale()]

    for fused in (False, True):
        assert same(run(fused, budget=0, min_size=0, swap="optimizer"), run(fused))


def test_state_that_the_script_refers_to_stays(same: Callable[[Any, Any], bool]) -> None:
    held: list[Tensor] = []

    def keep(_: nn.Module, optimizer: Optimizer, index: int) -> object:
        entries = list(optimizer.state.values())
        if index == 0:
            held.extend((entries[0]["exp_avg"], entries[2]["exp_avg_sq"].view(-1)[3:]))
        return [one.clone() for one in held]

    plain, _ = train(OPTIMIZERS["adam"], keep)
    held.clear()
    ours, session = train(OPTIMIZERS["adam"], keep, budget=0, swap="optimizer")
    assert same(ours, plain)
    assert session is not None
    assert session.stats()["state_out"] > 0  # type: ignore[operator]


def test_what_is_away_is_refused_and_comes_back_after_the_session(same: Callable[[Any, Any], bool]) -> None:
    model = nn.Linear(16, 16)
    optimizer = torch.optim.Adam(model.parameters())
    session = Session(model, optimizer, budget=0, min_size=0, swap="optimizer").open()
    entry = None
    for _ in range(2):
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
    assert isinstance(optimizer.state, OptimizerState)
    entry = optimizer.state.entry(model.weight)
    with pytest.raises(TypeError, match="must be Tensor, not Away"):
        torch.sum(entry["exp_avg"])
    session.close()
    assert away(optimizer) == 6
    assert session.engine.usage()["file"] > 0
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()  # plain again
    assert away(optimizer) == 0
    assert session.engine.usage()["file"] == 0
    with pytest.raises(ValueError, match="closed"):
        session.engine.file.fileno()  # type: ignore[attr-defined]


def test_what_a_checkpoint_brought_back_leaves_when_the_next_pass_begins() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters())
    with Session(model, optimizer, budget=0, min_size=0, swap="activations,optimizer"):
        for _ in range(3):
            loss = model(torch.ones(2, 16)).sum()
            assert not optimizer.state or away(optimizer) == 12
            loss.backward()
            optimizer.step()
            optimizer.state_dict()
            assert away(optimizer) == 0


def test_a_closure_that_saves_tensors_moves_no_state_of_the_step_under_way(same: Callable[[Any, Any], bool]) -> None:
    plain, _ = train(OPTIMIZERS["lbfgs"], steps=3)
    ours, session = train(OPTIMIZERS["lbfgs"], steps=3, budget=0, swap="activations,optimizer")
    assert same(ours, plain)
    assert session is not None
    assert session.stats()["passes"] > 3  # type: ignore[operator]


def test_entries_that_are_no_dicts_and_a_forked_childs_optimizer() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.state["steps"] = self.state.get("steps", 0) + 1  # type: ignore[index, call-overload]
            return super().step(closure)

    model = nn.Linear(16, 16)
    optimizer = Counting(model.parameters(), 0.1, momentum=0.9)
    with Session(model, optimizer, budget=0, min_size=0, swap="optimizer"):
        for _ in range(2):
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
        assert optimizer.state["steps"] == 2  # type: ignore[index]
        child = os.fork()
        if child == 0:
            net = nn.Linear(4, 4)
            other = torch.optim.Adam(net.parameters())
            for parameter in net.parameters():
                parameter.grad = torch.ones_like(parameter)
            other.step()
            other.step()
            os._exit(0 if type(other.state) is not OptimizerState else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_step_inside_a_pause_brings_the_state_back() -> None:
    def between(_: nn.Module, optimizer: Optimizer, index: int) -> None:
        if index == 2:
            with session.pause():
                optimizer.step()
                assert away(optimizer) == 0

    model = nn.Linear(16, 16)
    optimizer = torch.optim.Adam(model.parameters())
    with Session(model, optimizer, budget=0, min_size=0, swap="optimizer") as session:
        for index in range(4):
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
            assert away(optimizer) == 6
            between(model, optimizer, index)


def test_if_everything_fits_the_state_stays_from_the_second_step_on() -> None:
    for swap in ("optimizer", "activations,optimizer"):
        _, session = train(OPTIMIZERS["adam"], frac=0.9, swap=swap)
        assert session is not None
        stats = session.stats()
        assert stats["state_held"] == stats["state"] > 0, swap
        assert stats["state_out"] <= 2 * stats["state"], swap  # type: ignore[operator]


def test_a_full_disk_ends_no_step_in_the_middle_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, same: Callable[[Any, Any], bool]
) -> None:
    def refuse(*_: object) -> None:
        raise SpillError("the disk is full")

    plain, _ = train(OPTIMIZERS["adam"], steps=2)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, amsgrad=True)
    with Session(model, optimizer, budget=0, min_size=0, swap="optimizer"):
        for index in range(2):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(index))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if index == 1:
                monkeypatch.setattr(FileSlab, "write", refuse)
                with pytest.raises(LMSError, match="the disk is full"):
                    optimizer.step()
            else:
                optimizer.step()
        assert same([list(model.parameters()), optimizer.state_dict()], plain[1:])


def test_a_tier_that_takes_no_more_ends_no_step_in_the_middle(
    monkeypatch: pytest.MonkeyPatch, same: Callable[[Any, Any], bool]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise SpillError("there is no room")

    plain, _ = train(OPTIMIZERS["adam"], steps=1)
    with monkeypatch.context() as patch:
        patch.setattr("lms.torch.cpu.engine.CpuEngine.offload", refuse)
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
        optimizer = OPTIMIZERS["adam"](model.parameters())
        with Session(model, optimizer, budget=0, min_size=0, swap="optimizer"):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
            model(x).square().mean().backward()
            with pytest.raises(SpillError, match="there is no room"):
                optimizer.step()
    assert same([list(model.parameters()), optimizer.state_dict()], plain[1:])


def test_a_copy_back_that_fails_says_how_far_the_step_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lms.torch.state_pager.CHUNK", 1000)

    def refuse(*_: object) -> None:
        raise SpillError("the disk is gone")

    def between(_: nn.Module, __: Optimizer, index: int) -> None:
        monkeypatch.setattr(FileSlab, "read", refuse)

    with pytest.raises(SpillError, match=r"the disk is gone; the optimizer has stepped 0 of the \d parts"):
        train(OPTIMIZERS["sgd"], between, budget=0, swap="optimizer")


def test_an_embedding_whose_saved_tensors_are_small_still_keeps_its_state_if_all_fits() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(4000, 16)
    optimizer = torch.optim.Adam(table.parameters())
    with Session(table, optimizer, frac=0.9, swap="activations,optimizer") as session:
        for _ in range(5):
            optimizer.zero_grad()
            table(torch.arange(8)).square().sum().backward()
            optimizer.step()
    stats = session.stats()
    assert stats["state_held"] == stats["state"] > 0  # type: ignore[operator]
    assert stats["state_out"] <= 2 * stats["state"]  # type: ignore[operator]


def test_an_optimizer_that_the_session_was_not_told_of(same: Callable[[Any, Any], bool]) -> None:
    def run(**options: Any) -> list[Any]:
        torch.manual_seed(1)
        with Session(**options) if options else torch.enable_grad():
            model = nn.Linear(16, 16)
            optimizer = torch.optim.Adam(model.parameters())
            for _ in range(3):
                model(torch.ones(2, 16)).sum().backward()
                optimizer.step()
            if options:
                assert away(optimizer) == 6
        return [list(model.parameters()), optimizer.state_dict()]

    assert same(run(budget=0, min_size=0, swap="optimizer"), run())
