"""Links of a real GPU: event timing beside a measurement made another way, and NVML's own answers.

They run from a bare source tree: `PYTHONPATH=lms/src python3 -m pytest tests/gpu`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
import torch

from lms.link import nvml
from lms.link.counters import NvmlCounters
from lms.link.cuda import _TURNS, Pinned, gpu_copies, peer_copies
from lms.link.measure import measure
from lms.link.watch import Watch
from lms.memory import machine
from lms.torch.cuda.streams import CudaStreams

if not torch.cuda.is_available():
    pytest.skip("no GPU: torch.cuda.is_available() is False", allow_module_level=True)

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
MB = 1 << 20
SIZE = 256 * MB
NEAR = 0.03  # what `lms link measure` may be away from nvbandwidth's way of timing


def as_nvbandwidth(direction: str, nbytes: int) -> float:
    """Seconds of a copy as nvbandwidth times it: cudaHostAlloc'ed memory, a stream held back, 16 copies, two events."""
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(nbytes, dtype=torch.uint8, device=GPU)
    source, target = (device, pinned) if direction == "out" else (pinned, device)
    stream = torch.cuda.Stream(GPU)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # the host queues all copies meanwhile
        start.record()
        for _ in range(16):
            target.copy_(source, non_blocking=True)
        end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / 16


@pytest.fixture
def _one_node() -> Iterator[None]:
    """On the processors of one node: two allocators' memory lies where the thread that touches it first runs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before & set(next(node.cpus for node in machine.nodes() if before & set(node.cpus))))
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("_one_node")
@pytest.mark.parametrize("direction", ["out", "back"])
def test_pinned_copies_are_timed_as_nvbandwidth_times_them(direction: str) -> None:
    pinned = Pinned(SIZE)
    ours, theirs = [], []
    with gpu_copies(CudaStreams(GPU), pinned.tensors, direction) as copy:  # type: ignore[arg-type]
        copy(SIZE)
        as_nvbandwidth(direction, SIZE)
        for _ in range(9):  # in turns
            ours.append(copy(SIZE))
            theirs.append(as_nvbandwidth(direction, SIZE))
    pinned.close()
    print(f"{direction}: {SIZE / median(ours) / 1e9:.2f} GB/s, as nvbandwidth {SIZE / median(theirs) / 1e9:.2f} GB/s")
    assert median(ours) == pytest.approx(median(theirs), rel=NEAR)


def test_the_events_tell_what_the_hosts_clock_tells() -> None:
    pinned = Pinned(SIZE)
    with gpu_copies(CudaStreams(GPU), pinned.tensors, "back") as copy:
        copy(SIZE)
        start = time.perf_counter()
        told = _TURNS * sum(copy(SIZE) for _ in range(10))  # each is the mean of so many
        took = time.perf_counter() - start
    pinned.close()
    assert told <= took <= 1.2 * told + 0.01


def test_both_ways_go_at_once() -> None:
    pinned = Pinned(SIZE)
    streams = CudaStreams(GPU)
    seconds = {}
    for direction in ("out", "back", "both"):
        with gpu_copies(streams, pinned.tensors, direction) as copy:  # type: ignore[arg-type]
            copy(SIZE)
            seconds[direction] = median(copy(SIZE) for _ in range(5))
    pinned.close()
    assert max(seconds["out"], seconds["back"]) * 0.95 <= seconds["both"]
    assert seconds["both"] <= 0.8 * (seconds["out"] + seconds["back"])  # one after the other would be 1.0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU alone has no peer")
def test_peers_copy_their_bytes_both_ways_at_once() -> None:
    here, there = CudaStreams(GPU), CudaStreams(torch.device("cuda", 1))
    seconds = {}
    for direction in ("out", "back", "both"):
        with peer_copies(here, there, SIZE, direction) as copy:  # type: ignore[arg-type]
            copy(SIZE)
            seconds[direction] = median(copy(SIZE) for _ in range(5))
        assert 1e9 < SIZE / seconds[direction] < 1e13
    if torch.cuda.can_device_access_peer(0, 1):  # else through host memory, whose bandwidth the ways share
        assert seconds["both"] <= 1.2 * max(seconds["out"], seconds["back"])


def test_a_whole_measurement_stays_below_the_ceilings(tmp_path: Path) -> None:
    pytest.importorskip("pynvml")  # which tells the ceilings
    profile = measure(tmp_path, quick=True, kinds=("gpu", "peer"))
    gpus = profile.of("gpu")
    assert gpus, profile.absent
    for link in gpus:
        found = {(series.direction, series.via) for series in link.series}
        assert {("out", "pinned"), ("back", "pinned"), ("both", "pinned")} <= found
        assert {("out", "pageable"), ("back", "pageable")} <= found
        assert link.ceiling is not None, link.what
    for link in profile.links:
        for series in link.series:
            print(f"{link.name} {series.direction} {series.via}: {series.rate / 1e9:.2f} GB/s ({link.what})")
            if link.ceiling is not None:
                assert series.rate <= 1.02 * link.ceiling.of(series.direction)


def test_nvml_reads_this_machine() -> None:
    pytest.importorskip("pynvml")
    seen = nvml.look()
    assert len(seen.gpus) >= 1, seen.absent
    for gpu in seen.gpus:
        print(gpu.name, gpu.host(), gpu.warnings())
        assert gpu.uuid
        assert gpu.memory > 0


def test_the_drivers_counter_sees_the_bytes_that_were_copied() -> None:
    pytest.importorskip("pynvml")
    uuid = str(getattr(torch.cuda.get_device_properties(GPU), "uuid", ""))
    counters = NvmlCounters(uuid)
    first = counters.read()
    if first.back is None:
        pytest.skip("this driver counts no bytes of this GPU's link")
    watch = Watch(counters)
    pinned = Pinned(SIZE)
    with gpu_copies(CudaStreams(GPU), pinned.tensors, "back") as copy:
        for _ in range(8):
            copy(SIZE)
    time.sleep(1.0)  # the driver's counter is brought up to date by and by
    watched = watch.stop()
    pinned.close()
    print(f"a count of {first.back} at first, {watched.readings} readings; copied {8 * SIZE}, counted {watched.back}")
    assert watched.back is not None, watched.error
    assert watched.back >= 0.9 * 8 * SIZE


def test_reading_the_drivers_counters_costs_a_fiftieth_of_a_core_at_most() -> None:
    pytest.importorskip("pynvml")
    watch = Watch(NvmlCounters(str(getattr(torch.cuda.get_device_properties(GPU), "uuid", ""))))
    time.sleep(3.0)
    watched = watch.stop()
    print(f"{watched.readings} readings cost {watched.cost:.4f} s of {watched.seconds:.2f} s")
    assert watched.cost <= 0.02 * watched.seconds
