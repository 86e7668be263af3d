"""Links of a real GPU: event timing beside a measurement made another way, and NVML's own answers.

They run from a bare source tree: `PYTHONPATH=lms/src python3 -m pytest tests/gpu`.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import pytest
import torch

from lms.link import nvml
from lms.link.counters import NvmlCounters
from lms.link.cuda import Pinned, gpu_copies, peer_copies
from lms.link.measure import measure
from lms.torch.streams import CudaStreams

if not torch.cuda.is_available():
    pytest.skip("no GPU: torch.cuda.is_available() is False", allow_module_level=True)

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
MB = 1 << 20
SIZE = 256 * MB
NEAR = 0.03  # what `lms link measure` may be away from nvbandwidth's way of timing


def as_nvbandwidth(direction: str, nbytes: int) -> float:
    """Seconds of a copy as nvbandwidth times it: cudaHostAlloc'ed memory, a stream held back, 16 copies, two events."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(nbytes, dtype=torch.uint8, device=GPU)
    source, target = (device, host) if direction == "out" else (host, device)
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
        told = sum(copy(SIZE) for _ in range(10))
        took = time.perf_counter() - start
    pinned.close()
    assert told <= took <= 1.2 * told + 0.01


def test_both_ways_at_once_are_no_slower_than_one_after_the_other() -> None:
    pinned = Pinned(SIZE)
    streams = CudaStreams(GPU)
    seconds = {}
    for direction in ("out", "back", "both"):
        with gpu_copies(streams, pinned.tensors, direction) as copy:  # type: ignore[arg-type]
            copy(SIZE)
            seconds[direction] = median(copy(SIZE) for _ in range(5))
    pinned.close()
    assert max(seconds["out"], seconds["back"]) * 0.95 <= seconds["both"]
    assert seconds["both"] <= 1.1 * (seconds["out"] + seconds["back"])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU alone has no peer")
def test_peers_copy_their_bytes() -> None:
    here, there = CudaStreams(GPU), CudaStreams(torch.device("cuda", 1))
    with peer_copies(here, there, 64 * MB, "both") as copy:
        assert 1e9 < 64 * MB / copy(64 * MB) < 1e13


def test_a_whole_measurement_stays_below_the_ceilings(tmp_path: Path) -> None:
    profile = measure(tmp_path, quick=True, kinds=("gpu", "peer"))
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
    before = counters.read()
    if before.back is None:
        pytest.skip("this driver counts no bytes of this GPU's link")
    pinned = Pinned(SIZE)
    with gpu_copies(CudaStreams(GPU), pinned.tensors, "back") as copy:
        for _ in range(8):
            copy(SIZE)
    time.sleep(1.0)  # the driver's counter is brought up to date by and by
    after = counters.read()
    counters.close()
    pinned.close()
    assert after.back is not None
    print(f"copied {8 * SIZE}, the driver counted {after.back - before.back}")
    assert after.back - before.back >= 0.9 * 8 * SIZE
