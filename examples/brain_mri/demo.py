"""The main job, and its proof: a 3D U-Net learns to segment a whole brain at 2 mm in less memory than it needs.

Each run is a process of its own: plain, then under LMS with a budget of a quarter of the bytes that it saves for the
backward pass. Losses, parameters and gradients must be the same bit for bit. Then both run again under a hard cap of
what LMS itself was measured to need plus a tenth: plain training must fail there, LMS must not.

    python examples/brain_mri/demo.py          # or `make demo`; writes to out/demo/

The exit status is 0 when every claim held (or was skipped, with its reason), 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pictures import write_figures

from lms.errors import LMSError
from lms.files import write_aside
from lms.memory.machine import kernel
from lms.units import format_size

if TYPE_CHECKING:
    from pictures import Report

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "lms" / "bench"))

import cap  # noqa: E402 - the benchmarks', which are not installed

OUT = HERE.parents[1] / "out" / "demo"
MINUTES = 8  # all of it, on two cores
SHARE = 4  # one part in so many of the saved bytes may stay
MARGIN = 1.10  # the hard cap, over LMS's own peak

# All runs have these, so that none is better off. A thread of OpenMP that has nothing to do spins, which on a machine
# with other work keeps that work from a core.
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
_STEP = re.compile(r"^step (\d+) loss (\S+) seconds (\S+)$", re.MULTILINE)

Verdict = Literal["ok", "FAILED", "skipped"]


class DemoError(RuntimeError):
    """A run that the rest depends on did not end well."""


@dataclass(frozen=True)
class Claim:
    """Something that the demo sets out to show, and whether it did."""

    verdict: Verdict
    text: str


@dataclass(frozen=True)
class Attempt:
    """A run under the hard cap: how it ended, and the steps that it finished."""

    finished: bool
    killed: bool  # by the cap
    ending: str  # in words
    losses: list[float]
    seconds: list[float]  # of each step
    late: bool = False  # we stopped it

    def pace(self) -> float | None:
        """Median step time without the first step, which warms up (and, under LMS, records)."""
        return statistics.median(self.seconds[1:]) if len(self.seconds) > 1 else None


@dataclass
class Demo:
    """The stages, in order; each prints its line, and `claims` collects what they showed."""

    steps: int
    resolution: int
    width: int
    device: str
    out: Path
    started: float = field(default_factory=time.monotonic)
    claims: list[Claim] = field(default_factory=list)
    stage: int = 0

    def run(self) -> bool:
        """All stages; True when every claim held."""
        self.out.mkdir(parents=True, exist_ok=True)
        for stale in (*self.out.glob("*.json"), self.out / "report.html", self.out / "memory.png"):
            stale.unlink(missing_ok=True)  # a figure in this folder is always one of this run
        self._prepare()
        plain = self._train("plain")
        limits = self._plan()
        # What is in flight or in use may exceed a budget by one record. Taken off, a quarter is a quarter, and no more.
        budget = max(0, int(limits["saved"]) // SHARE - int(limits["largest"]))
        managed = self._train("lms", "--lms", "--lms-budget", str(budget), "--trace", str(self.out / "trace.json"))
        print(_table(plain, managed, limits))
        self._compare(plain, managed, int(limits["saved"]))
        self._prove(plain, managed, budget)
        self._draw(plain, managed, budget)
        print()
        for claim in self.claims:
            print(f"{claim.verdict:<8}{claim.text}")
        minutes, seconds = divmod(round(time.monotonic() - self.started), 60)
        print(f"\n{minutes} min {seconds:02d} s. Look at {self.out / 'report.html'} and {self.out / 'memory.png'}")
        document = {
            "machine": f"{platform.system()} {kernel()} {platform.machine()}",
            "processors": os.cpu_count(),
            "python": platform.python_version(),
            "claims": [[claim.verdict, claim.text] for claim in self.claims],
            "limits": limits,
            "plain": plain,
            "lms": managed,
        }
        write_aside(self.out / "demo.json", json.dumps(document).encode())
        return all(claim.verdict != "FAILED" for claim in self.claims)

    # Stages

    def _prepare(self) -> None:
        self._announce("the brain", "resampling the ICBM 152 template")
        command = [sys.executable, str(HERE / "data.py"), "--resolution", str(self.resolution)]
        print(_must(subprocess.run(command, capture_output=True, text=True, check=False), "preparing the data"), end="")

    def _plan(self) -> dict[str, float]:
        self._announce("lms plan", "what limit does this script need?")
        answer = self.out / "plan.json"
        command = [sys.executable, "-m", "lms", "plan", "--json", str(answer), *self._script("plan", "--steps", "2")]
        _must(self._start(command), "lms plan")
        limits: dict[str, float] = json.loads(answer.read_text())
        saved, lowest = format_size(limits["saved"]), format_size(limits["floor"])
        print(f"      saved for the backward pass: {saved}; the floor, which no swapping lowers: {lowest}")
        return limits

    def _train(self, name: str, *more: str) -> Report:
        words = "large model support" if more else "no large model support"
        self._announce(name, f"{self.steps} steps with {words}")
        _must(self._start([sys.executable, *self._script(name, "--steps", str(self.steps), *more)]), name)
        report: Report = json.loads((self.out / f"{name}.json").read_text())
        return report

    def _compare(self, plain: Report, managed: Report, saved: int) -> None:
        same = _losses(plain) == _losses(managed) and plain["sha256"] == managed["sha256"]
        what = f"{self.steps} losses, {plain['parameters']:,} parameters and their gradients, bit for bit"
        print(f"\nidentical: {'yes' if same else 'NO'} ({what})")
        self._claim(same, f"plain and LMS agree in {what}")
        kept, largest = managed["lms"]["held_peak"], managed["lms"]["largest"]
        self._claim(
            kept <= saved / SHARE,
            f"at most 1/{SHARE} of the saved bytes stayed: {format_size(kept)} of {format_size(saved)}"
            f" (largest single record {format_size(largest)})",
        )

    def _prove(self, plain: Report, managed: Report, budget: int) -> None:
        on_gpu = managed["device"] != "cpu"
        by_mappings = not on_gpu and cap.method() == "RLIMIT_DATA"
        peak = managed["mapped_peak"] if by_mappings else _peak(managed)
        limit = int(peak * MARGIN)
        means = "the allocator's share of the GPU" if on_gpu else cap.method()
        counted = "private writable mappings" if by_mappings else "memory"
        print(f"\nA hard cap of {format_size(limit)} of {counted}, by {means}: LMS's own peak plus a tenth")
        self.steps = self._affordable(max(_seconds(plain), _seconds(managed)))
        arguments = ("--lms", "--lms-budget", str(budget))
        alone = self._attempt("plain", limit, on_gpu)
        self._claim(alone.killed, f"plain training does not fit under {format_size(limit)}: {alone.ending}")
        helped = self._attempt("lms", limit, on_gpu, *arguments)
        same = helped.finished and helped.losses == _losses(plain)[: self.steps]
        self._claim(same, f"LMS fits under {format_size(limit)}, with the same losses: {helped.ending}")
        self._swap(limit, on_gpu, helped)

    def _affordable(self, seconds: float) -> int:
        """Steps of a run under the cap: all, or on a slow machine as many as the time left allows, 2 at least.

        The time is one step of plain training, LMS's steps, and up to three times as long for those on swap.
        """
        left = self._left() - 30
        return max(2, min(self.steps, int((left / seconds - 1) / 4)))

    def _left(self) -> float:
        return MINUTES * 60 - 30 - (time.monotonic() - self.started)

    def _swap(self, limit: int, on_gpu: bool, helped: Attempt) -> None:
        """Time plain training on the system's swap. That it is too slow, or killed, breaks no claim about LMS."""
        what = "plain training on the system's swap, under the same cap"
        left = self._left()
        reason = "a GPU's memory cannot be swapped by the system" if on_gpu else cap.can_swap()
        if not reason and left < 30:
            reason = f"too little of the {MINUTES} minutes is left"
        if not reason:
            try:
                swapped = self._attempt("swap", limit, False, swap=self.out, timeout=left)
            except LMSError as error:
                reason = str(error)
            else:
                ours, theirs = helped.pace(), swapped.pace()
                if ours and theirs:
                    ratio = f"{theirs:.1f} s a step, {theirs / ours:.2f} x the {ours:.1f} s of LMS"
                    self._claim(True, f"{what}, was timed: {ratio}")
                    return
                reason = swapped.ending
                if not (swapped.late or swapped.killed):
                    self._claim(False, f"{what}: {reason}")
                    return
        self.claims.append(Claim("skipped", f"{what}: {reason}"))

    def _draw(self, plain: Report, managed: Report, budget: int) -> None:
        try:
            write_figures(self.out, plain, managed, budget, int(_peak(managed) * MARGIN))
        except LMSError as error:
            self._claim(False, f"the report and the picture are written: {error}")
        else:
            self._claim(True, f"the report and the picture are written, to {self.out}")

    # Processes

    def _script(self, name: str, *more: str) -> list[str]:
        shape = ["--resolution", str(self.resolution), "--width", str(self.width), "--device", self.device]
        bar = [] if sys.stderr.isatty() else ["--quiet"]
        return [str(HERE / "train.py"), *shape, *bar, "--json", str(self.out / f"{name}.json"), *more]

    def _start(self, command: list[str], timeout: float = 600) -> subprocess.CompletedProcess[str]:
        shown = None if sys.stderr.isatty() else subprocess.PIPE  # a progress bar belongs on a screen alone
        environment = {**os.environ, **ENVIRONMENT}
        try:
            return subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, stderr=shown, text=True, check=False, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            raise DemoError(f"not finished after {timeout:.0f} s: {' '.join(command)}") from None

    def _attempt(
        self, name: str, limit: int, on_gpu: bool, *more: str, swap: Path | None = None, timeout: float = 600
    ) -> Attempt:
        self._announce(f"{name}, capped", f"{self.steps} steps under the hard cap")
        command = [sys.executable, *self._script(f"capped-{name}", "--steps", str(self.steps), "--quiet", *more)]
        if on_gpu:
            import torch

            share = limit / torch.cuda.get_device_properties(0).total_memory
            done = self._start([*command, "--memory-fraction", repr(share)], timeout)
            stdout, status = done.stdout, done.returncode
            killed, late = status != 0 and "OutOfMemoryError" in (done.stderr or ""), False
        else:
            result = cap.run(command, limit_bytes=limit, swap=swap, env={**os.environ, **ENVIRONMENT}, timeout=timeout)
            stdout, status, killed, late = result.stdout, result.returncode, result.killed, result.timed_out
        steps = _STEP.findall(stdout)
        seconds = [float(step[2]) for step in steps]
        if status == 0:
            ending = f"finished, {statistics.median(seconds[1:] or seconds):.1f} s a step"
        elif late:
            ending = f"stopped by us after {timeout:.0f} s, with {len(steps)} of {self.steps} steps done"
        else:
            cause = "out of memory" if killed else f"exit status {status}, not for want of memory"
            ending = f"{cause}, in step {len(steps) + 1}"
        print(f"      {ending}")
        return Attempt(status == 0, killed, ending, [float(step[1]) for step in steps], seconds, late)

    # Words

    def _announce(self, name: str, text: str) -> None:
        self.stage += 1
        print(f"[{time.monotonic() - self.started:4.0f} s] {name}: {text}", flush=True)

    def _claim(self, held: bool, text: str) -> None:
        self.claims.append(Claim("ok" if held else "FAILED", text))


def _must(done: subprocess.CompletedProcess[str], what: str) -> str:
    if done.returncode:
        raise DemoError(f"{what} ended with exit status {done.returncode}\n{(done.stderr or '').strip()[-2000:]}")
    return done.stdout


def _losses(report: Report) -> list[float]:
    return [step["loss"] for step in report["steps"]]


def _peak(report: Report) -> int:
    """Most bytes held in any step, by whichever count saw most: the kernel's or the allocator's, samples, LMS's own."""
    counters = report["lms"] or {}
    return max([int(counters.get("peak") or 0)] + [step["peak"] for step in report["steps"]])


def _seconds(report: Report) -> float:
    """Median step time without the first step, which warms up (and, under LMS, records)."""
    return statistics.median(step["seconds"] for step in report["steps"][1:])


def _table(plain: Report, managed: Report, limits: dict[str, float]) -> str:
    counters = managed["lms"]
    rows = [
        ("", "plain", "LMS"),
        ("peak memory", format_size(_peak(plain)), format_size(_peak(managed))),
        ("  floor, without any saved bytes", "", format_size(limits["floor"])),
        ("saved bytes on the device, at most", format_size(limits["saved"]), format_size(counters["held_peak"])),
        ("moved out in a step", "0 B", format_size(counters["last_out"])),
        ("moved back in a step", "0 B", format_size(counters["last_in"])),
        ("step time, median without the first", f"{_seconds(plain):.2f} s", f"{_seconds(managed):.2f} s"),
    ]
    for ours, theirs in zip(plain["steps"], managed["steps"], strict=True):
        rows.append((f"loss after step {ours['step']}", repr(ours["loss"]), repr(theirs["loss"])))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}" for row in rows]
    return "\n" + "\n".join(line.rstrip() for line in lines)


def main() -> int:
    """Run the demo; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="steps of each run (default 4)")
    parser.add_argument("--resolution", type=int, choices=(4, 2, 1), default=2, help="mm a voxel (default 2)")
    parser.add_argument("--width", type=int, default=16, help="channels at full resolution (default 16)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help="where the files go (default out/demo)")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: expected 2 or more, as the first step of a run only records")
    try:
        held = Demo(args.steps, args.resolution, args.width, args.device, args.out.resolve()).run()
    except (DemoError, LMSError) as error:
        print(f"demo.py: {error}", file=sys.stderr)
        return 1
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())
