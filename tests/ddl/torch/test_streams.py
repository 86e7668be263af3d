"""The order of calls and of a GPU's work, with streams that only note what they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from ddl import library
from ddl.torch.streams import Order, order_of
from ddl.torch.work import Reaper, Work

GPU = torch.device("cuda", 0)


class Stream:
    def __init__(self, number: int, asked: list[str]) -> None:
        self.cuda_stream = number
        self.asked = asked

    def record_event(self) -> str:
        self.asked.append(f"record {self.cuda_stream}")
        return f"event of {self.cuda_stream}"

    def wait_event(self, event: str) -> None:
        self.asked.append(f"{self.cuda_stream} waits for {event}")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of the streams, and of libddl; the current stream is 7, and 8 when the call was made."""
    asked: list[str] = []
    current = [Stream(7, asked), Stream(8, asked)]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        asked.append(f"on {stream.cuda_stream}")
        yield
        asked.append("off")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current.pop() if len(current) > 1 else current[0])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(library, "call", lambda name, stream: asked.append(f"{name} {stream}"))
    return asked


def test_a_call_is_made_behind_the_current_stream_and_no_other_call_is(asked: list[str]) -> None:
    def refused() -> None:
        with Order(GPU).told():
            asked.append("a call")
            raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        refused()
    assert asked == ["ddl_set_stream 8", "a call", "ddl_set_stream None"]


def test_who_waits_has_their_stream_wait_for_what_was_left_to_do(asked: list[str]) -> None:
    work = Work("it", [], [], lambda: asked.append("copy back"), Reaper("none", any_order=False), None, Order(GPU))
    assert work.wait()
    assert asked == ["on 8", "copy back", "off", "record 8", "7 waits for event of 8"]


def test_where_nothing_was_left_no_stream_waits(asked: list[str]) -> None:
    work = Work("it", [], [], None, Reaper("none", any_order=False), None, Order(GPU))
    assert work.wait()
    assert asked == []


def test_host_memory_needs_no_order(asked: list[str]) -> None:
    assert order_of([]) is None
    assert order_of([torch.zeros(3)]) is None
    assert order_of([SimpleNamespace(is_cuda=True, device=GPU)]).device == GPU  # type: ignore[list-item,union-attr]
