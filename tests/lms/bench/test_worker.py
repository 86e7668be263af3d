"""One cell's process: what a step reports, and how it answers."""

from __future__ import annotations

import io
import json
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import worker
from models import Job, build
from torch import nn
from worker import Memory, digest

from lms.runtime import plan_maker

CPU = torch.device("cpu")
MB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """As the process of a cell is told to compute here."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


def tiny() -> Job:
    """One weight of 2, whose gradient is 3."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    return Job(model, lambda: model(torch.full((1, 1), 3.0)).sum(), ())


def pages(size: int) -> mmap.mmap:
    """Memory from the kernel itself, touched: an allocator may hand out again what the process holds already."""
    block = mmap.mmap(-1, size)
    block.write(bytes(size))
    return block


def test_the_peak_is_the_most_since_the_reset() -> None:
    memory = Memory(CPU)
    memory.reset()
    before = memory.peak()
    pages(64 * MB).close()
    assert memory.peak() - before >= 60 * MB
    memory.reset()
    assert memory.peak() - before < 30 * MB


def test_a_peak_that_was_noticed_outlives_somebody_elses_reset_and_not_its_own() -> None:
    memory = Memory(CPU)
    memory.reset()
    before = memory.peak()
    block = pages(64 * MB)
    memory.notice()
    block.close()
    Memory(CPU).reset()
    assert memory.peak() - before >= 60 * MB
    memory.reset()
    assert memory.peak() - before < 30 * MB


def test_on_a_gpu_memory_is_what_its_allocator_gave_out(monkeypatch: pytest.MonkeyPatch) -> None:
    most = [700, 500]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: most[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: most.pop(0))
    memory = Memory(torch.device("cuda"))
    assert memory.peak() == 700
    assert memory.name.startswith("allocated bytes")
    memory.reset()
    assert memory.peak() == 500


def test_a_digest_tells_one_bit_of_one_gradient_and_whose_it_is() -> None:
    def of(**gradients: list[float]) -> str:
        model = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in ("a", "b")})
        for name, values in gradients.items():
            model[name].grad = torch.tensor(values)
        return digest(model)

    same = of(a=[0.0, 1.0])
    assert of(a=[0.0, 1.0]) == same
    others = {of(a=[-0.0, 1.0]), of(a=[0.0, 1.0 + 2**-23]), of(b=[0.0, 1.0]), of(), of(a=[0.0, 1.0], b=[0.0, 0.0])}
    assert len(others | {same}) == 6


def test_a_step_trains_and_reports_its_loss_to_the_last_bit() -> None:
    job = tiny()
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.5)
    first, second = (worker.step(job, optimizer, Memory(CPU)) for _ in range(2))
    assert float.fromhex(first["loss"]) == 6.0
    assert float.fromhex(second["loss"]) == 1.5, "the weight is 2 - 0.5 x 3"
    assert first["digest"] == second["digest"] == digest(job.model), "of one step, not of a sum"
    assert first["seconds"] > 0
    assert first["cpu"] > 0
    assert first["peak"] > 10 * MB
    assert min(first["minor_faults"], first["major_faults"]) >= 0


@pytest.fixture(scope="module")
def plain() -> list[dict[str, object]]:
    """Two steps of the GPT, with neither process nor commands."""
    job = build("gpt", "quick", CPU)
    optimizer = torch.optim.SGD(job.model.parameters(), lr=1e-4, momentum=0.9)
    return [worker.step(job, optimizer, Memory(CPU)) for _ in range(2)]


@pytest.mark.parametrize("kind", ["plain", "checkpoint", "lms"])
def test_each_command_is_answered_with_a_line_and_no_kind_changes_a_bit(
    kind: str,
    plain: list[dict[str, object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = {"model": "gpt", "size": "quick", "kind": kind, "device": "cpu", "threads": 1}
    config |= {"budget": 0, "spill_dir": str(tmp_path)} if kind == "lms" else {}
    commands = ["step", "step", "end", "step"]
    monkeypatch.setattr(plan_maker, "CALIBRATION", 1 << 16)  # nobody writes 256 MB to learn how fast the disk is
    monkeypatch.setattr(sys, "argv", ["worker.py", json.dumps(config)])
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps({"do": do}) + "\n" for do in commands)))
    monkeypatch.setattr(worker, "build", lambda *args: os.write(1, b"what others print") and build(*args))
    worker.main()
    answers, others = capfd.readouterr()
    opening, *steps, end = map(json.loads, answers.splitlines())
    assert (opening, end) == ({"memory": "resident set (VmHWM)"}, {"end": True})
    assert "what others print" in others
    assert [(step["loss"], step["digest"]) for step in steps] == [(step["loss"], step["digest"]) for step in plain]
    assert ("session" in steps[0]) is (kind == "lms")
    if kind == "lms":
        assert steps[0]["session"]["swapped_out"] > 0
        assert (steps[0]["forecast"], steps[1]["forecast"]["out"] > 0) == ({}, True), "the second step has a plan"
