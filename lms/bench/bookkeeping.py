"""Measure LMS's own work for a saved tensor: `python lms/bench/bookkeeping.py`. docs/benchmarks.md says what and how.

With `--against TREE` the LMS of another checkout takes part in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from campaign import ROOT, rotations
from crew import Worker, WorkerError, checkout
from figures import Spread, spread
from saver import MODELS

from lms.files import write_aside
from lms.memory.machine import machine

OPERATIONS = 1000
TARGET = 5.0  # microseconds a saved tensor


@dataclass(frozen=True)
class Turn:
    """Seconds of one thread's processor time in a step: the mean over some steps."""

    forward: float
    backward: float

    def over(self, plain: Turn, saved: int) -> Turn:
        """Microseconds a saved tensor beyond plain's."""
        return Turn(1e6 * (self.forward - plain.forward) / saved, 1e6 * (self.backward - plain.backward) / saved)


@dataclass(frozen=True)
class Row:
    """A contestant's time for a saved tensor beyond plain's, over the rounds. Microseconds."""

    pack: Spread
    unpack: Spread  # and the end of the handle
    both: Spread


def measure(model: str, trees: Mapping[str, Path], rounds: int) -> tuple[int, dict[str, Row]]:
    """The tensors saved in a step, and the rows of all contestants but plain, which all take turns.

    Raises WorkerError if a contestant ends.
    """
    with ExitStack() as stack:

        def start(kind: str, tree: Path = ROOT) -> Worker:
            config = {"kind": kind, "model": model, "operations": OPERATIONS}
            worker = Worker(config, program=Path(__file__).with_name("saver.py"), source=tree / "lms" / "src")
            stack.callback(worker.close)
            return worker

        crew = {kind: start(kind) for kind in ("plain", "identity")}
        crew |= {name: start("lms", tree) for name, tree in trees.items()}
        saved = int(str(crew["plain"].opening["saved"]))
        turns: dict[str, list[Turn]] = {name: [] for name in crew}
        for names in rotations(list(crew), rounds):
            for name in names:
                turns[name].append(Turn(**crew[name].ask()))  # type: ignore[arg-type]
    plain = turns.pop("plain")
    return saved, {name: row(took, plain, saved) for name, took in turns.items()}


def row(took: Sequence[Turn], plain: Sequence[Turn], saved: int) -> Row:
    """A contestant's turns beside plain's of the same rounds."""
    over = [mine.over(theirs, saved) for mine, theirs in zip(took, plain, strict=True)]
    return Row(
        spread([turn.forward for turn in over]),
        spread([turn.backward for turn in over]),
        spread([turn.forward + turn.backward for turn in over]),
    )


def table(model: str, saved: int, rows: Mapping[str, Row]) -> str:
    """One model's rows, and the target, as text."""
    lines = [
        f"\n{model}: {saved} tensors saved in a step; microseconds a saved tensor beyond plain",
        f"  {'':<12} {'pack':>6} {'unpack':>6} {'both':>6} {'quartiles':>13}",
    ]
    for name, one in rows.items():
        quartiles = f"{one.both.low:6.2f}-{one.both.high:6.2f}"
        lines.append(f"  {name:<12} {one.pack.median:6.2f} {one.unpack.median:6.2f} {one.both.median:6.2f} {quartiles}")
    word = "reached" if rows["lms"].both.median <= TARGET else "MISSED"
    return "\n".join([*lines, f"  {word}: lms, target {TARGET:g}"])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 1 if a contestant ended."""
    args = _arguments(argv)
    trees = {"lms": ROOT, **{tree.name: tree for tree in args.against}}
    found: dict[str, object] = {}
    for model in MODELS:
        try:
            saved, rows = measure(model, trees, args.rounds)
        except WorkerError as error:
            print(f"bookkeeping: {error}", file=sys.stderr)
            return 1
        print(table(model, saved, rows), flush=True)
        found[model] = {"saved": saved, "rows": {name: asdict(one) for name, one in rows.items()}}
    document = {"format": "lms-bookkeeping-1", "machine": machine(), "rounds": args.rounds, "models": found}
    args.output.mkdir(parents=True, exist_ok=True)
    write_aside(args.output / "bookkeeping.json", json.dumps(document, indent=1).encode())
    print(f"wrote {args.output / 'bookkeeping.json'}")
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bookkeeping", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each contestant (default: 20)")
    parser.add_argument(
        "--against",
        type=checkout,
        action="append",
        default=[],
        metavar="TREE",
        help="another checkout: its LMS takes part",
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("out/bench"), help="folder (default: out/bench)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
