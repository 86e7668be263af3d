"""One contestant of the bookkeeping benchmark: what it saves, and that LMS has the work that is measured."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import saver
import torch
from crew import Worker

from lms import Session


@pytest.mark.parametrize(("name", "parameters"), [("saves", 0), ("stays", 500)])
def test_each_operation_counts(name: str, parameters: int) -> None:
    model, x = saver.MODELS[name](1000)
    assert sum(1 for _ in model.parameters()) == parameters
    assert abs(saver.count(model, x) - 1000) <= 1
    assert x.grad is None


def test_all_that_the_first_model_saves_could_move_and_nothing_of_the_second() -> None:
    for name, models_own in (("saves", False), ("stays", True)):
        model, x = saver.MODELS[name](40)
        with saver.managed(model) as session:
            assert isinstance(session, Session)
            saver.step(model, x)
            stats = session.stats()
        assert stats["swapped_out"] == 0
        assert bool(stats["recorded"]) is not models_own
        assert (stats["recorded"] or 0) >= (0 if models_own else 39 * saver.MIN_SIZE)
        assert bool(stats["kept_parameters"]) is models_own
        assert bool(stats["kept_small"]) is models_own


def test_nothing_is_saved_any_more_when_a_step_ends() -> None:
    model, x = saver.saves(8)
    gc.collect()
    ends: list[int] = []

    class Packed:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def __del__(self) -> None:
            ends.append(1)

    with torch.autograd.graph.saved_tensors_hooks(Packed, lambda packed: packed.tensor):
        saver.step(model, x)
    assert len(ends) == saver.count(model, x)


def test_a_tenth_of_what_moves_saves_has_to_leave() -> None:
    model, x = saver.MODELS["moves"](100)
    with saver.managed(model, int(saver.SHARE * 100 * saver.MIN_SIZE)) as session:
        assert isinstance(session, Session)
        for _ in range(3):
            saver.step(model, x)
        assert session.stats()["last_out"] >= 9 * saver.MIN_SIZE


@pytest.mark.parametrize("model", ["saves", "moves"])
@pytest.mark.parametrize("kind", ["plain", "identity", "lms"])
def test_the_process_says_what_is_saved_and_answers_with_both_halves(kind: str, model: str) -> None:
    worker = Worker({"kind": kind, "model": model, "operations": 20}, program=Path(saver.__file__))
    try:
        assert worker.opening == {"saved": 20}
        for _ in range(2):
            answer = worker.ask()
            assert set(answer) == {"forward", "backward"}
            assert all(isinstance(seconds, float) and 0 < seconds < 10 for seconds in answer.values())
    finally:
        worker.close()
