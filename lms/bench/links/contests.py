"""The parts of the benchmark: each measures in turns and gives its verdicts with the figures behind them."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

from links import fio, throttle
from links.figures import Verdict, foreseen, inside, near, ordered, overhead, rates_of

from lms.link.counters import DiskCounters
from lms.link.file import FileProbe
from lms.link.memory import host_copies
from lms.link.watch import Watch
from lms.memory.file import address_of, page_memory

HERE = Path(__file__).resolve().parent
MB, GB = 1 << 20, 1 << 30

SHARE = 0.25  # of the saved bytes that stay; one of the shares that `lms link compare` tells of
RATES = (0.2e9, 0.5e9, 1.0e9)  # bytes a second

SAME, AS_IT_COMES = "fio", "fio as it comes"  # in the memory that ours has; in its own

Tell = Callable[[str], None]
Entry = Callable[[], float]  # one turn: bytes a second


@dataclass(frozen=True)
class Result:
    """A part's verdicts, and what was measured for them."""

    verdicts: list[Verdict]
    measured: dict[str, object]


def files(folder: Path, nbytes: int, blocks: Sequence[int], rounds: int, tell: Tell) -> Result:
    """Our copies and fio's, on one file and in the same memory, by turns."""
    verdicts: list[Verdict] = []
    rates: dict[str, dict[str, list[float]]] = {}
    ways: tuple[tuple[Literal["out", "back"], Literal["write", "read"]], ...] = (("out", "write"), ("back", "read"))
    with fio.SharedMemory(2 * nbytes) as shared:
        probe = FileProbe(folder, nbytes, shared.part)
        same = Path(f"/proc/{os.getpid()}/fd/{probe.file.fileno()}")  # it has no name of its own
        try:
            for ours, theirs in ways:
                with probe.copies(ours) as copy:
                    if ours == "out":
                        _whole(copy, nbytes, 16 * MB)  # blocks are given out once, and not to the first contestant
                    for block in blocks:
                        name = f"file, {theirs}, blocks of {block >> 10} KiB"
                        beside = partial(fio.rate, same, nbytes, block, theirs)
                        entries: dict[str, Entry] = {
                            "ours": partial(_whole, copy, nbytes, block),
                            SAME: partial(beside, memory=shared.paths[theirs == "read"]),
                            AS_IT_COMES: beside,
                        }
                        rates[name] = by_turns(name, entries, rounds, tell)
                        verdicts.append(_beside_fio(name, theirs, rates[name]))
        finally:
            probe.close()
    return Result(verdicts, {"bytes": nbytes, "rates": rates, "huge pages": shared.huge})


def by_turns(what: str, entries: Mapping[str, Entry], rounds: int, tell: Tell) -> dict[str, list[float]]:
    """What each entry gives in each round; the order rotates, and a round before the first warms up."""
    names = list(entries)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        tell(f"{what}, round {turn} of {rounds}")
        for at in range(len(names)):
            name = names[(at + turn) % len(names)]
            value = entries[name]()
            if turn:
                found[name].append(value)
    return found


def _beside_fio(name: str, way: str, rates: Mapping[str, list[float]]) -> Verdict:
    judge = near if way == "read" else inside
    found = judge(f"{name}: ours beside fio", rates["ours"], rates[SAME])
    return replace(found, note=f"ours {rates_of(rates['ours'])}; fio as it comes {rates_of(rates[AS_IT_COMES])}")


def _whole(copy: Callable[[int], float], nbytes: int, block: int) -> float:
    """Bytes a second of copying the whole file once in such blocks."""
    return nbytes / sum(copy(block) for _ in range(nbytes // block))


def memory(sizes: Sequence[int], rounds: int, tell: Tell) -> Result:
    """Our copies and a loop of memcpy in C++, in the same memory and on one processor, by turns."""
    verdicts: list[Verdict] = []
    measured: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        library = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "copy.so"
        subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-o", str(library), str(HERE / "copy.cc")], check=True)
        copy_times = ctypes.CDLL(str(library)).copy_times
        cpus = os.sched_getaffinity(0)
        stack.callback(os.sched_setaffinity, 0, cpus)
        os.sched_setaffinity(0, {min(cpus)})
        for size in sizes:
            copies = max(5, min(50, GB // size))
            name = f"memory, copies of {size >> 20} MiB"
            given: list[mmap.mmap] = []

            def allocate(nbytes: int, given: list[mmap.mmap] = given) -> mmap.mmap:
                given.append(page_memory(nbytes))
                return given[-1]

            with host_copies(size, near=[min(cpus)], memory=allocate) as copy:
                source, target = given
                entries: dict[str, Entry] = {
                    "ours": partial(_median_rate, copy, size, copies),
                    "memcpy": partial(_compiled_rate, copy_times, target, source, copies),
                }
                measured[name] = by_turns(name, entries, rounds, tell)
            rates = measured[name]
            verdicts.append(near(f"{name}: ours beside memcpy in C++", rates["ours"], rates["memcpy"]))
    return Result(verdicts, {"rates": measured})


def _median_rate(copy: Callable[[int], float], size: int, copies: int) -> float:
    return size / median(copy(size) for _ in range(copies))


def _compiled_rate(copy_times: Callable[..., int], target: mmap.mmap, source: mmap.mmap, copies: int) -> float:
    seconds = (ctypes.c_double * copies)()
    addresses = [ctypes.c_void_p(address_of(memory)) for memory in (target, source)]
    if copy_times(*addresses, ctypes.c_size_t(len(source)), ctypes.c_size_t(copies), seconds):
        raise RuntimeError(f"a copy of {len(source)} bytes did not arrive")
    each: list[float] = list(seconds)
    return len(source) / median(each)


def steps(steps_each: int, rounds: int, tell: Tell, *, quick: bool = False) -> Result:
    """A step on throttled disks: measured, and predicted from `lms link measure` and a trace of the same round."""
    disks: dict[str, float | None] = {f"{rate / 1e9:g} GB/s": rate for rate in RATES}
    disks["not throttled"] = None
    predicted: dict[str, list[float]] = {disk: [] for disk in disks}
    measured: dict[str, list[float]] = {disk: [] for disk in disks}  # the median of each round
    with throttle.disk(3 * GB) as (folder, number), tempfile.TemporaryDirectory() as name:
        kept = Path(name)
        for disk, rate in disks.items():
            tell(f"lms link measure, disk of {disk}")
            words = ["--only", "file", "--dir", str(folder), "-o", str(_profile(kept, disk)), "--name", disk]
            with throttle.throttled(number, rate) as prefix:
                _lms(prefix, "measure", *words, *(["--quick"] if quick else []))
        for turn in range(rounds):
            trace = kept / f"step{turn}.json"
            order = list(disks)
            order = order[turn % len(order) :] + order[: turn % len(order)]
            tell(f"the step, recorded without throttle, round {turn + 1} of {rounds}")
            _train([], folder, steps_each, str(trace))
            for disk in order:
                tell(f"steps on a disk of {disk}, round {turn + 1} of {rounds}")
                with throttle.throttled(number, disks[disk]) as prefix:
                    measured[disk].append(median(_train(prefix, folder, steps_each, "-")))
                predicted[disk].append(_predicted(_profile(kept, disk), trace, kept / "compared.json"))
    verdicts = [
        foreseen(f"step on a disk of {disk}: predicted beside measured", predicted[disk], measured[disk])
        for disk, rate in disks.items()
        if rate is not None
    ]
    verdicts.append(ordered(predicted, measured))
    return Result(verdicts, {"share": SHARE, "predicted": predicted, "measured": measured})


def _profile(folder: Path, disk: str) -> Path:
    return folder / f"{disk.replace('/', ' a ')}.json"


def _predicted(profile: Path, trace: Path, output: Path) -> float:
    """Seconds of the step, by the command that a user would give."""
    _lms([], "compare", str(profile), str(profile), "--trace", str(trace), "--json", str(output))
    side, _ = json.loads(output.read_text())["step"]
    return float(min(side["shares"], key=lambda one: abs(one["share"] - SHARE))["seconds"])


def _lms(prefix: Sequence[str], *words: str) -> None:
    _finished(throttle.wrapped(prefix, [sys.executable, "-m", "lms", "link", *words]))


def _train(prefix: Sequence[str], folder: Path, count: int, trace: str) -> list[float]:
    command = [sys.executable, str(HERE / "step.py"), str(folder), str(count), str(SHARE), trace]
    found: list[float] = json.loads(_finished(throttle.wrapped(prefix, command)))["seconds"]
    return found


def _finished(command: Sequence[str]) -> str:
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(HERE.parents[1] / "src")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()[-1000:]}")
    return done.stdout


def sampling(folder: Path, seconds: float, tell: Tell) -> Result:
    """What sampling counters takes of a core, by the whole process's time."""
    tell(f"sampling counters for {seconds:.0f} s")
    watch = Watch(DiskCounters(folder))
    start, cpu = time.perf_counter(), time.process_time()
    time.sleep(seconds)
    share = (time.process_time() - cpu) / (time.perf_counter() - start)
    watched = watch.stop()
    return Result([overhead(share)], {"share": share, "readings": watched.readings, "seconds": watched.seconds})
