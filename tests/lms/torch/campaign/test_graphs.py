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
from lms.core.schedule import Swap
from lms.runtime import planner
from lms.runtime.progress import Progress
from lms.runtime.recorder import Finished, Recorder
from lms.torch import native_hooks, swapper
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
ROOM = 10**6  # bytes: nothing has to move
LITTLE = 2 * SIDE * SIDE * 4  # two tensors

# The plans that a pass could follow, and the copies that it made.
Moved = tuple[list[tuple[Swap, ...]], list[tuple[str, int]]]


def watched(seed: int, bits: Callable[[Tensor], object], budget: int) -> tuple[tuple[object, ...], list[Moved]]:
    """All that a session does and finds out about one graph, and what it has moved in each pass."""
    rng = random.Random(-1 - seed)
    turn = rng.randrange(12) if rng.random() < 0.5 else None
    recorded: list[object] = []
    moved: list[Moved] = []
    with Session(budget=budget, min_size=rng.choice((0, 1, 100, SIDE * SIDE * 4))) as session:
        note = session._planner.note

        def noted(finished: Finished) -> None:
            recorder = finished.recorder
            facts = recorder.nbytes, recorder.freed, recorder.pinned, recorder.foreseen
            moments = len(recorder.marks), len(recorder.held), finished.guide is not None
            held = (recorder.held, finished.held_peak) if budget == ROOM else ()  # else copies count for longer in C++
            recorded.append(copy.deepcopy((recorder.kinds, recorder.order, recorder.labels, facts, moments, held)))
            plans = [guide.plan.moves for guide in session._planner.guides]
            copies = [(direction, index) for direction, index, _ in recorder.copies]
            moved.append((plans, copies))
            note(finished)

        session._planner.note = noted  # type: ignore[method-assign]
        results = passes(Program(seed, bits), turn)
        stats = session.stats()
    guides = [
        (guide.keys, guide.pinned, guide.passes, guide.plan.cap if budget == ROOM else ())
        for guide in session._planner.guides
    ]
    figures = {name: value for name, value in stats.items() if not isinstance(value, float) and name not in OF_PROCESS}
    return (results, recorded, figures if budget == ROOM else {}, guides, session._swapper.live), moved


OF_PROCESS = ("peak", "floor", "predicted_peak")  # figures of the whole process


@pytest.mark.parametrize("budget", [ROOM, LITTLE], ids=["with room for everything", "if tensors move"])
def test_the_hooks_in_cpp_record_random_graphs_as_those_in_python_do(
    budget: int, bits: Callable[[Tensor], object], tier: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native_hooks.find() is None:
        pytest.skip("the hooks are not compiled: `python -m lms.build torch` says what is missing")
    # Plans and copies do not depend on time.
    monkeypatch.setattr(Recorder, "gaps", lambda recorder: [1e-3] * (len(recorder.order) + 1))
    monkeypatch.setattr(Program, "collects", False)  # when it finds what is up to the collector
    monkeypatch.setattr(planner, "REFINED_AFTER", (-1,))  # a plan is final at once, so that C++ leads the next pass
    monkeypatch.setattr(Progress, "early", property(lambda _: False))
    compared = 0  # passes in which something moved
    led: list[bool] = []
    take_over = Pass.take_over

    def noting(run: Pass, facts: native_hooks.Led) -> object:
        moved = run.guide is not None and bool(run.guide.plan.moves)
        records = take_over(run, facts)
        if moved or budget == ROOM:
            led.append(bool(records))
        return records

    monkeypatch.setattr(Pass, "take_over", noting)
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for seed in range(10_000, 10_000 + GRAPHS):
                ours, our_moves = watched(seed, bits, budget)
                with monkeypatch.context() as without:
                    without.setattr(swapper, "native_hooks", lambda *_: native_hooks.NativeHooks())
                    theirs, their_moves = watched(seed, bits, budget)
                for our, their in zip(ours, theirs, strict=True):
                    assert our == their, f"seed {seed}"
                for mine, other in zip(our_moves, their_moves, strict=True):
                    if mine[0] != other[0]:
                        break  # C++ does not note when the forward lets go of what has left: another plan came of it
                    assert mine == other, f"seed {seed}"
                    compared += bool(mine[1])
    finally:
        gc.enable()
    assert (compared > GRAPHS) is (budget != ROOM)
    assert led.count(False) > GRAPHS // 3, "C++ led few passes"
    assert led.count(True) > GRAPHS // 10, "Python took few passes over"
