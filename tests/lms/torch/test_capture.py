"""CUDA graph capture, on streams of paper: what is captured stays where it is, and no event is asked for meanwhile."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lms.errors import LMSError
from lms.torch import session as session_module
from lms.torch.session import Session

Make = Callable[..., Session]
N = 144  # bytes of each saved tensor
CAPTURED = "a CUDA graph is captured"


@pytest.fixture
def streams(paper: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """The streams under the CUDA engine of the next session."""
    streams = paper.PromptStreams(blocks=64)
    engine = paper.engine_on(streams)
    monkeypatch.setattr(session_module, "make_engine", lambda *_args, **_options: engine)
    yield streams
    engine.close()


W = torch.arange(36.0).view(6, 6).div(36).requires_grad_()


def forward() -> Tensor:
    return torch.exp(torch.exp(torch.exp(W * -0.5) * -0.5) * -0.5).sum()


def gradient(loss: Tensor) -> Tensor:
    return torch.autograd.grad(loss, W)[0]


def test_optimizer_state_moves_through_pinned_memory_and_no_step_is_captured(streams: object) -> None:
    def train(session: Session | None) -> list[Tensor]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        with session or torch.enable_grad():
            for _ in range(4):
                optimizer.zero_grad()
                net(torch.ones(2, 6)).square().sum().backward()
                optimizer.step()
            if session is not None:
                stats = session.stats()
                assert stats["state_held"] == 0
                assert stats["state_in"] == 3 * stats["state"] > 0  # type: ignore[operator]
                assert stats["host_peak"] > 0
                with streams.capture(), pytest.raises(LMSError, match="close the session, step once"):
                    optimizer.step()
        return [*net.parameters(), *(one["exp_avg"] for one in optimizer.state.values())]

    ours = train(Session(budget=0, min_size=0, swap="optimizer"))
    assert all(torch.equal(one, other) for one, other in zip(ours, train(None), strict=True))


def test_what_is_captured_stays_and_is_told_of_once(streams: object, lms: Make) -> None:
    theirs = gradient(forward())
    with lms() as session, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(gradient(forward()), theirs)  # the warm-up
        moved = session.stats()["swapped_out"]
        assert moved == 3 * N
        for _ in range(2):
            with streams.capture():
                assert torch.equal(gradient(forward()), theirs)
        stats = session.stats()
        assert stats["swapped_out"] == moved
        assert stats["kept_capture"] == 2 * 3 * N
        assert torch.equal(gradient(forward()), theirs)
        assert session.stats()["swapped_out"] > moved, "what is not captured moves as before"
    assert len([w for w in caught if CAPTURED in str(w.message)]) == 1


def test_a_graph_that_ends_during_a_capture_is_dealt_with_after_it(
    streams: object, lms: Make, live: Callable[[Session], int]
) -> None:
    with lms() as session:
        loss = forward()
        assert live(session) > 0
        with streams.capture():
            del loss
        gradient(forward())
        assert live(session) == 0


def test_what_was_saved_before_a_capture_cannot_be_used_inside_it(streams: object, lms: Make) -> None:
    with lms():
        loss = forward()
        with pytest.raises(LMSError, match="capture the forward together with its backward"):  # noqa: SIM117
            with streams.capture():
                gradient(loss)
