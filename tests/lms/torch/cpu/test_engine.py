"""The CPU engine: tensors to a file and back."""

import errno
import gc
import mmap
import os
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lms.errors import CorruptionError, SpillError
from lms.memory.device import CpuDevice
from lms.memory.file import FileSlab, page_memory
from lms.memory.transfer import FileSlot
from lms.torch.cpu.engine import CpuEngine
from lms.torch.cuda.streams import over
from lms.torch.engine import Engine

CPU = torch.device("cpu")
MB = 1 << 20


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[CpuEngine]:
    engine = CpuEngine(FileSlab(tmp_path))
    yield engine
    engine.close()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def from_the_system(nbytes: int) -> torch.Tensor:
    return over(page_memory(nbytes), 0, nbytes)


def there_and_back(engine: Engine, source: torch.Tensor) -> torch.Tensor:
    slot, out = engine.offload(source)
    out.wait()
    tensor, back = engine.reload(slot)
    back.wait()
    engine.discard(slot)
    return tensor


@pytest.mark.parametrize("nbytes", [0, 1, 100, 4095, 4096, 4097, 65_536, 1_000_003, 5 * MB + 13])
def test_bytes_come_back_as_they_left(engine: CpuEngine, nbytes: int) -> None:
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    tensor = there_and_back(engine, source)
    assert tensor.dtype == torch.uint8
    assert tensor.shape == (nbytes,)
    assert torch.equal(tensor, source)


@pytest.mark.parametrize("offset", [0, 1, 16, 64, 4000])
def test_what_comes_back_lies_as_it_lay_within_a_page(engine: CpuEngine, offset: int) -> None:
    """The alignment decides which kernel a library takes, and so the last bit of a result."""
    source = torch.randint(0, 256, (100_000,), dtype=torch.uint8)[offset:]
    tensor = there_and_back(engine, source)
    assert tensor.data_ptr() % 4096 == source.data_ptr() % 4096
    assert torch.equal(tensor, source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_every_dtype_survives_as_bytes(engine: CpuEngine, dtype: torch.dtype) -> None:
    source = torch.randint(0, 2, (3, 5, 7)).to(dtype)
    tensor = there_and_back(engine, flat(source)).view(dtype).view(3, 5, 7)
    assert torch.equal(tensor, source)


def test_nan_and_negative_zero_keep_their_bits(engine: CpuEngine) -> None:
    source = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    assert torch.equal(there_and_back(engine, flat(source)), flat(source))


def test_what_comes_back_can_be_written_to(engine: CpuEngine) -> None:
    tensor = there_and_back(engine, torch.zeros(10_000, dtype=torch.uint8))
    tensor += 1
    assert int(tensor.sum()) == 10_000


def test_a_slot_can_be_read_many_times_and_each_time_anew(engine: CpuEngine) -> None:
    source = torch.arange(100, dtype=torch.uint8)
    slot, _ = engine.offload(source)
    first, copy = engine.reload(slot)
    copy.wait()
    first.zero_()
    second, copy = engine.reload(slot)
    copy.wait()
    assert torch.equal(second, source)


def test_a_tensor_that_dies_gives_its_memory_back_to_the_system(engine: CpuEngine) -> None:
    device = CpuDevice()
    size = 64 * MB
    slot, copy = engine.offload(torch.ones(size, dtype=torch.uint8))
    copy.wait()
    del copy
    gc.collect()
    before = device.current()
    tensor, back = engine.reload(slot)
    back.wait()
    view = tensor.view(torch.float32)[10:20]
    assert device.current() - before == pytest.approx(size, abs=8 * MB)
    del tensor, back
    assert device.current() - before == pytest.approx(size, abs=8 * MB)
    del view
    assert device.current() - before == pytest.approx(0, abs=8 * MB)


def test_a_copy_takes_no_memory_beside_the_tensors(engine: CpuEngine) -> None:
    device = CpuDevice()
    source = torch.ones(64 * MB + 12_345, dtype=torch.uint8)[7:]
    device.reset_peak()
    before = device.current()
    slot, copy = engine.offload(source)
    copy.wait()
    assert device.peak().held - before < 4 * MB
    tensor, back = engine.reload(slot)
    back.wait()
    assert device.peak().held - before < source.nbytes + 4 * MB
    assert tensor.nbytes == source.nbytes


def test_the_source_lives_until_its_copy_is_over(engine: CpuEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    write = engine.file.write
    monkeypatch.setattr(engine.file, "write", lambda *arguments: (gate.wait(30), write(*arguments)))
    source = torch.full((100_000,), 7, dtype=torch.uint8)
    alive = weakref.ref(source.untyped_storage())
    slot, copy = engine.offload(source)
    del source
    assert alive() is not None
    gate.set()
    copy.wait()
    assert alive() is None
    tensor, back = engine.reload(slot)
    back.wait()
    assert bool((tensor == 7).all())


def test_a_tensor_that_is_dropped_while_it_is_filled_is_no_harm(engine: CpuEngine) -> None:
    slot, _ = engine.offload(torch.ones(8 * MB, dtype=torch.uint8))
    for _ in range(5):
        engine.reload(slot)
    tensor, copy = engine.reload(slot)
    engine.discard(slot)
    copy.wait()
    assert bool((tensor == 1).all())


def test_many_tensors_in_flight_do_not_mix(engine: CpuEngine) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    sources = [torch.full((rng.randrange(1, 300_000),), index, dtype=torch.uint8) for index in range(60)]
    slots = [engine.offload(source)[0] for source in sources]
    order = rng.sample(range(60), 60)
    reloads = [(index, *engine.reload(slots[index])) for index in order]
    for index, tensor, copy in reloads:
        copy.wait()
        assert torch.equal(tensor, sources[index])
        engine.discard(slots[index])
    assert engine.usage()["file"] == 0


def test_usage_counts_whole_pages_in_the_file(engine: CpuEngine) -> None:
    assert engine.usage() == {"file": 0, "file_peak": 0}
    slot, copy = engine.offload(torch.empty(100_000, dtype=torch.uint8))
    held = engine.usage()["file"]
    assert 100_000 <= held < 100_000 + 2 * 4096
    assert held % 4096 == 0
    copy.wait()
    engine.discard(slot)
    assert engine.usage() == {"file": 0, "file_peak": held}


def test_stalls_are_counted_for_each_direction(engine: CpuEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, read = threading.Event(), engine.file.read
    slot, out = engine.offload(torch.empty(100_000, dtype=torch.uint8))
    monkeypatch.setattr(engine.file, "read", lambda *arguments: (gate.wait(30), read(*arguments)))
    out.wait()
    waited, none = engine.stalled()
    assert none == 0.0
    _, back = engine.reload(slot)
    threading.Timer(0.01, gate.set).start()
    back.wait()
    assert engine.stalled()[0] == waited
    assert engine.stalled()[1] > 0.0


def test_calibration_measures_and_leaves_nothing_behind_not_even_in_the_users_random_numbers(engine: CpuEngine) -> None:
    torch.manual_seed(0)
    random.seed(0)
    state = torch.get_rng_state()
    assert engine.link() is None
    link = engine.calibrate(3 * MB)
    assert link.name == "file"
    assert link.out > 1e6
    assert link.back > 1e6
    assert engine.link() == link
    assert engine.usage()["file"] == 0
    assert engine.usage()["file_peak"] >= 3 * MB
    assert torch.equal(torch.get_rng_state(), state)


def test_a_full_disk_is_raised_by_the_wait_and_the_source_is_whole(engine: CpuEngine) -> None:
    full = os.open("/dev/full", os.O_RDWR)
    os.dup2(full, engine.file.fileno())
    os.close(full)
    source = torch.full((100_000,), 3, dtype=torch.uint8)
    slot, copy = engine.offload(source)
    with pytest.raises(SpillError, match=r"spill_dir=.*100 KB"):
        copy.wait()
    assert copy.done()
    assert bool((source == 3).all())
    _, back = engine.reload(slot)
    with pytest.raises(SpillError, match="spill_dir="):
        back.wait()


def test_a_flipped_byte_is_raised_by_the_wait(tmp_path: Path) -> None:
    engine = CpuEngine(FileSlab(tmp_path, verify=True))
    slot, copy = engine.offload(torch.zeros(100_000, dtype=torch.uint8))
    copy.wait()
    assert isinstance(slot, FileSlot)
    with open(f"/proc/self/fd/{engine.file.fileno()}", "r+b") as file:
        file.seek(slot.places[0].offset + 50_000)
        file.write(b"x")
    _, back = engine.reload(slot)
    with pytest.raises(CorruptionError):
        back.wait()
    engine.close()


@pytest.mark.parametrize("nbytes", [0, 1, 5000, 100_000])
def test_what_comes_back_lies_in_memory_that_the_caller_chose(tmp_path: Path, nbytes: int) -> None:
    given: list[weakref.ref[torch.UntypedStorage]] = []
    asked: list[int] = []

    def memory(nbytes: int) -> torch.Tensor:
        pages = from_the_system(nbytes)
        given.append(weakref.ref(pages.untyped_storage()))
        asked.append(nbytes)
        return pages

    engine = CpuEngine(FileSlab(tmp_path), memory=memory)
    source = torch.randint(0, 256, (64 + nbytes,), dtype=torch.uint8)[64:]
    tensor = there_and_back(engine, source)
    assert torch.equal(tensor, source)
    assert tensor.untyped_storage().nbytes() == nbytes, "the record would have another size than the one that left"
    assert tensor.storage_offset() == 0
    assert asked[0] % 4096 == 0
    assert nbytes <= asked[0] < nbytes + 2 * 4096
    if nbytes:
        assert given[0]() is not None
        view = tensor[:1]
        del tensor
        assert given[0]() is not None
        del view
    assert given[0]() is None
    engine.close()


def test_memory_that_the_system_refuses_is_named_and_the_next_copy_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    engine = CpuEngine(FileSlab(tmp_path), memory=from_the_system)
    source = torch.full((100_000,), 3, dtype=torch.uint8)
    slot, copy = engine.offload(source)
    copy.wait()
    with monkeypatch.context() as full:
        full.setattr("lms.memory.file.mmap.mmap", refuse)
        with pytest.raises(SpillError, match=r"host memory: 10\d KB were asked .*Cannot allocate memory.*; free some"):
            engine.reload(slot)
    tensor, back = engine.reload(slot)
    back.wait()
    assert torch.equal(tensor, source)
    engine.close()


def test_a_default_device_of_the_user_changes_nothing(engine: CpuEngine) -> None:
    with torch.device("meta"):
        tensor = there_and_back(engine, torch.ones(5000, dtype=torch.uint8, device="cpu"))
        empty = there_and_back(engine, torch.ones(0, dtype=torch.uint8, device="cpu"))
    assert tensor.device == empty.device == CPU
    assert bool((tensor == 1).all())


def test_workers_of_a_data_loader_come_and_go_while_copies_are_in_flight(tmp_path: Path) -> None:
    script = """
import sys, warnings, torch
from pathlib import Path
from lms.memory.file import FileSlab
from lms.torch.cpu.engine import CpuEngine
warnings.simplefilter("ignore")
engine = CpuEngine(FileSlab(Path(sys.argv[1]), verify=True))
sources = [torch.full((4 << 20,), index, dtype=torch.uint8) for index in range(8)]
for epoch in range(2):
    slots = [engine.offload(source)[0] for source in sources]
    back = [engine.reload(slot) for slot in slots]
    loader = torch.utils.data.DataLoader(list(range(8)), num_workers=2, multiprocessing_context="fork")
    assert sorted(int(x) for x in loader) == list(range(8))
    for source, slot, (tensor, copy) in zip(sources, slots, back):
        copy.wait()
        assert torch.equal(source, tensor)
        engine.discard(slot)
engine.close()
print("done")
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=environment, timeout=100, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
