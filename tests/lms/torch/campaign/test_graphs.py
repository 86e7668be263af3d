"""Random small autograd graphs under random limits: values, gradients and errors are those of plain autograd.

LMS_FUZZ_SEED repeats one graph: `LMS_FUZZ_SEED=17 pytest tests/lms/torch/campaign/test_graphs.py -m "" -s`.
"""

from __future__ import annotations

import copy
import gc
import random
import warnings
from collections.abc import Callable, Iterable

import pytest
from torch import Tensor

from graph_runs import check, seeds_of
from lms.runtime import planner
from lms.runtime.progress import Progress
from lms.runtime.recorder import Finished
from lms.torch import native_hooks
from lms.torch.passes import Pass
from lms.torch.session import Session
from random_graphs import SIDE, Program, passes, quietly

BATCH = 100  # graphs a test


def compare(seeds: Iterable[int], bits: Callable[[Tensor], object]) -> None:
    gc.collect()
    gc.freeze()  # what was imported by now is no garbage, and is not to be looked at for each graph
    with quietly():
        for seed in seeds_of(seeds):
            check(seed, bits)


def test_random_graphs_compute_and_fail_as_they_do_without_lms(bits: Callable[[Tensor], object]) -> None:
    compare(range(BATCH), bits)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(1000, 2000, BATCH))
def test_a_thousand_random_graphs_do(first: int, bits: Callable[[Tensor], object]) -> None:
    compare(range(first, first + BATCH), bits)


GRAPHS = 60  # with the hooks in C++ and without


def watched(seed: int, bits: Callable[[Tensor], object]) -> tuple[object, ...]:
    """All that a session with room for everything does and finds out about one graph."""
    rng = random.Random(-1 - seed)
    turn = rng.randrange(12) if rng.random() < 0.5 else None
    recorded: list[object] = []
    with Session(budget=10**6, min_size=rng.choice((0, 1, 100, SIDE * SIDE * 4))) as session:
        note = session._planner.note

        def noted(finished: Finished) -> None:
            recorder = finished.recorder
            facts = recorder.nbytes, recorder.freed, recorder.pinned, recorder.foreseen, recorder.let_go
            moments = len(recorder.marks), recorder.held, finished.held_peak, finished.guide is not None
            recorded.append(copy.deepcopy((recorder.kinds, recorder.order, recorder.labels, facts, moments)))
            note(finished)

        session._planner.note = noted  # type: ignore[method-assign]
        results = passes(Program(seed, bits), turn)
        stats = session.stats()
    guides = [(guide.keys, guide.pinned, guide.passes, guide.plan.cap) for guide in session._planner.guides]
    figures = {name: value for name, value in stats.items() if not isinstance(value, float) and name not in OF_PROCESS}
    return results, recorded, figures, guides, session._swapper.live


OF_PROCESS = ("peak", "floor", "predicted_peak")  # figures of the whole process


def test_the_hooks_in_cpp_record_random_graphs_as_those_in_python_do(
    bits: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    if native_hooks.find() is None:
        pytest.skip("the hooks are not compiled: `python -m lms.build torch` says what is missing")
    monkeypatch.setattr(Program, "collects", False)  # when it finds what is up to the collector
    monkeypatch.setattr(planner, "REFINED_AFTER", (-1,))  # a plan is final at once, so that C++ leads the next pass
    monkeypatch.setattr(Progress, "early", property(lambda _: False))
    led: list[bool] = []
    take_over = Pass.take_over

    def noting(run: Pass, facts: native_hooks.Led) -> object:
        records = take_over(run, facts)
        led.append(bool(records))
        return records

    monkeypatch.setattr(Pass, "take_over", noting)
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for seed in range(10_000, 10_000 + GRAPHS):
                ours = watched(seed, bits)
                with monkeypatch.context() as without:
                    without.setattr(native_hooks, "find", lambda: None)
                    theirs = watched(seed, bits)
                for our, their in zip(ours, theirs, strict=True):
                    assert our == their, f"seed {seed}"
    finally:
        gc.enable()
    assert led.count(False) > GRAPHS // 2, "C++ led few passes"
    assert led.count(True) > GRAPHS // 10, "Python took few passes over"
