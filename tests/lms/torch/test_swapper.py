"""The swapper under conditions that training rarely meets: changes in place, failures, collections, threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lms.errors import SpillError
from lms.runtime import plan_maker
from lms.torch.records import State
from lms.torch.session import Session

Make = Callable[..., Session]
Live = Callable[[Session], int]
N = 144  # bytes of a tensor of `chain`


def leaf() -> Tensor:
    return torch.arange(36.0).view(6, 6).div(36).requires_grad_()


def chain(w: Tensor, length: int = 6) -> Tensor:
    """Each step saves one tensor of its own."""
    x = w * 1.0
    for _ in range(length):
        x = torch.exp(x * -0.5)
    return x.sum()


def gradient(w: Tensor, loss: Tensor) -> Tensor:
    return torch.autograd.grad(loss, w)[0]


def plain_gradient() -> Tensor:
    w = leaf()
    return gradient(w, chain(w))


def state_of(session: Session, index: int = 0) -> State:
    run = session._swapper._pass
    assert run is not None
    return run.records[index].state


# Changes in place


def plain_error() -> str:
    w = leaf()
    y = torch.exp(w * 1.0)
    loss = y.sum()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "slow", "state"),
    [
        ({"budget": 10**6}, False, State.HERE),
        ({"budget": N}, True, State.LEAVING),
        ({"budget": 0}, False, State.AWAY),
    ],
    ids=["resident", "on its way out", "out"],
)
def test_a_change_in_place_is_the_error_that_plain_autograd_raises(
    options: dict[str, int], slow: bool, state: State, lms: Make, live: Live, tier: object
) -> None:
    tier.slow = slow
    w = leaf()
    with lms(**options) as session:
        y = torch.exp(w * 1.0)
        loss = y.sum()
        assert state_of(session) is state
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        assert str(caught.value)[:90] == plain_error()[:90]
        assert f"[torch.FloatTensor {[6, 6]}]" in str(caught.value)
        del loss, y, caught
        assert live(session) == 0


def test_a_change_in_place_of_what_came_back_is_an_error(lms: Make) -> None:
    w = leaf()
    with lms(budget=N * 2) as session:
        y = torch.exp(w * 1.0)
        others = [torch.exp(y * k) for k in (0.1, 0.2, 0.3)]
        loss = sum(other.sum() for other in others)
        torch.autograd.grad(loss, w, retain_graph=True)
        assert any(record.let_go for record in session._swapper._pass.records.values())
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, w)


@pytest.mark.parametrize("min_size", [0, 10**6], ids=["a parameter", "a small tensor"])
def test_a_change_in_place_of_what_stays_is_an_error(min_size: int, lms: Make) -> None:
    w = leaf()
    with lms(min_size=min_size):
        y = w * w if not min_size else torch.exp(w)
        loss = y.sum()
        with torch.no_grad():
            (y if min_size else w).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_backward_that_changes_a_saved_tensor_raises_on_the_second_use(lms: Make) -> None:
    class Rewriting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            ctx.save_for_backward(x * 1.0)
            return x * 2.0

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            (kept,) = ctx.saved_tensors
            result = grad * kept
            kept.mul_(2)
            return result

    w = leaf()
    with lms():
        loss = Rewriting.apply(w * 1.0).sum()
        torch.autograd.grad(loss, w, retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, w)


def test_what_was_changed_and_is_never_used_takes_no_room(lms: Make, tier: object) -> None:
    w = leaf()
    with lms(budget=N) as session:
        tier.slow = True
        for _ in range(5):
            x = torch.exp(w * 1.0)
            with torch.no_grad():
                x.zero_()
            loss = x + torch.exp(w * 2.0)
        assert session._swapper.stepper.holdings.held <= 2 * N
        del x, loss


# What is a record


def test_views_and_repeated_saves_move_once(lms: Make, tier: object) -> None:
    w = leaf()
    with lms():
        x = torch.tanh(w * 1.0)
        loss = (x * x).sum() + (x.t() * x[0]).sum() + (x.view(-1) * x.reshape(-1)).sum() + x.exp().sum()
        gradient(w, loss)
    assert tier.offloads == [N, N]  # x, and its exponential


def test_two_versions_of_a_storage_are_two_records(lms: Make, tier: object) -> None:
    def run() -> Tensor:
        w = leaf()
        x = w * 1.0
        y = torch.sin(x.clone())
        y.mul_(2)
        z = y * y
        return gradient(w, z.sum() + torch.cos(y).sum())

    theirs = run()
    with lms():
        assert torch.equal(run(), theirs)


def test_a_storage_at_the_address_of_a_dead_one_is_another_record(lms: Make, live: Live) -> None:
    w = leaf()
    with lms() as session:
        for k in range(40):
            factor = torch.full((6, 6), float(k))  # the allocator gives the same memory again and again
            kept = torch.exp(w * 0.1)
            loss = (w * factor).sum() + kept.sum()
            del factor
            assert torch.equal(gradient(w, loss), torch.full((6, 6), float(k)) + kept.detach() * 0.1)
            del loss, kept
            assert live(session) == 0


def test_a_batch_that_is_used_in_each_step_is_moved_in_the_first_at_most(lms: Make) -> None:
    w, batch = leaf(), torch.randn(6, 6)
    with lms() as session:
        for _ in range(3):
            gradient(w, (torch.exp(w * 1.0) * batch).sum())
        pinned = [record.pinned for record in session.trace.tensors]
        assert pinned.count(True) == 1
        assert session.stats()["last_out"] <= N


def test_a_tensor_that_is_kept_once_is_not_taken_for_one_that_is_always_kept(lms: Make) -> None:
    w, kept = leaf(), []
    with lms() as session:
        for step in range(6):
            x = torch.exp(w * 1.0)
            loss = torch.exp(x * 0.5).sum()
            if step == 0:
                kept.append(x.detach())
            del x
            gradient(w, loss)
            del loss
        assert not any(record.pinned for record in session.trace.tensors)


# Plans


def test_each_record_crosses_once_each_way_and_no_more_than_must(lms: Make, tier: object) -> None:
    w = leaf()
    with lms(budget=3 * N) as session:
        for _ in range(3):
            tier.offloads.clear()
            tier.reloads.clear()
            loss = chain(w, 12)
            gradient(w, loss)
            del loss
        assert 0 < sum(tier.reloads) <= sum(tier.offloads) <= 12 * N - 3 * N + N
        assert session.plan.forecast.out == sum(tier.offloads)
        assert not tier.slots


@pytest.mark.parametrize("budget", [0, N, 3 * N, 7 * N])
def test_the_held_peak_is_the_one_foretold(budget: int, lms: Make, tier: object) -> None:
    w = leaf()
    with lms(budget=budget) as session:
        for _ in range(6):
            loss = chain(w, 12)
            gradient(w, loss)
            del loss
        session.stats()
        measured = session._planner.last.held_peak
        assert abs(measured - session.plan.forecast.held_peak) <= N
        assert measured <= budget + N


@pytest.mark.parametrize("budget", [0, N, 3 * N])
def test_copies_of_freed_records_are_waited_for_before_more_is_held(budget: int, lms: Make, tier: object) -> None:
    tier.slow = True  # no copy is over until it is waited for
    w = leaf()
    with lms(budget=budget) as session:
        for _ in range(4):
            loss = chain(w, 12)
            gradient(w, loss)
            del loss
            session.stats()
            assert session._planner.last.held_peak <= budget + N


def test_a_record_brought_ahead_in_vain_can_leave_again(lms: Make, tier: object) -> None:
    w = leaf()
    with lms(budget=8 * N) as session:
        old = chain(w, 12)
        branch = chain(w, 3)
        torch.autograd.grad(branch, w)  # brings some of `old` ahead, by the rule
        for _ in range(3):
            loss = chain(w, 20)
            assert session._swapper.stepper.holdings.held <= 9 * N
            gradient(w, loss)
        assert torch.equal(gradient(w, old), gradient(*(lambda v: (v, chain(v, 12)))(leaf())))


# Failures


@pytest.mark.parametrize("how", ["full", "refusing"])
def test_a_tier_that_takes_no_more_raises_in_that_step_and_the_next_step_works(
    how: str, lms: Make, live: Live, tier: object
) -> None:
    w = leaf()
    with lms() as session:
        for _ in range(2):
            setattr(tier, how, True)
            with pytest.raises(SpillError):
                gradient(w, chain(w))
            assert live(session) == 0
            assert not tier.slots
            setattr(tier, how, False)
            assert torch.equal(gradient(w, chain(w)), plain_gradient())
        session.stats()
    assert session._swapper.stepper.holdings.held == 0


def test_a_write_that_fails_late_never_gives_wrong_bytes(lms: Make, tier: object, live: Live) -> None:
    w = leaf()
    with lms(budget=2 * N) as session:
        tier.slow = tier.full = True
        try:
            result = gradient(w, chain(w))
        except SpillError:
            result = None
        assert result is None or torch.equal(result, plain_gradient())
        tier.slow = tier.full = False
        assert live(session) == 0
        assert torch.equal(gradient(w, chain(w)), plain_gradient())


def test_a_read_that_fails_raises_and_the_next_step_works(lms: Make, live: Live, tier: object) -> None:
    w = leaf()
    with lms() as session:
        for _ in range(3):
            loss = chain(w)
            tier.broken = True
            with pytest.raises(SpillError, match="broken"):
                gradient(w, loss)
            del loss
            tier.broken = False
            assert live(session) == 0
            assert torch.equal(gradient(w, chain(w)), plain_gradient())
        assert session.timeline is not None
        assert session.stats()["passes"] >= 6
        assert not tier.slots


class Stop(Exception):
    pass


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        raise Stop


def test_an_exception_in_the_middle_leaves_nothing_behind(lms: Make, live: Live, tier: object) -> None:
    w = leaf()

    def forward() -> Tensor:
        chain(w)
        x = torch.exp(w * 1.0)
        raise Stop(x.sum())

    def backward() -> Tensor:
        x = torch.exp(w * 1.0)
        return gradient(w, torch.exp(Failing.apply(torch.exp(x))).sum())

    with lms() as session:
        for _ in range(3):
            for action in (forward, backward):
                with pytest.raises(Stop):
                    action()
                assert live(session) == 0
                assert not tier.slots
                assert torch.equal(gradient(w, chain(w)), plain_gradient())
        assert session.stats()["passes"] > 0
        assert session.timeline is not None


# Ends of handles at odd times


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self, graph: Tensor) -> None:
        self.graph, self.itself = graph, self


def test_the_collector_may_find_a_graph_in_the_middle_of_a_hook(lms: Make, live: Live, tier: object) -> None:
    w = leaf()
    with lms() as session:
        gc.disable()
        try:
            tier.during = gc.collect
            for _ in range(3):
                Cycle(chain(w))
                assert torch.equal(gradient(w, chain(w)), plain_gradient())
        finally:
            tier.during = lambda: None
            gc.enable()
        assert live(session) == 0
        assert not tier.slots


def test_a_graph_may_be_dropped_under_inference_mode(lms: Make, live: Live) -> None:
    w = leaf()
    with lms() as session:
        loss = chain(w)
        with torch.inference_mode():
            del loss
        assert live(session) == 0
        assert torch.equal(gradient(w, chain(w)), plain_gradient())


def test_other_threads_may_drop_graphs_while_this_one_trains(lms: Make, live: Live) -> None:
    w = leaf()
    graphs: list[Tensor] = []
    over = threading.Event()

    def drop() -> None:
        while not over.is_set() or graphs:
            try:
                graphs.pop()
            except IndexError:
                over.wait(1e-4)

    threads = [threading.Thread(target=drop) for _ in range(2)]
    with lms(budget=2 * N) as session:
        for thread in threads:
            thread.start()
        try:
            for _ in range(40):
                graphs.append(chain(w))
                assert torch.equal(gradient(w, chain(w)), plain_gradient())
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert live(session) == 0
    assert session.engine.usage()["file"] == 0


@pytest.mark.alone
def test_a_graph_that_is_never_dropped_does_not_make_later_steps_slower(lms: Make, tier: object) -> None:
    w = leaf()
    with lms(budget=10**6) as session:
        trunk = chain(w)  # keeps the pass open
        costs = []
        for _ in range(420):
            before = session._swapper.counters.hook
            gradient(w, chain(w))
            costs.append(session._swapper.counters.hook - before)
        early, late = min(costs[10:60]), min(costs[-50:])  # the least, which other load does not change
        assert late < 4 * early
        gradient(w, trunk)


def test_what_the_caller_keeps_until_the_backward_is_planned_for_as_kept(lms: Make) -> None:
    def step() -> Tensor:
        x = torch.randn(64, requires_grad=True)
        kept = x.exp()
        loss = (kept * 2).tanh().sigmoid().sum()
        loss.backward()
        return kept

    with lms(limit="20GB") as session:
        step()
        trace = session.trace
    assert trace is not None
    turn = next(at for at, access in enumerate(trace.accesses) if access.kind == "read")
    assert [record.let_go for record in trace.tensors] == [turn, None, None]


def test_nothing_is_planned_while_the_lock_is_held(lms: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    make_plan = plan_maker.make_plan

    def watched(*args: object, **options: object) -> object:
        held.append(session._swapper.lock.locked())
        return make_plan(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(plan_maker, "make_plan", watched)
    w = leaf()
    with lms(budget=0) as session:
        for length in (3, 5, 3, 5, 4):  # passes that begin alike
            gradient(w, chain(w, length))
        assert session.plan is not None
    assert len(held) > 2
    assert not any(held)


def test_a_pass_in_which_a_copy_failed_goes_on_without_its_plan(
    lms: Make, models: ModuleType, bits: Callable[[Tensor], object]
) -> None:
    """The recording has ended with the error, so no plan's positions hold any more."""
    torch.manual_seed(3)
    model = models.mlp(64)
    x = torch.randn(32, 8)
    plain = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    with lms(model, budget=3000) as session:
        for _ in range(3):
            model(x).sum().backward()
        assert session.plan is not None
        assert session.plan.moves
        loss = model(x).sum()
        reload = session.engine.reload
        failures = iter([SpillError("no memory, once")])

        def failing_once(slot: object) -> object:
            for failure in failures:
                raise failure
            return reload(slot)

        session.engine.reload = failing_once  # type: ignore[method-assign]
        with pytest.raises(SpillError, match="once"):
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        for _ in range(2):
            again = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            assert [bits(mine) for mine in again] == [bits(theirs) for theirs in plain]
