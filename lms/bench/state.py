"""Measure training a model whose state does not fit: `python lms/bench/state.py`. docs/benchmarks.md says what and how.

In each round each contestant trains in a process of its own: plain training without a cap, the page pool with nothing
to move, LMS under the limit, and plain training under the same cap with the system's swap behind it (needs root).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import cap

from lms.memory.file import FileSlab
from lms.memory.machine import machine
from lms.memory.spill import spill_folder
from lms.torch.cpu.engine import CpuEngine
from lms.units import format_size, parse_size

STEPS = 7
PROGRAM = f"""
import sys, time, torch
torch.manual_seed(0)
layers, width, batch = map(int, sys.argv[1:])
model = torch.nn.Sequential(*(one for _ in range(layers) for one in (torch.nn.Linear(width, width), torch.nn.GELU())))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range({STEPS}):
    began = time.perf_counter()
    optimizer.zero_grad()
    loss = model(torch.randn(batch, width)).square().mean()
    loss.backward()
    optimizer.step()
    print("step", time.perf_counter() - began, loss.item().hex(), flush=True)
"""
ALL = "activations,optimizer,parameters,gradients"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30, help="linear layers (default 30)")
    parser.add_argument("--width", type=int, default=2048, help="their inputs and outputs (default 2048)")
    parser.add_argument("--batch", type=int, default=512, help="rows of a batch (default 512)")
    parser.add_argument(
        "--limit",
        type=lambda text: parse_size(text, "--limit"),
        default=800 * 10**6,
        help="LMS's limit, and the cap (default 800MB)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default 3)")
    given = parser.parse_args(arguments)
    shape = [str(given.layers), str(given.width), str(given.batch)]
    folder = tempfile.TemporaryDirectory()
    script = Path(folder.name) / "train.py"
    script.write_text(PROGRAM)
    program, lms = [str(script), *shape], [sys.executable, "-m", "lms", "run", "--swap", ALL]
    commands = {
        "plain": [sys.executable, *program],
        "page pool": [*lms, *program],
        "LMS": [*lms, "--limit", str(given.limit), *program],
        "system's swap": [sys.executable, *program],
    }
    if reason := cap.can_swap():
        print(f"system's swap: left out: {reason}", file=sys.stderr)
        del commands["system's swap"]
    engine = CpuEngine(FileSlab(spill_folder(None)))
    link = engine.calibrate(10**9)
    engine.close()
    times: dict[str, list[float]] = {name: [] for name in commands}
    losses: dict[str, set[str]] = {name: set() for name in commands}
    lines: list[str] = []
    for turn in range(given.rounds):
        for name, command in commands.items():
            if name == "system's swap":
                run = cap.run(command, limit_bytes=given.limit, swap=spill_folder(None))
                returncode, out, err = run.returncode, run.stdout, run.stderr
            else:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                returncode, out, err = done.returncode, done.stdout, done.stderr
            if returncode:
                raise SystemExit(f"{name} ended with {returncode}: {err[-2000:]}")
            steps = re.findall(r"step (\S+) (\S+)", out)
            times[name].append(statistics.median(float(seconds) for seconds, _ in steps[3:]))
            losses[name].add(" ".join(loss for _, loss in steps))
            print(f"round {turn + 1} {name}: {times[name][-1]:.2f} s a step", file=sys.stderr)
            if name == "LMS":
                lines.append(err.strip().splitlines()[-1])
    state = given.layers * (given.width**2 + given.width) * 4 * 4
    ratios = {
        name: statistics.median(one / plain for one, plain in zip(taken, times["plain"], strict=True))
        for name, taken in times.items()
    }
    print(f"{format_size(state)} of state, limit {format_size(given.limit)}, {given.rounds} rounds, {link}")
    for name, ratio in ratios.items():
        same = "the same bits" if losses[name] == losses["plain"] else "OTHER BITS"
        print(f"{name:15} {statistics.median(times[name]):7.2f} s a step, {ratio:5.2f} x plain, {same}")
    print(*lines, sep="\n")
    print(json.dumps({"machine": machine(), "shape": shape, "limit": given.limit, "state": state, "times": times}))
    return 0 if all(losses[name] == losses["plain"] for name in commands) else 1


if __name__ == "__main__":
    sys.exit(main())
