from __future__ import annotations

import mmap
import threading

import memory
import pytest
import torch
from memory import Memory

CPU = torch.device("cpu")
MB = 1 << 20


def mapped(size: int) -> mmap.mmap:
    """Memory that is new to this process: what an allocator gives it may hold already."""
    block = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(0, size, mmap.PAGESIZE):
        block[page] = 1
    return block


def test_the_peak_is_the_most_since_the_reset_and_the_current_what_is_held_now() -> None:
    subject = Memory(CPU)
    subject.reset()
    before = subject.current()
    block = mapped(64 * MB)
    assert subject.current() - before >= 60 * MB
    del block
    assert subject.current() - before < 30 * MB
    assert subject.peak() - before >= 60 * MB
    subject.reset()
    assert subject.peak() - before < 30 * MB
    assert subject.resets


def test_the_most_that_was_mapped_is_kept() -> None:
    subject = Memory(CPU)
    subject.current()
    before = subject.mapped_peak
    block = mapped(64 * MB)
    subject.current()
    del block
    subject.current()
    assert subject.mapped_peak - before >= 60 * MB


def test_a_kernel_that_refuses_a_reset_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, mode: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    subject = Memory(CPU)
    monkeypatch.setattr(memory, "open", refuse, raising=False)
    subject.reset()
    assert not subject.resets


def test_on_a_gpu_memory_is_what_its_allocator_gave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: asked.append(device) or 300)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: asked.append(device) or 700)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: asked.append(device))
    monkeypatch.setattr(memory, "open", lambda path, *_: pytest.fail(f"{path} is the process's"), raising=False)
    subject = Memory(device)
    assert (subject.current(), subject.peak()) == (300, 700)
    subject.reset()
    assert asked == [device] * 3
    assert subject.mapped_peak == 0


def test_samples_are_taken_at_both_ends_and_in_between_in_order() -> None:
    enough, calls = threading.Event(), []

    def in_use() -> int:
        calls.append(1)
        if len(calls) == 3:
            enough.set()
        return len(calls)

    with Memory(CPU).sampled(in_use, interval=1e-4) as samples:
        assert len(samples) >= 1
        assert enough.wait(60)
    assert [nbytes for _, nbytes in samples] == list(range(1, len(samples) + 1))
    assert len(samples) >= 4, "the first, two in between, the last"
    times = [seconds for seconds, _ in samples]
    assert times == sorted(times)


def test_all_that_is_held_is_in_use_where_nobody_knows_better() -> None:
    subject = Memory(CPU)
    with subject.sampled(interval=3600) as samples:
        block = mapped(64 * MB)
    (_, before), (_, after) = samples
    assert after - before >= 60 * MB
    assert subject.mapped_peak >= 60 * MB
    del block


def test_sampling_ends_with_an_error_in_its_block() -> None:
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError), Memory(CPU).sampled(interval=3600) as samples:
        raise ZeroDivisionError
    assert threading.active_count() == before
    assert len(samples) == 2
