r"""The results page about starts: racks found, ddl_init, and a plan for 1,024 ranks, as tests measured them.

    sudo .venv/bin/python -m pytest -k "drawn_topologies or 8_hosts or 1024" \
        tests/ddl/test_probe_cluster.py tests/ddl/planning/test_cli.py
    .venv/bin/python ddl/bench/start.py

Three tests leave topologies.json, init.json and plan.json in out/bench; start.json has all three, start.md its tables.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import machine
from page import table

from ddl.planning.units import format_time

PARTS = ("topologies", "init", "plan")
Figures = Mapping[str, Any]  # as `machine.keep` wrote them


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 1 if a test left no figures."""
    parser = argparse.ArgumentParser(
        prog="ddl/bench/start.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=machine.OUT, metavar="DIR", help="where the files lie")
    folder = parser.parse_args(argv).output
    if missing := [file for name in PARTS if not (folder / (file := f"{name}.json")).is_file()]:
        print(f"bench: {folder} has no {', '.join(missing)}; run the tests that write them first", file=sys.stderr)
        return 1
    parts = {name: json.loads((folder / f"{name}.json").read_text()) for name in PARTS}
    (folder / "start.json").write_text(json.dumps(parts, indent=1) + "\n")
    (folder / "start.md").write_text(page(parts))
    print(f"wrote {folder / 'start.json'} and start.md, its tables")
    return 0


def page(parts: Mapping[str, Figures]) -> str:
    """A section for each part, in Markdown. Pure."""
    said: list[str] = []
    for name, section in zip(PARTS, (_topologies, _init, _plan), strict=True):
        said += [*section(parts[name]), _where(parts[name])]
    return "\n\n".join(said) + "\n"


def _topologies(figures: Figures) -> list[str]:
    drawn = figures["topologies"]
    found = [one for one in drawn if one["found"]]
    by_hosts: dict[int, list[Figures]] = {}
    for one in drawn:
        by_hosts.setdefault(sum(one["racks"]), []).append(one)
    rows = [
        (
            str(hosts), str(len(ones)), str(sum(bool(one["found"]) for one in ones)),
            ", ".join(sorted({"+".join(map(str, one["racks"])) for one in ones})),
            *(_times([one[name] for one in ones if one["found"]]) for name in ("measuring", "joining")),
        )
        for hosts, ones in sorted(by_hosts.items())
    ]  # fmt: skip
    said = [
        "## Racks of drawn topologies",
        f"The racks of **{len(found)} of {len(drawn)}** topologies were found, drawn from the seed {figures['seed']}.",
        table(("hosts", "topologies", "found", "hosts in each rack", "measuring", "ddl_init"), rows),
    ]
    return said + [f"Missed, seed {one['seed']}: {one['why']}" for one in drawn if not one["found"]]


def _init(figures: Figures) -> list[str]:
    rows = [("measuring", _times(figures["measuring"])), ("all of ddl_init", _times(figures["joining"]))]
    racks = "+".join(map(str, figures["racks"]))
    title = f"## ddl_init on {sum(figures['racks'])} hosts in racks of {racks}"
    return [title, f"{len(figures['joining'])} times, median and most:", table(("", "time"), rows)]


def _plan(figures: Figures) -> list[str]:
    rows = [(one["size"], format_time(one["processor"]), format_time(one["seconds"])) for one in figures["plans"]]
    return [
        f"## `ddlrun plan` for {figures['ranks']:,} ranks",
        f"`{figures['command']}`, without the start of Python:",
        table(("size", "processor's time", "time"), rows),
    ]


def _times(seconds: Sequence[float]) -> str:
    return f"{format_time(median(seconds))}, at most {format_time(max(seconds))}" if seconds else ""


def _where(figures: Figures) -> str:
    its = figures["machine"]
    known = ", ".join(f"{name} {version}" for name, version in figures["versions"].items() if version)
    return (
        f"{figures['when']}: {its['processor']}, Linux {its['kernel']}, Python {its['python']}, {known}; load average "
        f"{figures['load']:.1f}."
    )


if __name__ == "__main__":
    sys.exit(main())
