"""Passes in which more than one stream computes, on streams of paper."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lms.torch import session as session_module
from lms.torch.session import Session

Make = Callable[..., Session]
Side = Callable[[], AbstractContextManager[None]]
N = 144  # bytes of each saved tensor
AWAY = "another CUDA stream"


@pytest.fixture
def streams(paper: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """The streams under the CUDA engine of the next session."""
    streams = paper.PromptStreams(blocks=64)
    engine = paper.engine_on(streams)
    monkeypatch.setattr(session_module, "make_engine", lambda *_args, **_options: engine)
    yield streams
    engine.close()


def gradient(side: Side, *, first: Side = nullcontext) -> Tensor:
    """Of a net that saves six tensors: one to begin with, then two and two more, with one from the side between."""
    w = torch.arange(36.0).view(6, 6).div(36).requires_grad_()
    with first():
        x = torch.exp(w * -0.5)
    x = torch.exp(torch.exp(x * -0.5) * -0.5)
    with side():
        y = torch.tanh(x * 2.0)
    loss = torch.exp(torch.exp(x + y) * -0.5).sum()
    del x, y  # what somebody else keeps is not worth swapping
    return torch.autograd.grad(loss, w)[0]


def quietly(compute: Callable[[], Tensor]) -> tuple[Tensor, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = compute()
    return result, [str(warning.message) for warning in caught if AWAY in str(warning.message)]


def test_what_is_saved_on_one_stream_is_swapped_without_a_warning(streams: object, lms: Make) -> None:
    with lms() as session:
        ours, told = quietly(lambda: gradient(nullcontext))
    assert torch.equal(ours, gradient(nullcontext))
    assert session.stats()["swapped_out"] == 6 * N
    assert told == []


def test_what_is_saved_on_another_stream_stays_and_is_told_of_once(streams: object, lms: Make) -> None:
    theirs = gradient(nullcontext)
    with lms() as session:
        told = []
        for _ in range(4):
            ours, more = quietly(lambda: gradient(lambda: streams.on("side")))
            told += more
            assert torch.equal(ours, theirs)
        assert session.trace.saved == 5 * N
        assert session.stats()["swapped_out"] > 0
    assert len(told) == 1
    assert "stays on the device" in told[0]


def test_the_stream_on_which_a_pass_begins_is_the_one_that_counts(streams: object, lms: Make) -> None:
    with lms() as session:
        ours, told = quietly(lambda: gradient(nullcontext, first=lambda: streams.on("side")))
        assert session.trace.saved == N
        assert len(told) == 1
        with streams.on("side"):
            again, told = quietly(lambda: gradient(nullcontext))
        assert session.trace.saved == 6 * N, "each pass has a stream of its own"
        assert told == []
    assert torch.equal(ours, again)
    assert torch.equal(ours, gradient(nullcontext))


def test_no_copy_begins_on_behalf_of_another_stream(streams: object, lms: Make) -> None:
    with lms(budget=10 * N) as session:
        x = torch.ones(6, 6, requires_grad=True) * 1.0
        kept = torch.exp(x)
        before = session.stats()["swapped_out"]
        with streams.on("side"), pytest.warns(RuntimeWarning, match=AWAY):
            many = [torch.exp(x * k) for k in range(20)]
        assert session.stats()["swapped_out"] == before
        del kept, many


def test_a_change_in_place_of_what_another_stream_saved_is_an_error(streams: object, lms: Make) -> None:
    with lms():
        w = torch.ones(6, 6, requires_grad=True)
        x = torch.exp(w * 1.0)
        with streams.on("side"), pytest.warns(RuntimeWarning, match=AWAY):
            y = torch.exp(x * 1.0)
        loss = y.sum()
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_tensor_that_both_streams_save_is_right_on_both(streams: object, lms: Make) -> None:
    def run(side: Side) -> Tensor:
        w = torch.arange(36.0).view(6, 6).div(36).requires_grad_()
        x = torch.exp(w * 0.5)
        y = x * x
        with side():
            z = x * x.t()
        return torch.autograd.grad((y * z).sum() + torch.sin(x).sum(), w)[0]

    theirs = run(nullcontext)
    with lms():
        for _ in range(3):
            ours, _ = quietly(lambda: run(lambda: streams.on("side")))
            assert torch.equal(ours, theirs)
