"""One random graph with LMS and without: results, errors, bytes held, and what is left behind."""

from __future__ import annotations

import gc
import os
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from lms.core.plan import Plan
from lms.errors import LimitError
from lms.memory.resident import ResidentSet
from lms.torch.session import Session
from lms.trace import Trace
from random_graphs import SIDE, Program, passes


class Saved:
    """What identity hooks keep: its end can be seen."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


def leaks_by_itself(seed: int, turn: int | None, bits: Callable[[Tensor], object]) -> bool:
    """Whether PyTorch never frees some of the graph, whoever holds what is saved: some errors and cycles do that."""
    alive: weakref.WeakSet[Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Saved:
        alive.add(saved := Saved(tensor))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        passes(Program(seed, bits), turn)
    gc.collect()
    return len(alive) > 0


def random_options(rng: random.Random) -> dict[str, object]:
    """A session's: any budget from none to all, or a limit close to what the process holds."""
    options: dict[str, object] = {
        "budget": rng.choice((0, 0, rng.randrange(1, 400), rng.randrange(400, 4000), 10**6)),
        "min_size": rng.choice((0, 1, 100, SIDE * SIDE * 4)),
        "prefetch": rng.choice((None, None, None, 0, 2)),
        "write_ahead": rng.choice((None, None, None, 0, 1)),
        "verify": rng.random() < 0.3,
    }
    if rng.random() < 0.15:
        del options["budget"]
        options["limit"] = ResidentSet().current() + rng.choice((-(1 << 20), 0, 1 << 14, 1 << 20))
    return options


class Meddler:
    """A script that does with its session what it may, at any time: asks, pauses, closes it and opens another."""

    def __init__(self, seed: int, options: dict[str, object]) -> None:
        self.rng = random.Random(seed)
        self.options = options
        self.sessions: list[Session] = []
        self.foretold = [0]  # most bytes held, by each plan

    def open(self) -> None:
        """Open a session."""
        session = Session(**self.options).open()  # type: ignore[arg-type]
        plan = session._planner._plan

        def told_of(trace: Trace) -> Plan | None:
            made = plan(trace)
            self.foretold.append(made.forecast.held_peak if made is not None else 0)
            return made

        session._planner._plan = told_of  # type: ignore[method-assign]
        self.sessions.append(session)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Around a step of the program."""
        session, roll = self.sessions[-1], self.rng.random()
        if roll < 0.03:
            session.stats()
        elif roll < 0.05:
            assert session.plan is None or session.trace is not None
        elif roll < 0.06:
            session.close()
            self.open()
        with session.pause() if 0.1 < roll < 0.13 else nullcontext():
            yield

    def close(self) -> None:
        """Close the last session."""
        self.sessions[-1].close()


def check(seed: int, bits: Callable[[Tensor], object], *, delays: AbstractContextManager[object] | None = None) -> None:
    """Compare one graph with plain. The seed decides everything but a limit, which begins at what the process holds."""
    rng = random.Random(-1 - seed)
    options = random_options(rng)
    turn = rng.randrange(12) if rng.random() < 0.4 else None
    meddler = Meddler(seed, options)
    plain = passes(Program(seed, bits), turn)
    with delays or nullcontext():
        meddler.open()
        try:
            around = meddler.around if rng.random() < 0.4 else nullcontext
            mine = passes(Program(seed, bits, around=around), turn)
        except LimitError:
            if "limit" not in options:
                raise
            return  # the process is larger than the limit that was drawn, which is what LMS has to say
        finally:
            meddler.close()
    told = f"LMS_FUZZ_SEED={seed}: {options}"
    for number, (ours, theirs) in enumerate(zip(mine, plain, strict=True)):
        for place, (our, their) in enumerate(zip(ours, theirs, strict=False)):
            assert our == their, f"{told}: pass {number}, result {place}"
        assert len(ours) == len(theirs), f"{told}: pass {number}"
    gc.collect()
    if any(session._swapper.live for session in meddler.sessions) and leaks_by_itself(seed, turn, bits):
        return
    for session in meddler.sessions:
        assert session._swapper.live == 0, told
        assert session.engine.usage()["file"] == 0, told
        if "budget" in options:
            # An operation may use several records at once, and save some meanwhile; the plans' forecasts know of it.
            # What was changed in place since it was saved stays.
            peak, largest = session.stats()["held_peak"], session._planner.client.needed
            bound = max(options["budget"] + 8 * largest, *meddler.foretold)  # type: ignore[operator]
            assert peak <= bound, f"{told}: {peak} held, more than {bound}; the largest record has {largest}"  # type: ignore[operator]


def seeds_of(numbers: Iterable[int]) -> Iterable[int]:
    """These, or the one that LMS_FUZZ_SEED names."""
    chosen = os.environ.get("LMS_FUZZ_SEED")
    return [int(chosen)] if chosen else numbers
