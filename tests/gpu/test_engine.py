"""The CUDA engine on a real GPU, with delays on either stream: a missing wait shows as wrong bytes.

They run from a bare source tree: `PYTHONPATH=lms/src python3 -m pytest tests/gpu`.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lms.errors import CorruptionError, SpillError
from lms.memory.file import FileSlab, address_of, page_memory
from lms.memory.host import HostSlab
from lms.memory.transfer import ThreadCopy
from lms.torch.backend import device_for, make_engine
from lms.torch.cuda.device import CudaDevice
from lms.torch.cuda.engine import CudaEngine, HostSlot
from lms.torch.cuda.pinning import cuda_register, cuda_unregister
from lms.torch.cuda.streams import CudaStreams, StreamCopy

if not torch.cuda.is_available():
    pytest.skip("no GPU: torch.cuda.is_available() is False", allow_module_level=True)

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
MB = 1 << 20
SIZE = 8 * MB
DELAY = 50_000_000  # cycles: some 25 to 50 ms


def delay(stream: object = None) -> None:
    with torch.cuda.stream(stream):  # type: ignore[arg-type]
        torch.cuda._sleep(DELAY)


def bytes_of(value: int, nbytes: int = SIZE) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8, device=GPU)


def make(limit: int | None = None, folder: Path | None = None, *, verify: bool = False) -> CudaEngine:
    host = HostSlab(cuda_register, cuda_unregister, limit=limit, segment=64 * MB)
    file = FileSlab(folder, verify=verify) if folder is not None else None
    return CudaEngine(CudaStreams(GPU), host, file, verify=verify)


def warm(engine: CudaEngine) -> CudaEngine:
    """Lock host memory and fill the allocator's pool: both hold the host up, and a delay would be over meanwhile."""
    for _ in range(2):
        slot, _ = engine.offload(bytes_of(0))
        engine.reload(slot)
        engine.discard(slot)
        torch.cuda.synchronize()
    engine.link()  # gives back what nobody waited for
    return engine


@pytest.fixture
def engine() -> Iterator[CudaEngine]:
    engine = warm(make())
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    gc.collect()
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


@pytest.mark.parametrize("late", ["nothing", "compute", "out", "back", "all"])
@pytest.mark.parametrize("waits", [True, False])
def test_a_pass_sees_its_own_bytes_whatever_is_late(engine: CudaEngine, late: str, waits: bool) -> None:
    streams = {"compute": None, "out": engine._streams.out, "back": engine._streams.back}

    def hold_up() -> None:
        for name, stream in streams.items():
            if late in (name, "all"):
                delay(stream)

    slots, seen = [], {}
    for value in range(1, 6):
        x = torch.empty(SIZE, dtype=torch.uint8, device=GPU)
        hold_up()
        x.fill_(value)
        slot, copy = engine.offload(x)
        slots.append((value, slot))
        del x
        if waits:
            copy.wait()
        torch.empty(SIZE, dtype=torch.uint8, device=GPU).fill_(200 + value)  # the block is used again at once
    for value, slot in reversed(slots):
        torch.empty(SIZE, dtype=torch.uint8, device=GPU).fill_(100 + value)
        hold_up()
        y, copy = engine.reload(slot)
        copy.wait()
        seen[value] = y.clone()
        engine.discard(slot)
        del y, copy
    torch.cuda.synchronize()
    for value, tensor in seen.items():
        assert bool((tensor == value).all()), (value, tensor.unique())


def test_the_memory_of_a_copy_out_is_free_for_the_computation_once_it_was_waited_for(engine: CudaEngine) -> None:
    x = bytes_of(1)
    before = torch.cuda.memory_allocated(GPU)
    delay(engine._streams.out)
    slot, copy = engine.offload(x)
    del x
    assert torch.cuda.memory_allocated(GPU) == before
    copy.wait()
    assert torch.cuda.memory_allocated(GPU) == before - SIZE
    assert not copy.done(), "the delay is too short to show anything"
    others = [bytes_of(9) for _ in range(4)]  # one of them in the place of x
    y, copy = engine.reload(slot)
    copy.wait()
    assert bool((y == 1).all())
    assert len(others) == 4


def test_memory_that_nobody_waited_for_is_given_back_at_a_later_call(engine: CudaEngine) -> None:
    x = bytes_of(1)
    before = torch.cuda.memory_allocated(GPU)
    engine.offload(x)
    del x
    torch.cuda.synchronize()
    engine.link()
    assert torch.cuda.memory_allocated(GPU) == before - SIZE


def test_what_is_dropped_while_it_is_filled_is_not_used_by_others(engine: CudaEngine) -> None:
    slot, _ = engine.offload(bytes_of(1))
    torch.cuda.synchronize()
    delay(engine._streams.back)
    y, copy = engine.reload(slot)
    del y, copy
    engine.discard(slot)
    others = [bytes_of(9) for _ in range(4)]
    torch.cuda.synchronize()
    assert all(bool((other == 9).all()) for other in others)


def test_host_memory_is_not_used_again_while_a_copy_back_reads_it() -> None:
    engine = warm(make(limit=SIZE))
    first, _ = engine.offload(bytes_of(1))
    delay(engine._streams.back)
    y, copy = engine.reload(first)
    engine.discard(first)
    second, _ = engine.offload(bytes_of(2))
    copy.wait()
    assert bool((y == 1).all())
    z, copy = engine.reload(second)
    copy.wait()
    assert bool((z == 2).all())
    engine.close()


def test_a_backward_thread_with_a_stream_of_its_own_waits_on_that_one(engine: CudaEngine) -> None:
    slot, _ = engine.offload(bytes_of(5))
    right = []

    def backward() -> None:
        with torch.cuda.stream(torch.cuda.Stream(GPU)):
            delay(engine._streams.back)
            y, copy = engine.reload(slot)
            copy.wait()
            right.append(bool((y == 5).all()))

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert right == [True]


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 65_537, 100 * MB])
def test_any_number_of_bytes_comes_back(engine: CudaEngine, nbytes: int) -> None:
    x = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=GPU)
    slot, out = engine.offload(x)
    out.wait()
    y, back = engine.reload(slot)
    back.wait()
    assert torch.equal(x, y)


def test_the_host_does_not_wait_in_offload_reload_wait_or_discard(engine: CudaEngine) -> None:
    x = bytes_of(1)
    torch.cuda.synchronize()
    delay()
    event = torch.cuda.Event()
    event.record()
    slot, out = engine.offload(x)
    out.wait()
    y, back = engine.reload(slot)
    back.wait()
    engine.discard(slot)
    assert not event.query(), "the host was held up for as long as the device"
    torch.cuda.synchronize()
    assert torch.equal(x, y)


def test_the_link_and_the_stalls_are_measured() -> None:
    engine = make()
    assert engine.link() is None
    link = engine.calibrate(256 * MB)
    print(f"out {link.out / 1e9:.1f} GB/s, back {link.back / 1e9:.1f} GB/s, latency {link.latency * 1e6:.0f} us")
    assert link.out > 1e9
    assert link.back > 1e9
    assert engine.stalled() == (0.0, 0.0)
    slot, _ = engine.offload(bytes_of(1))
    torch.cuda.synchronize()
    delay(engine._streams.back)
    _, copy = engine.reload(slot)
    copy.wait()
    torch.cuda.synchronize()
    assert engine.stalled()[1] > 0.005
    engine.close()


def test_past_the_limit_bytes_go_to_the_file(tmp_path: Path) -> None:
    engine = make(limit=40 * MB, folder=tmp_path, verify=True)
    slots, kinds = [], set()
    for value in range(1, 5):
        x = bytes_of(value, 20 * MB + 5)
        delay()
        x += 10
        slot, copy = engine.offload(x)
        kinds.add(type(copy))
        slots.append((value, slot))
        del x
        copy.wait()
    assert ThreadCopy in kinds
    assert engine.usage()["host"] <= 40 * MB
    assert engine.usage()["file"] > 20 * MB
    for value, slot in reversed(slots):
        y, copy = engine.reload(slot)
        copy.wait()
        assert bool((y == value + 10).all())
        engine.discard(slot)
    engine.close()


def test_past_the_limit_without_a_folder_an_error_names_it() -> None:
    engine = make(limit=SIZE)
    engine.offload(bytes_of(1))
    with pytest.raises(SpillError, match="host_limit"):
        engine.offload(bytes_of(2))
    engine.close()


def test_a_flipped_byte_in_host_memory_is_found_out() -> None:
    engine = make(verify=True)
    slot, _ = engine.offload(bytes_of(1))
    assert isinstance(slot, HostSlot)
    slot.block.memory[slot.block.offset + 5] ^= 1
    _, copy = engine.reload(slot)
    with pytest.raises(CorruptionError):
        copy.wait()
    engine.close()


def test_the_slab_is_page_locked_and_unlocked_at_the_end() -> None:
    engine = make()
    slot, copy = engine.offload(bytes_of(1))
    assert isinstance(slot, HostSlot)
    assert isinstance(copy, StreamCopy)
    host = torch.frombuffer(slot.block.memory, dtype=torch.uint8, count=SIZE, offset=slot.block.offset)
    assert host.is_pinned()
    engine.close()
    assert not host.is_pinned()
    assert bool((host == 1).all())


def test_a_lock_that_fails_leaves_no_error_for_the_next_launch() -> None:
    memory = page_memory(MB)
    cuda_register(address_of(memory), MB)
    with pytest.raises(SpillError, match="cudaHostRegister"):
        cuda_register(address_of(memory), MB)  # it is locked already
    assert int((torch.zeros(8, device=GPU) + 1).sum()) == 8
    cuda_unregister(address_of(memory))


def test_what_cannot_be_locked_goes_to_the_file(tmp_path: Path) -> None:
    def register(address: int, nbytes: int) -> None:
        if nbytes > 40 * MB:
            raise SpillError(f"locking {nbytes} bytes failed")
        cuda_register(address, nbytes)

    engine = CudaEngine(CudaStreams(GPU), HostSlab(register, cuda_unregister), FileSlab(tmp_path))
    x = torch.randint(0, 256, (50 * MB,), dtype=torch.uint8, device=GPU)
    with pytest.warns(RuntimeWarning, match="could be locked"):
        slot, out = engine.offload(x)
    assert isinstance(out, ThreadCopy)
    y, back = engine.reload(slot)
    back.wait()
    assert torch.equal(x, y)
    engine.close()


def test_many_engines_may_come_and_go(tmp_path: Path) -> None:
    for _ in range(5):
        engine = make_engine(GPU, spill_dir=tmp_path, host_limit=256 * MB, verify=False)
        engine.offload(bytes_of(1))
        engine.close()


def test_the_device_is_the_allocator() -> None:
    device = device_for(GPU)
    assert isinstance(device, CudaDevice)
    assert device.capacity() == torch.cuda.get_device_properties(GPU).total_memory
    x = bytes_of(1)
    assert device.current() == torch.cuda.memory_allocated(GPU)
    device.reset_peak()
    del x
    assert device.peak().held == torch.cuda.max_memory_allocated(GPU) >= SIZE
    assert device.prepare(None) is None


def test_marks_measure_the_device_and_not_the_host() -> None:
    device = device_for(GPU)
    marks = [device.mark()]
    delay()
    marks.append(device.mark())
    marks.append(device.mark())
    slept, nothing = device.elapsed(marks)
    assert slept > 0.005
    assert nothing < slept / 2
