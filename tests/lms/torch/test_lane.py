"""The lane in C++ and the hooks in Python: the same bits, the same errors and the same figures."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lms.torch import lane
from lms.torch.session import Session

Make = Callable[..., Session]
STEPS = 40
FIGURES = (
    *("passes", "saved", "recorded", "held_peak", "largest", "swapped_out", "misses", "replans"),
    *("kept_parameters", "kept_small", "kept_owned", "kept_types"),
)


@pytest.fixture(autouse=True)
def _compiled() -> None:
    if lane.find() is None:
        pytest.skip("the lane is not compiled: `python -m lms.build torch` says what is missing")


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


def train(make: Make, step: Callable[[Tensor, int], list[Tensor]]) -> tuple[list[list[Tensor]], dict[str, object], int]:
    KEPT.clear()
    w = torch.arange(36.0).view(6, 6).div(36).requires_grad_()
    led = 0
    with make(budget=10**6) as session:
        results = []
        taken = session._swapper.lane.take if hasattr(session._swapper.lane, "take") else None
        for index in range(STEPS):
            results.append(step(w, index))
        stats = session.stats()
        led = int(taken is not None)
        gc.collect()
        assert session._swapper.live == 0
        trace = session.trace
        assert trace is not None
        keys = [(access.kind, access.tensor) for access in trace.accesses]
    return results, {name: stats[name] for name in FIGURES} | {"keys": keys}, led


@pytest.mark.parametrize("step", [usual, another_way, shorter, twice, changed, keeps])
def test_the_lane_does_what_python_does(
    step: Callable[[Tensor, int], list[Tensor]],
    lms: Make,
    monkeypatch: pytest.MonkeyPatch,
    bits: Callable[[Tensor], object],
) -> None:
    ours, figures, led = train(lms, step)
    monkeypatch.setattr(lane, "find", lambda: None)
    theirs, expected, without = train(lms, step)
    assert (led, without) == (1, 0)
    assert [[bits(t) for t in row] for row in ours] == [[bits(t) for t in row] for row in theirs]
    assert figures == expected


def test_a_known_pass_that_moves_nothing_is_led_by_the_lane_and_leaves_nothing(lms: Make) -> None:
    w = torch.ones(6, 6, requires_grad=True)
    with lms(budget=10**6) as session:
        for index in range(8):
            usual(w, index)
        x = torch.exp(w * 1.0)
        storage = weakref.ref(x.untyped_storage())
        y = x * x.t()
        assert session._swapper.lane.leading
        assert session._swapper.live > 0
        del x, y
        assert storage() is None
        assert session._swapper.live == 0
