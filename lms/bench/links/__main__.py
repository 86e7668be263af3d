"""Run the benchmark of `lms link`: `make bench-links`, or `python lms/bench/links --quick`. It takes some minutes.

docs/benchmarks.md says what is measured and how; as root it also throttles a disk. Writes links.json and links.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from links import contests, fio, throttle
from links.contests import Result
from links.figures import DEFINITIONS, Verdict, lines

from lms.errors import LMSError
from lms.files import write_aside
from lms.memory import machine
from lms.memory.disk import disk_of

HERE = Path(__file__).resolve().parent
MB, GB = 1 << 20, 1 << 30
PARTS = ("file", "memory", "step", "sampling")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 1 when a part failed. A target that was missed is a finding."""
    args = _arguments(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    folder = (args.dir or args.output).resolve()
    verdicts: list[Verdict] = []
    measured: dict[str, object] = {}
    failed: list[str] = []
    try:
        versions = {"fio": fio.version()} if "file" in args.only else {}
    except fio.FioError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    for part, run in _parts(args, folder).items():
        if part not in args.only:
            continue
        if part == "step" and (why := throttle.refused()):
            print(f"left out: steps on throttled disks: {why}", file=sys.stderr)
            continue
        try:
            result = run()
        except (RuntimeError, LMSError, OSError) as error:
            failed.append(f"{part}: {error}")
            print(f"\nbench: {failed[-1]}", file=sys.stderr)
            continue
        verdicts += result.verdicts
        measured[part] = result.measured
        print("\n".join(["", *lines(result.verdicts)]), flush=True)
    document = {
        "format": "lms-bench-links-1",
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.machine() | {"disk": disk_of(folder).what()},
        "versions": versions,
        "definitions": DEFINITIONS,
        "verdicts": [asdict(one) for one in verdicts],
        "measured": measured,
        "failed": failed,
    }
    write_aside(args.output / "links.json", json.dumps(document, indent=1).encode() + b"\n")
    write_aside(args.output / "links.md", page(document, verdicts).encode())
    print(f"\nwrote {args.output / 'links.json'}, {args.output / 'links.md'}")
    return 1 if failed else 0


def page(document: Mapping[str, object], verdicts: Sequence[Verdict]) -> str:
    """The figures as a page of docs/results."""
    machine = document["machine"]
    assert isinstance(machine, dict)
    rows = "\n".join(
        f"| {one.what} | {one.value:.3g} | {one.target} | {'yes' if one.reached else '**no**'} | {one.note} |"
        for one in verdicts
    )
    definitions = "\n".join(f"- *{name}*: {text}" for name, text in DEFINITIONS.items())
    facts = ", ".join(f"{name} {value}" for name, value in machine.items() if name != "host")
    return (
        f"# `lms link` beside fio, a memcpy in C++, and throttled disks\n\n{document['when']}; {facts}. "
        "Measured by `make bench-links`.\n\n"
        f"| figure | value | must be | reached | behind it |\n|---|---|---|---|---|\n{rows}\n\n{definitions}\n"
    )


def _parts(args: argparse.Namespace, folder: Path) -> dict[str, Callable[[], Result]]:
    quick = args.quick
    rounds = args.rounds or (2 if quick else 7)
    nbytes = 256 * MB if quick else GB
    blocks = (MB, 64 * MB) if quick else (MB, 16 * MB, 64 * MB)
    sizes = (64 * MB,) if quick else (MB, 64 * MB, 256 * MB)
    return {
        "file": lambda: contests.files(folder, nbytes, blocks, rounds, tell),
        "memory": lambda: contests.memory(sizes, rounds, tell),
        "step": lambda: contests.steps(3 if quick else 5, 1 if quick else 3, tell, quick=quick),
        "sampling": lambda: contests.sampling(folder, 3.0 if quick else 20.0, tell),
    }


def tell(text: str) -> None:
    """A line that is written over on a terminal; nothing elsewhere."""
    if sys.stderr.isatty():
        print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small files and few rounds: shows that it runs")
    parser.add_argument("--rounds", type=_count, metavar="N", help="turns of each contestant (default 7)")
    parser.add_argument("--only", type=_only, default=PARTS, metavar="PARTS", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="folder on the disk to measure (default: the output's)")
    output = HERE.parents[2] / "out" / "bench"
    parser.add_argument("-o", "--output", type=Path, default=output, metavar="DIR", help="where the figures go")
    return parser.parse_args(argv)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of 1 or more")
    return int(text)


def _only(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if set(parts) - set(PARTS):
        raise argparse.ArgumentTypeError(f"{text!r}: expected some of {', '.join(PARTS)}")
    return parts


if __name__ == "__main__":
    raise SystemExit(main())
