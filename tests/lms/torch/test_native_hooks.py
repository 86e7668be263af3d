"""The hooks in C++ and the hooks in Python: the same bits, the same errors and the same figures.

`campaign/test_graphs.py` compares them on random graphs.
"""

from __future__ import annotations

import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lms.errors import SpillError
from lms.memory.resident import ResidentSet
from lms.runtime.planner import PassPlanner
from lms.runtime.recorder import Finished, Recorder
from lms.torch import native_hooks, swapper
from lms.torch.led_passes import LedPasses
from lms.torch.passes import Pass
from lms.torch.session import Session

Make = Callable[..., Session]
STEPS = 40
ROOM = 10**6  # bytes, so that nothing has to move
N = 144  # bytes of a tensor here
FIGURES = (
    *("passes", "saved", "recorded", "held_peak", "largest", "swapped_out", "misses", "replans"),
    *("kept_parameters", "kept_small", "kept_owned", "kept_types"),
)


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if native_hooks.find() is None:
        pytest.skip("the hooks are not compiled: `python -m lms.build torch` says what is missing")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each pass that C++ led: whether Python took it over before it was over."""
    found: list[bool] = []
    take_over = Pass.take_over

    def noting(self: Pass, led: native_hooks.Led) -> object:
        records = take_over(self, led)
        found.append(bool(records))
        return records

    monkeypatch.setattr(Pass, "take_over", noting)
    return found


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> list[Finished]:
    """The passes that are over, as the planner learns of them."""
    found: list[Finished] = []
    note = PassPlanner.note

    def noting(self: PassPlanner, one: Finished) -> None:
        found.append(one)
        note(self, one)

    monkeypatch.setattr(PassPlanner, "note", noting)
    return found


def leaf() -> Tensor:
    return torch.arange(36.0).view(6, 6).div(36).requires_grad_()


def usual(w: Tensor, _: int) -> list[Tensor]:
    x = torch.exp(w * 1.0)
    y = (x * x.t()).tanh() * x.view(-1)[:6]
    return [torch.autograd.grad((torch.exp(y) * w).sum(), w)[0]]


def another_way(w: Tensor, step: int) -> list[Tensor]:
    x = torch.exp(w * 1.0)
    for _ in range(2 + (step % 11 == 10)):
        x = torch.tanh(x) * x
    return [torch.autograd.grad(x.sum(), w)[0]]


def shorter(w: Tensor, step: int) -> list[Tensor]:
    x = torch.exp(torch.exp(w * 0.5) * 0.5)
    return [torch.autograd.grad(x.sum(), w)[0]] if step % 9 else [x.detach()]


def twice(w: Tensor, step: int) -> list[Tensor]:
    loss = torch.exp(torch.exp(w * 0.5) * 0.5).sum()
    return [
        torch.autograd.grad(loss, w, retain_graph=step % 7 == 6 and not again)[0]
        for again in range(1 + (step % 7 == 6))
    ]


def changed(w: Tensor, step: int) -> list[Tensor]:
    x = torch.exp(w * 0.5)
    y = torch.exp(x * 0.5).sum()
    if step % 8 == 7:
        with torch.no_grad():
            x.add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[torch.FloatTensor \[6, 6\]\]"):
            torch.autograd.grad(y, w)
        return []
    return [torch.autograd.grad(y, w)[0]]


KEPT: list[Tensor] = []


def keeps(w: Tensor, step: int) -> list[Tensor]:
    x = torch.exp(w * 0.5)
    if step % 10 == 9:
        KEPT.append(x.detach())
    return [torch.autograd.grad(torch.exp(x * 0.5).sum(), w)[0]]


def longer(w: Tensor, step: int) -> list[Tensor]:
    """The accesses are always the same, but in some steps the first graph lives until the end."""
    outer = torch.exp(torch.exp(w * 0.5) * 0.5)
    results, graphs = [], []
    for _ in range(3):
        graphs.append(torch.exp(torch.exp(torch.exp(w * 0.1) * 0.5) * 0.5).sum())
        results += torch.autograd.grad(graphs[-1], w, retain_graph=step % 9 == 8)
    return [*results, *torch.autograd.grad(outer.sum(), w)]


def train(
    make: Make, step: Callable[[Tensor, int], list[Tensor]], budget: int
) -> tuple[list[list[Tensor]], dict[str, object]]:
    KEPT.clear()
    w = leaf()
    with make(budget=budget) as session:
        results = [step(w, index) for index in range(STEPS)]
        stats = session.stats()
        gc.collect()
        assert session._swapper.live == 0
        trace = session.trace
        assert trace is not None
        keys = [(access.kind, access.tensor) for access in trace.accesses]
    return results, {name: stats[name] for name in FIGURES} | {"keys": keys}


@pytest.fixture
def evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans do not depend on time: all operations take equally long."""
    monkeypatch.setattr(Recorder, "gaps", lambda self: [1e-3] * (len(self.order) + 1))


@pytest.mark.parametrize("budget", [ROOM, 2 * N, 0])
@pytest.mark.parametrize("step", [usual, another_way, shorter, twice, changed, keeps, longer])
@pytest.mark.usefixtures("evenly")
def test_they_do_what_python_does(
    step: Callable[[Tensor, int], list[Tensor]],
    budget: int,
    lms: Make,
    tier: object,
    taken: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    bits: Callable[[Tensor], object],
) -> None:
    ours, figures = train(lms, step, budget)
    led, copies = len(taken), (list(tier.offloads), list(tier.reloads))
    # A step that begins as the other kind, for which there is a plan, is measured each time.
    assert led > (0 if step is twice and budget != ROOM else STEPS / 2)
    assert bool(copies[0]) is (budget != ROOM)
    tier.offloads.clear()
    tier.reloads.clear()
    monkeypatch.setattr(swapper, "native_hooks", lambda *_: native_hooks.NativeHooks())
    theirs, expected = train(lms, step, budget)
    assert len(taken) == led
    assert (tier.offloads, tier.reloads) == copies
    assert [[bits(t) for t in row] for row in ours] == [[bits(t) for t in row] for row in theirs]
    assert figures == expected


def test_a_known_pass_that_moves_nothing_is_led_by_cpp_and_leaves_nothing(lms: Make) -> None:
    w = leaf()
    with lms(budget=ROOM) as session:
        for index in range(8):
            usual(w, index)
        x = torch.exp(w * 1.0)
        storage = weakref.ref(x.untyped_storage())
        y = x * x.t()
        assert session._swapper.native.leading
        assert session._swapper.live > 0
        del x, y
        assert storage() is None
        assert session._swapper.live == 0


def chain(w: Tensor) -> Tensor:
    x = w * 1.0
    for _ in range(40):
        x = torch.exp(x * -0.5)
    return x.sum()


@pytest.mark.usefixtures("evenly")
def test_python_is_called_for_what_moves_and_for_little_else(
    lms: Make, tier: object, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    attended: list[bool] = []  # of each access that Python attends: whether its record moves
    follow = LedPasses.follow

    def noting(self: object, record: object, *, read: bool) -> None:
        attended.append(record is not None)
        follow(self, record, read=read)

    monkeypatch.setattr(LedPasses, "follow", noting)
    w = leaf()
    with lms(budget=36 * N) as session:
        for _ in range(20):
            torch.autograd.grad(chain(w), w)
        plan, trace = session.plan, session.trace
        assert plan is not None
        assert trace is not None
        attended.clear()
        taken.clear()
        loss = chain(w)
        assert session._swapper.native.leading
        assert session._swapper.live == len(trace.tensors)
        torch.autograd.grad(loss, w)
        assert session._swapper.live == 0
        session.stats()
        last = session._planner.last
    assert taken == [False]
    assert last is not None
    assert last.held_peak == plan.forecast.held_peak
    moved = plan.moved()
    assert 0 < len(moved) < 10
    assert attended.count(True) == sum(access.tensor in moved for access in trace.accesses)
    assert attended.count(False) <= 1 + 3 * len(plan.moves), "the first access, and those at which a copy starts"


@pytest.mark.parametrize("how", ["full", "refusing", "broken"])
def test_after_an_error_of_the_tier_the_next_step_begins_afresh(
    how: str, lms: Make, tier: object, taken: list[bool], finished: list[Finished], bits: Callable[[Tensor], object]
) -> None:
    w = leaf()
    expected = bits(torch.autograd.grad(chain(w), w)[0])
    with lms(budget=20 * N) as session, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            for _ in range(20):
                torch.autograd.grad(chain(w), w)
            taken.clear()
            setattr(tier, how, True)
            with pytest.raises(SpillError) as caught:
                torch.autograd.grad(chain(w), w)
            setattr(tier, how, False)
            for _ in range(3):  # while the error keeps the frames, and with them the graph
                assert bits(torch.autograd.grad(chain(w), w)[0]) == expected
            assert taken == [True], "C++ led until the error, and not while a graph is open"
            del caught
            gc.collect()
        assert session._swapper.live == 0
        session.stats()
        # The error of a copy out that fails is raised before the next access is looked at.
        assert [one.recorder.broken for one in finished].count(True) == (0 if how == "full" else 3)
    assert session._swapper.stepper.holdings.held == 0
    assert not tier.slots


@pytest.mark.usefixtures("evenly")
def test_what_lives_longer_than_foreseen_can_leave_and_an_error_then_ends_the_pass(
    lms: Make, tier: object, taken: list[bool], finished: list[Finished], bits: Callable[[Tensor], object]
) -> None:
    w = leaf()
    expected = [bits(one) for one in longer(w, 0)]
    with lms(budget=ROOM) as session:
        longer(w, 0)
        needed = session.stats()["held_peak"]
    finished.clear()
    with lms(budget=needed) as session:
        for _ in range(20):
            longer(w, 0)
        tier.offloads.clear()
        longer(w, 0)
        assert not tier.offloads
        taken.clear()
        assert [bits(one) for one in longer(w, 8)] == expected
        assert taken == [True]
        assert tier.offloads
        longer(w, 0)
        taken.clear()
        tier.refusing = True
        with pytest.raises(SpillError):
            longer(w, 8)
        tier.refusing = False
        assert taken == [True]
        assert [bits(one) for one in longer(w, 0)] == expected
        session.stats()
        assert [one.recorder.broken for one in finished].count(True) == 1
        assert session._swapper.live == 0


def test_a_pass_that_first_comes_late_keeps_the_budget(lms: Make) -> None:
    """It begins like a well-known pass, so nobody times it."""
    w = leaf()
    with lms(budget=12 * N) as session:
        for index in range(40):
            loss = chain(w)
            if index > 20 and index % 3 == 0:
                torch.autograd.grad(loss, w, retain_graph=True)
            torch.autograd.grad(loss, w)
            del loss
        stats = session.stats()
    assert stats["held_peak"] <= stats["budget"] + 2 * stats["largest"] < stats["saved"]


def test_what_stays_is_used_on_another_thread_while_cpp_leads(lms: Make) -> None:
    w, small = leaf(), torch.ones(3, requires_grad=True)
    found: list[Tensor] = []
    with lms(budget=ROOM, min_size=100) as session:
        side = torch.exp(small * 1.0).sum()
        for index in range(8):
            usual(w, index)
        x = torch.exp(w * 1.0)
        thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(side, small)))
        thread.start()
        thread.join()
        assert session._swapper.native.leading
        del x
    assert torch.equal(found[0], torch.exp(small))


def test_ten_thousand_passes_leave_nothing(lms: Make, taken: list[bool]) -> None:
    w = leaf()

    def steps(count: int) -> tuple[int, int]:
        for step in range(count):
            x = torch.exp(w * 1.0)
            if step % 10 == 9:
                x = torch.tanh(x)  # not as planned
            (x * x).sum().backward()
            w.grad = None
        gc.collect()
        return sys.getallocatedblocks(), ResidentSet().current()

    with lms(budget=ROOM):
        blocks, nbytes = steps(500)
        taken.clear()
        more_blocks, more_nbytes = steps(10_000)
        assert taken.count(False) > 8000
        assert taken.count(True) > 800
    # One object, or 400 bytes, for each pass would show.
    assert more_blocks - blocks < 2000
    assert more_nbytes - nbytes < 4 << 20


@pytest.mark.parametrize("budget", [ROOM, N])
def test_other_threads_use_and_drop_what_this_one_saves(lms: Make, taken: list[bool], budget: int) -> None:
    w = leaf()
    graphs: list[Tensor] = []
    over = threading.Event()
    found: list[Tensor] = []

    def loss() -> Tensor:
        return torch.exp(torch.exp(w * 0.5) * 0.5).sum()

    def work(*, use: bool) -> None:
        while not over.is_set() or graphs:
            try:
                graph = graphs.pop()
            except IndexError:
                over.wait(1e-4)
                continue
            if use:
                found.append(torch.autograd.grad(graph, w)[0])
            del graph

    expected = torch.autograd.grad(loss(), w)[0]
    threads = [threading.Thread(target=work, kwargs={"use": use}) for use in (True, False)]
    with lms(budget=budget) as session, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a backward runs on thread")
        for _ in range(8):
            torch.autograd.grad(loss(), w)
        for thread in threads:
            thread.start()
        try:
            for step in range(400):
                if step % 4 == 0:
                    graphs.append(loss())
                assert torch.equal(torch.autograd.grad(loss(), w)[0], expected)
        finally:
            over.set()
            for thread in threads:
                thread.join()
        gc.collect()
        assert session._swapper.live == 0
    assert found
    assert all(torch.equal(one, expected) for one in found)
    assert taken.count(True) > 0
    assert taken.count(False) > 0
