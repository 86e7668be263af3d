"""State that leaves while the next forward begins and is back when the backward ends: on streams of paper.

The device of these tests counts the storages of tensors that Python knows: parameters, gradients, state, what is saved.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lms.core.stepper import Stepper
from lms.memory.device import Device, Peak
from lms.torch import optimizer_state
from lms.torch import session as session_module
from lms.torch.optimizer_state import Away, StatePager
from lms.torch.session import Session

WIDTH, DEPTH, BATCH = 64, 8, 600
WEIGHTS = DEPTH * WIDTH * WIDTH * 4  # bytes of all parameters
STATE = 2 * WEIGHTS
SAVED = DEPTH * BATCH * WIDTH * 4  # what the activations functions save; the linear ones save the same


class Counted(Device):
    """As much as the tensors that there are."""

    name = "counted"

    def __init__(self) -> None:
        self.most = self.now = 0

    def capacity(self) -> int:
        return 1 << 30

    def current(self) -> int:
        storages = {}
        for one in gc.get_objects():
            if type(one) in (Tensor, nn.Parameter):
                found = [one, one.grad] if type(one) is nn.Parameter else [one]
                for tensor in found:
                    if tensor is not None:
                        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        self.most = max(self.most, total := sum(storages.values()))
        return total

    def peak(self) -> Peak:
        self.now = max(self.now, self.current())
        return Peak(self.now, self.now)

    def reset_peak(self) -> None:
        self.now = self.current()

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed(self, marks: Sequence[Any]) -> list[float]:
        return [after - before for before, after in pairwise(marks)]

    def prepare(self, limit: int | None) -> None:
        return None

    def release(self) -> None:
        return None


@pytest.fixture
def device(paper: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    class Streams(paper.PaperStreams):  # type: ignore[name-defined, misc]
        """A copy takes place at once and is over only when the host asks for the third time: a GPU is behind."""

        def copy(self, stream: Any, destination: Tensor, source: Tensor) -> None:
            destination.copy_(source)

        def empty(self, nbytes: int) -> Tensor:
            return torch.empty(nbytes, dtype=torch.uint8)

        def done(self, event: Any) -> bool:
            event.asked = getattr(event, "asked", 0) + 1
            if event.asked > 2:
                self.synchronize(event)
            return bool(super().done(event))

    engine = paper.engine_on(Streams())
    monkeypatch.setattr(session_module, "make_engine", lambda *_args, **_options: engine)
    counted = Counted()
    monkeypatch.setattr(session_module, "device_for", lambda _: counted)
    monkeypatch.setattr(optimizer_state, "CHUNK", 2 * WIDTH * WIDTH * 4)  # a layer's
    monkeypatch.setattr("lms.torch.state.CHUNK", 2 * WIDTH * WIDTH * 4)
    yield counted
    engine.close()


def train(
    session: Session | None = None,
    *,
    steps: int = 8,
    passes: int = 1,
    batch: int = BATCH,
    between: Callable[[Optimizer, int], None] = lambda *_: None,
) -> tuple[list[Any], list[int]]:
    """The losses and parameters of a training, and how many bytes of guests there were before and after each step."""
    torch.manual_seed(1)
    layers = [one for _ in range(DEPTH) for one in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses: list[float] = []
    guests: list[int] = []
    with session or torch.enable_grad():
        for step in range(steps):
            optimizer.zero_grad()
            for one in range(passes):
                rows = batch // 2 if batch == BATCH - 8 and step == steps - 1 else batch
                x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(passes * step + one))
                loss = model(x).square().mean()
                loss.backward()
                losses.append(float(loss.detach()))
                del x, loss
                guests.append(session._planner.guests.nbytes if session is not None else 0)
            optimizer.step()
            guests.append(session._planner.guests.nbytes if session is not None else 0)
            between(optimizer, step)
    state = [one[key] for one in optimizer.state.values() for key in one]
    # No tensors, which the device would count.
    return [losses, *(one.detach().numpy().tobytes() for one in (*model.parameters(), *state))], guests


def session_of(limit: int) -> Session:
    return Session(limit=limit, min_size=1024, device="cpu", swap="activations,optimizer")


LIMIT = SAVED - WEIGHTS  # too little for state beside all that is saved, and enough beside a step


@pytest.mark.parametrize("limit", [LIMIT, LIMIT - SAVED // 8, LIMIT - SAVED // 4])
def test_state_leaves_in_the_next_forward_and_is_back_before_its_step(device: Counted, limit: int) -> None:
    plain, _ = train()
    session = session_of(limit)
    ours, guests = train(session)
    assert ours == plain
    assert guests[:2] == [0, 0], "nothing is known of the first step"
    assert set(guests[4:]) == {STATE}
    stats = session.stats()
    assert stats["state_held"] == 0
    assert stats["swapped_out"] > 0, "the pass needs the memory, too"
    assert device.most <= limit
    assert not session.over_limit


def test_a_step_waits_for_no_copy_that_can_be_over_before(device: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    come = Away.come
    monkeypatch.setattr(Away, "come", lambda self: (started.append(self.nbytes), come(self))[1])
    in_steps: list[int] = []

    def before(*_: object) -> None:
        in_steps.append(len(started))

    def after(*_: object) -> None:
        in_steps.append(len(started))

    hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        train(session_of(LIMIT - SAVED // 4))
    finally:
        for hook in hooks:
            hook.remove()
    assert in_steps[-2] == in_steps[-1], "all of it came during the backward"
    assert in_steps[-1] - in_steps[-3] == 2 * DEPTH


@pytest.mark.parametrize("share", [4, 2])
def test_the_limit_holds_while_more_state_steps_than_fits(
    device: Counted, monkeypatch: pytest.MonkeyPatch, share: int
) -> None:
    trim, seen = StatePager._trim, []

    def spy(self: StatePager, *args: Any) -> Any:
        seen.append(device.current())
        return trim(self, *args)

    monkeypatch.setattr(StatePager, "_trim", spy)
    limit = 2 * WEIGHTS + STATE // share + 2 * DEPTH * 64 * WIDTH * 4
    plain, _ = train(batch=64)
    session = session_of(limit)
    ours, guests = train(session, batch=64)
    assert ours == plain
    assert 0 < max(guests) < STATE
    assert max(seen) <= limit
    assert device.most <= limit


def test_of_several_passes_a_step_only_the_last_has_state_come(device: Counted) -> None:
    plain, _ = train(passes=2)
    ours, guests = train(session_of(LIMIT + WEIGHTS), passes=2)
    assert ours == plain
    assert guests[-3] == 0
    assert guests[-2] == STATE


def test_a_pass_without_a_plan_has_no_guests(device: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    by_rule = Stepper._by_rule

    def spy(self: Stepper[Any], *args: Any, **keywords: Any) -> None:
        by_rule(self, *args, **keywords)
        seen.append(self.guests.nbytes)

    monkeypatch.setattr(Stepper, "_by_rule", spy)
    plain, _ = train(batch=BATCH - 8)
    ours, guests = train(session_of(LIMIT), batch=BATCH - 8)  # the last batch is a short one
    assert ours == plain
    assert guests[-4] == guests[-3] == STATE
    assert guests[-2] == 0
    assert seen
    assert not any(seen)


def test_state_that_is_read_while_it_leaves_has_not_left(device: Counted) -> None:
    def read(optimizer: Optimizer, step: int) -> None:
        if step == 5:
            before = session._state.pager.tier.back
            optimizer.state_dict()
            assert session._planner.guests.nbytes == 0
            assert session._state.pager.tier.back == before

    plain, _ = train()
    session = session_of(LIMIT)
    ours, guests = train(session, between=read)
    assert ours == plain
    assert guests[-1] == STATE


def test_a_pause_has_no_guests(device: Counted) -> None:
    def pause(_: Optimizer, step: int) -> None:
        if step >= 4:
            assert session._planner.guests.nbytes
            with session.pause():
                assert not session._planner.guests.nbytes

    session = session_of(LIMIT)
    train(session, between=pause)


def test_a_device_that_is_full_has_state_come_with_its_step(device: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = train()

    def full(_: Away) -> None:
        if not session._swapper.between_passes:
            raise torch.OutOfMemoryError("CUDA out of memory")
        come(_)

    come = Away.come
    monkeypatch.setattr(Away, "come", full)
    session = session_of(LIMIT)
    ours, guests = train(session)
    assert ours == plain
    assert guests[-2] == 0
    assert guests[-1] == STATE


def test_without_a_limit_nothing_lingers(device: Counted) -> None:
    plain, _ = train()
    session = Session(budget=0, min_size=1024, device="cpu", swap="activations,optimizer")
    ours, guests = train(session)
    assert ours == plain
    assert not any(guests)
