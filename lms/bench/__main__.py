"""Run the benchmark: `make bench`, or `python lms/bench --quick`. docs/benchmarks.md says what is measured and how."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from allocators import POOL, refused
from campaign import Campaign, Settings, steps_to_take
from cap import can_swap
from crew import Progress, WorkerError, checkout
from figures import DEFINITIONS, Cell, Verdict, forecasts, judge, noise_floor, paired, spread

from lms.files import write_aside
from lms.memory.machine import kernel
from lms.units import format_size

MODELS = ("resnet", "gpt", "unet")


@dataclass(frozen=True)
class Measured:
    """One model's cells and verdicts."""

    model: str
    memory: str
    cells: dict[str, Cell]
    verdicts: list[Verdict]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 1 when a result differs from plain's or a cell failed, 2 for a wrong argument."""
    args = _arguments(argv)
    settings = _settings(args)
    progress = Progress(steps_to_take(settings, len(args.models)), sys.stderr)
    measured: list[Measured] = []
    try:
        for model in args.models:
            campaign = Campaign(model, settings, progress.advance)
            cells = campaign.run()
            measured.append(Measured(model, campaign.memory, cells, judge(cells)))
            _write(args.output, settings, measured)  # what was measured stays, whatever comes next
    except WorkerError as error:
        print(f"\nbench: {error}", file=sys.stderr)
        return 1
    finally:
        progress.close()
    for one in measured:
        print(table(one))
    print(verdict_lines("simulator, over all models", simulated(measured)))
    print(f"wrote {', '.join(str(path) for path in _write(args.output, settings, measured))}")
    return _status(measured)


def simulated(measured: Sequence[Measured]) -> list[Verdict]:
    """The simulator's verdicts, over all LMS cells that had a budget."""
    return forecasts(
        {
            f"{one.model} {cell.name}": cell
            for one in measured
            for cell in one.cells.values()
            if cell.timed and cell.share is not None and not cell.other
        }
    )


def _settings(args: argparse.Namespace) -> Settings:
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    uncapped = "a GPU cannot be capped so" if device != "cpu" else can_swap()
    if args.swap and uncapped:
        print(f"without the cells under a memory cap: {uncapped}", file=sys.stderr)
    args.output.mkdir(parents=True, exist_ok=True)
    folder = (args.spill_dir or args.output).resolve()
    return Settings(
        size="quick" if args.quick else device,
        device=device,
        threads=args.threads or len(os.sched_getaffinity(0)),
        rounds=args.rounds or (2 if args.quick else 5),
        shares=args.shares,
        spill_dir=folder,
        swap_dir=folder,
        swap=args.swap and uncapped is None,
        refused=refused(device),
        against=args.against,
    )


def _write(folder: Path, settings: Settings, measured: Sequence[Measured]) -> list[Path]:
    """Write bench.json and, if matplotlib is installed, bench.png; return the paths."""
    document = {
        "format": "lms-bench-1",
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": {key: value for key, value in asdict(settings).items() if not isinstance(value, Path)},
        "definitions": DEFINITIONS,
        "models": {one.model: _document(one) for one in measured},
        "simulator": [asdict(verdict) for verdict in simulated(measured)],
    }
    written = [folder / "bench.json"]
    write_aside(written[0], json.dumps(document, indent=1).encode())
    try:
        from chart import draw
    except ImportError:
        return written
    written.append(folder / "bench.png")
    write_aside(written[1], draw({one.model: one.cells for one in measured}))
    return written


def machine() -> dict[str, str | int]:
    """The machine and the versions that this was measured with."""
    import torch

    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), ""
    )
    total = next((line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0")
    found: dict[str, str | int] = {
        "processor": model or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": 1024 * int(total),
        "kernel": kernel(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def table(one: Measured) -> str:
    """The cells of a model, and its targets, as text."""
    plain = one.cells["plain"]
    noise = noise_floor(paired(one.cells["plain-again"], plain))
    width = max(12, *(len(name) for name in one.cells))
    lines = [
        f"\n{one.model}: plain takes {plain.seconds:.2f} s a step, noise floor {100 * noise:.1f}%; peak: {one.memory}",
        f"  {'cell':<{width}} {'ratio':>6} {'quartiles':>13} {'x pool':>6} {'peak':>8} "
        f"{'managed':>8} {'out':>8} {'back':>8} {'wait':>8}",
    ]
    pool = one.cells[POOL]
    for cell in one.cells.values():
        if not cell.timed:
            lines.append(f"  {cell.name:<{width}} {cell.note.splitlines()[0] if cell.note else 'not run'}")
            continue
        found = spread(paired(cell, plain))
        over = f"{spread(paired(cell, pool)).median:6.3f}" if pool.timed else ""
        row = f"  {cell.name:<{width}} {found.median:6.3f} {found.low:6.3f}-{found.high:6.3f} {over:>6}"
        row += f" {format_size(cell.peak):>8}"
        if cell.kind == "lms":
            stall = cell.last("last_stall_out") + cell.last("last_stall_in")
            row += f" {format_size(cell.managed_peak):>8} {format_size(cell.last('last_out')):>8}"
            row += f" {format_size(cell.last('last_in')):>8} {stall:6.2f} s"
        lines.append(row)
    return "\n".join([*lines, verdict_lines("targets", one.verdicts)])


def verdict_lines(title: str, verdicts: Sequence[Verdict]) -> str:
    """One line for each figure beside its target."""
    lines = [f"  {title}:"]
    for verdict in verdicts:
        word = {True: "reached", False: "MISSED", None: "not judged"}[verdict.reached]
        figures = "" if verdict.value is None else _figure(verdict.value, verdict.unit)
        if verdict.target is not None:
            figures += f", target {_figure(verdict.target, verdict.unit)}"
        note = f" ({verdict.note})" if verdict.note else ""
        lines.append(f"    {word:<10} {verdict.cell:<12} {verdict.figure}: {figures}{note}")
    return "\n".join(lines)


def _figure(value: float, unit: str) -> str:
    return format_size(value) if unit == "bytes" else f"{value:.3g}"


def _document(one: Measured) -> dict[str, object]:
    plain, pool = one.cells["plain"], one.cells[POOL]
    return {
        "memory": one.memory,
        "noise_floor": noise_floor(paired(one.cells["plain-again"], plain)),
        "cells": {
            name: {
                **asdict(cell),
                "ratio": asdict(spread(paired(cell, plain))) if cell.timed else None,
                "over_pool": asdict(spread(paired(cell, pool))) if cell.timed and pool.timed else None,
            }
            for name, cell in one.cells.items()
        },
        "verdicts": [asdict(verdict) for verdict in one.verdicts],
    }


def _status(measured: Sequence[Measured]) -> int:
    status = 0
    for one in measured:
        for verdict in one.verdicts:
            if verdict.figure == "identical" and not verdict.reached:
                print(f"FAILED: {one.model}, {verdict.cell}: {verdict.note}", file=sys.stderr)
                status = 1
        for cell in one.cells.values():
            if cell.note and cell.name != "swap" and not cell.note.startswith("not run"):
                print(f"FAILED: {one.model}, {cell.name}: {cell.note}", file=sys.stderr)
                status = 1
    return status


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _models(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        raise argparse.ArgumentTypeError(f"unknown model {unknown[0]!r}; expected some of {', '.join(MODELS)}")
    return names


def _shares(text: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(share) / 100 for share in text.split(","))
    except ValueError:
        shares = (-1.0,)
    if not all(0 <= share <= 1 for share in shares):
        raise argparse.ArgumentTypeError(f"{text!r}: expected percentages from 0 to 100, such as 75,50,35,25,0")
    return shares


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of 1 or more")
    return int(text)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, two rounds: shows that it runs, measures nothing"
    )
    parser.add_argument(
        "--models", type=_models, default=list(MODELS), help=f"some of {','.join(MODELS)} (default: all)"
    )
    parser.add_argument(
        "--shares",
        type=_shares,
        default=(0.75, 0.5, 0.35, 0.25, 0.0),
        help="percentages of the saved bytes that may stay (default: 75,50,35,25,0)",
    )
    parser.add_argument("--rounds", type=_positive, help="timed steps of each cell (default: 5; quick: 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    parser.add_argument("--threads", type=_positive, help="of torch, on a CPU (default: all cores)")
    parser.add_argument(
        "--spill-dir", type=Path, help="the folder that LMS and the system swap to (default: the output folder)"
    )
    parser.add_argument("--no-swap", dest="swap", action="store_false", help="leave out the cells under a memory cap")
    parser.add_argument(
        "--against", type=checkout, metavar="TREE", help="another checkout: its LMS takes part beside this one's"
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("out/bench"), help="folder (default: out/bench)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
