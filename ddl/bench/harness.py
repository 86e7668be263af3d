"""The harness of the benchmarks on the virtual cluster: a command line, and one scenario after the other."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import machine
from shaped import BenchError

from ddl.launch.arguments import read
from testbed import obstacle


class Scenario(Protocol):
    """A named scenario."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def title(self) -> str: ...  # noqa: D102
    @property
    def racks(self) -> tuple[int, ...]: ...  # noqa: D102


S = TypeVar("S", bound=Scenario)
M = TypeVar("M")  # the result of measuring a scenario


class Benchmark(Generic[S, M]):
    """A benchmark: `prog` is its command, `what` describes it, and `scenarios` lists its scenarios."""

    def __init__(self, prog: str, what: str, scenarios: Sequence[S]) -> None:
        names = {one.name: one for one in scenarios}

        def chosen(text: str) -> list[S]:
            if unknown := set(text.split(",")) - set(names):
                raise ValueError(f"unknown: {min(unknown)}; expected some of {','.join(names)}")
            return [names[name] for name in text.split(",")]

        listed = "\n".join(f"  {one.name:8} {one.title}" for one in scenarios)
        self.parser = argparse.ArgumentParser(
            prog=prog,
            description=f"{what}, in one run each:\n{listed}\nAll but the first need root.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add = self.parser.add_argument
        add("--quick", action="store_true", help="in small: shows that it runs, its figures mean nothing")
        add("--scenarios", type=read(chosen), default=list(scenarios), metavar="NAME,...", help="some of them")
        add("--output", type=Path, default=machine.OUT, metavar="DIR", help="for the figures, tables and pictures")

    def run(
        self,
        asked: argparse.Namespace,
        measure: Callable[[S, Callable[[str], None]], M],
        report: Callable[[M], list[str]],
        keep: Callable[[Path, list[M]], None],
    ) -> tuple[list[M], bool]:
        """Measure each scenario, print its report, and keep the results so far.

        Returns them, and whether none failed.
        """
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # unwinds, and so cleans up
        asked.output.mkdir(parents=True, exist_ok=True)
        machine.OUT.mkdir(parents=True, exist_ok=True)
        done: list[M] = []
        whole = True
        for scenario in asked.scenarios:
            if scenario.racks and (reason := obstacle()):
                print(f"without {scenario.name}: {reason}", file=sys.stderr)
                continue
            try:
                done.append(measure(scenario, partial(_tell, scenario.name)))
            except BenchError as error:
                print(f"bench: {error}", file=sys.stderr)
                whole = False
                continue
            print("\n" + "\n".join(report(done[-1])), flush=True)
            keep(asked.output, done)  # kept even if a later scenario fails
        print(f"\nwrote what was measured to {asked.output}")
        return done, whole


def _tell(scenario: str, text: str) -> None:
    print(f"{scenario}: {text}", file=sys.stderr, flush=True)
