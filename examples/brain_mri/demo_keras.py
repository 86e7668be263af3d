"""The main job in Keras, and its proof: a 3D U-Net on a whole brain, plain and with LMS, in processes of their own.

Losses and weights must be the same bit for bit.

    out/tensorflow/bin/python examples/brain_mri/demo_keras.py          # or `make demo-tensorflow`

The exit status is 0 if every claim held, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lms.units import format_size

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Training:
    """How a training ended; `found` is what it wrote, if it came to its end."""

    status: int
    words: str
    found: dict[str, Any]


def train(arguments: list[str]) -> Training:
    """Train in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, str(HERE / "train_keras.py"), "--json", str(file), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = json.loads(file.read_text()) if done.returncode == 0 else {}
    return Training(done.returncode, (done.stderr.strip().splitlines() or ["no message"])[-1], found)


def main() -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="steps of each run (default 5)")
    parser.add_argument("--resolution", type=int, choices=(4, 2, 1), default=4, help="mm a voxel (default 4)")
    parser.add_argument("--width", type=int, default=16, help="channels at full resolution (default 16)")
    parser.add_argument("--budget", default="35%", help="what may stay of the step's tensors (default 35%%)")
    args = parser.parse_args()
    job = [f"--{name}={getattr(args, name)}" for name in ("steps", "resolution", "width")]
    print("plain training ...", flush=True)
    plain = train(job)
    print("the same with LMS ...", flush=True)
    managed = train([*job, f"--budget={args.budget}"])
    for one in (plain, managed):
        if one.status:
            print(f"demo_keras.py: a training failed: {one.words}", file=sys.stderr)
            return 1
    print(_table(plain.found, managed.found))
    claims = {
        "losses of every step are the same bits": plain.found["losses"] == managed.found["losses"],
        "weights are the same bits": plain.found["weights"] == managed.found["weights"],
    }
    for text, held in claims.items():
        print(f"{'ok' if held else 'FAILED':<8}{text}")
    return 0 if all(claims.values()) else 1


def _table(plain: dict[str, Any], managed: dict[str, Any]) -> str:
    figures = managed["lms"]
    rows = [
        ("", "plain", "LMS"),
        ("peak memory of the process", format_size(plain["peak"]), format_size(managed["peak"])),
        ("tensors swapped", "0", f"{figures['swapped']} of {figures['tensors']}"),
        ("written, all steps", "0 B", format_size(figures["swapped_out"])),
        (
            "step time, median without the first",
            *(f"{statistics.median(one['seconds'][1:]):.2f} s" for one in (plain, managed)),
        ),
        *(
            (f"loss after step {at}", repr(ours), repr(theirs))
            for at, (ours, theirs) in enumerate(zip(plain["losses"], managed["losses"], strict=True), 1)
        ),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}" for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
