"""What a person sees while something long goes on: a bar on a terminal, a line for each step elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from tqdm import tqdm


def say(text: str) -> None:
    """A line to the person at the command line."""
    tqdm.write(f"bundle: {text}", file=sys.stderr)


@contextmanager
def steps(what: str, total: int, unit: str, *, lines: bool = True) -> Generator[Callable[[str, int], None]]:
    """Goes along with `total` units of work: the function that it gives takes what is done now, and how many units.

    A line that says how long it took comes at the end, when it ended well. Without `lines` it is the only one where
    nobody watches.
    """
    started = time.monotonic()
    watched = sys.stderr.isatty()
    scale = unit == "B"
    with tqdm(
        total=total, desc=what, unit=unit, unit_scale=scale, leave=False, file=sys.stderr, disable=not watched
    ) as bar:

        def step(name: str, count: int = 1) -> None:
            if watched:
                bar.set_postfix_str(name, refresh=False)
            elif lines and not scale:
                say(f"{what}: {name}")
            bar.update(count)

        yield step
    say(f"{what}: done in {time.monotonic() - started:.1f} s")
