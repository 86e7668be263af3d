"""A graph that somebody keeps open: passes end all the same, no bit changes, and the one who keeps it is named."""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NoReturn

import pytest
import torch
from torch import Tensor, nn

from lms.torch.open_graphs import holders, sequence_number
from lms.torch.session import Session

Make = Callable[..., Session]


def train(mode: str, steps: int = 20) -> list[list[float]]:
    """Some steps of a loop that keeps a graph open in one of several ways: losses and parameters."""
    torch.manual_seed(0)
    net = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(32, 32), nn.Tanh())))
    optimizer = torch.optim.Adam(net.parameters())
    kept = [net(torch.randn(64, 32)).sum()] if mode in ("kept from before", "no optimizer") else []
    losses = []
    for step in range(steps):
        loss = net(torch.randn(64, 32)).square().mean()
        loss.backward(retain_graph=mode in ("retained", "used twice"))
        if mode == "used twice":
            loss.backward()
        if mode == "kept outputs" and step < 3:
            kept.append(net(torch.randn(64, 32)).sum())
        if mode == "no optimizer":
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter -= 0.01 * parameter.grad
                    parameter.grad = None
        else:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return [losses, *(p.detach().flatten().tolist() for p in net.parameters())]


@pytest.mark.parametrize("mode", ["retained", "used twice", "kept from before", "kept outputs", "no optimizer"])
@pytest.mark.parametrize("budget", [0, 20_000])
def test_passes_end_and_no_bit_changes(mode: str, budget: int, lms: Make) -> None:
    steps = 80 if mode == "no optimizer" else 20
    plain = train(mode, steps)
    with warnings.catch_warnings(), lms(budget=budget) as session:
        warnings.simplefilter("ignore", RuntimeWarning)
        assert train(mode, steps) == plain
        stats = session.stats()
    assert stats["passes"] >= 4
    assert session.plan is not None
    assert session.plan.moves
    gc.collect()
    assert session._swapper.live == 0
    assert session.engine.usage()["file"] == 0


def test_what_an_earlier_pass_left_behind_comes_back_with_its_bits(lms: Make) -> None:
    def run() -> list[list[float]]:
        torch.manual_seed(0)
        x = torch.randn(128, 64, requires_grad=True)
        kept = x.exp().tanh()  # saves results that no step changes
        parameter = torch.randn(64, 64, requires_grad=True)
        optimizer = torch.optim.SGD([parameter], 0.01)
        for _ in range(16):
            (torch.randn(128, 64) @ parameter).tanh().square().mean().backward()
            optimizer.step()
        first, second = (torch.autograd.grad(kept.sum(), x, retain_graph=True)[0] for _ in range(2))
        return [first.flatten().tolist(), second.flatten().tolist(), parameter.flatten().tolist()]

    plain = run()
    for budget in (0, 20_000):
        with warnings.catch_warnings(), lms(budget=budget) as session:
            warnings.simplefilter("ignore", RuntimeWarning)
            assert run() == plain
            assert session.stats()["passes"] >= 3
            assert session.stats()["held_peak"] <= budget + 3 * 128 * 64 * 4


def test_a_kept_graph_costs_no_memory_step_by_step(lms: Make) -> None:
    """It cost 33 KB a step: the pass never ended, and kept a record of all that it had seen."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    optimizer = torch.optim.SGD(net.parameters())
    x = torch.randn(128, 64)
    with warnings.catch_warnings(), lms(budget=0) as session:
        warnings.simplefilter("ignore", RuntimeWarning)
        sizes = []
        for _ in range(30):
            loss = net(x).square().mean()
            loss.backward(retain_graph=True)
            optimizer.step()
            gc.collect()
            sizes.append(sum(1 for thing in gc.get_objects() if str(type(thing).__module__).startswith("lms.")))
        assert session.stats()["passes"] >= 18
    assert max(sizes[-5:]) <= max(sizes[10:15])


@contextmanager
def told() -> Generator[list[str], None, None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        texts: list[str] = []
        yield texts
        texts += [str(warning.message) for warning in caught if "still open" in str(warning.message)]


def test_who_keeps_the_graph_is_named_once(lms: Make) -> None:
    with told() as texts, lms():
        train("retained")
    assert len(texts) == 1
    assert "'loss' in train()" in texts[0]
    assert "retain_graph" in texts[0]


def test_a_list_that_keeps_graphs_is_named(lms: Make) -> None:
    with told() as texts, lms():
        train("kept outputs")
    assert "'kept' in train()" in texts[0]


def test_a_loop_that_keeps_nothing_is_told_nothing(lms: Make) -> None:
    with told() as texts, lms():
        train("plain")
    assert texts == []


def test_a_traceback_of_the_last_exception_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        graph = torch.ones(2, requires_grad=True) * 2  # noqa: F841
        raise ValueError

    try:
        fail()
    except ValueError as error:
        monkeypatch.setattr(sys, "last_traceback", error.__traceback__, raising=False)
    torch.ones(1, requires_grad=True).exp()
    assert "'graph' in the traceback of the last exception (sys.last_traceback)" in holders(sequence_number())


def test_a_newer_graph_is_not_accused() -> None:
    before = sequence_number()
    mine: Tensor = torch.ones(1, requires_grad=True).exp()
    names = holders(before)
    assert not any("'mine'" in name for name in names), (names, mine)


def test_what_the_script_deletes_after_the_warning_is_gone(lms: Make) -> None:
    """Before Python 3.13 a frame whose variables were looked at keeps a copy of them."""

    def script() -> object:
        net = nn.Linear(64, 64)
        optimizer = torch.optim.SGD(net.parameters())
        large = torch.zeros(1000)
        gone = weakref.ref(large)
        for _ in range(20):
            loss = net(torch.randn(128, 64)).square().mean()
            loss.backward(retain_graph=True)
            optimizer.step()
        del large
        return gone()

    with told() as texts, lms():
        assert script() is None
    assert len(texts) == 1


def test_a_copy_of_its_variables_that_the_script_has_is_left_alone() -> None:
    graph = torch.ones(2, requires_grad=True).exp()
    mine = locals()
    assert holders(sequence_number())
    assert mine["graph"] is graph


class Hostile(dict[str, object]):
    """A configuration that refuses to be read."""

    def values(self) -> NoReturn:  # type: ignore[override]
        raise KeyError("???")

    def __getattribute__(self, name: str) -> NoReturn:
        raise RuntimeError(name)


def test_no_code_of_the_scripts_own_is_run() -> None:
    hostile = Hostile(a=1)
    assert not any("hostile" in name for name in holders(sequence_number())), type(hostile)


@pytest.mark.parametrize("critic_steps", [1, 3])
def test_a_gan_that_trains_its_critic_more_often_has_one_plan_for_the_whole_step(critic_steps: int, lms: Make) -> None:
    torch.manual_seed(0)
    maker, judge = (nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(2))
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in (maker, judge)]
    with told() as texts, lms(budget=0) as session:
        for step in range(12):
            fake = maker(torch.randn(64, 32))
            for _ in range(critic_steps):
                (judge(fake.detach()).tanh().mean() - judge(torch.randn(64, 32)).tanh().mean()).backward()
                optimizers[1].step()
            judge(fake).tanh().mean().backward()
            optimizers[0].step()
            if step == 5:
                before = session.stats()
        after = session.stats()
    assert texts == []
    assert after["passes"] == 12
    assert after["misses"] == before["misses"]
