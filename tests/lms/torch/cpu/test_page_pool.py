from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lms.build import library_path
from lms.memory.device import CpuDevice
from lms.memory.resident import ResidentSet
from lms.torch.cpu import page_pool

KB, MB = 1 << 10, 1 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")
DONTDUMP = 16  # MADV_DONTDUMP of mman.h: a flag of a mapping, and harmless
SOURCE = Path(__file__).parents[3] / "lms" / "src"


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    path = library_path(torch.__version__)
    assert path.exists(), "the page pool is not compiled: `make setup` does it (python -m lms.build torch)"
    library = ctypes.CDLL(str(path))
    library.lms_pool_allocate.argtypes = (ctypes.c_size_t,)
    library.lms_pool_allocate.restype = ctypes.c_void_p
    library.lms_pool_free.argtypes = (ctypes.c_void_p,)
    return library


@pytest.fixture
def pool(library: ctypes.CDLL) -> Iterator[page_pool.PagePool]:
    pool = page_pool.PagePool(library)
    assert pool.install()
    yield pool
    pool.retire()


class Block:
    """A block of the pool, each page of it marked with the block's own number."""

    def __init__(self, library: ctypes.CDLL, nbytes: int, mark: int) -> None:
        self.address = library.lms_pool_allocate(nbytes)
        self.nbytes, self.mark = nbytes, mark
        assert self.address
        assert self.address % PAGE == 0
        self.words = (ctypes.c_uint64 * (nbytes // 8)).from_address(self.address)
        self.places = [*range(0, nbytes // 8, PAGE // 8), nbytes // 8 - 1]
        for place in self.places:
            self.words[place] = mark

    def check(self) -> None:
        assert {self.words[place] for place in self.places} == {self.mark}

    @property
    def span(self) -> int:
        return -(-self.nbytes // PAGE) * PAGE


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.integers(8, 40 * PAGE)),
        st.tuples(st.just("free"), st.integers(0, 1000)),
        st.tuples(st.just("keep"), st.integers(0, 100 * PAGE)),
    ),
    max_size=60,
)


@given(steps=STEPS)
@settings(max_examples=150, deadline=None)
def test_blocks_never_overlap_and_keep_their_bytes(library: ctypes.CDLL, steps: list[tuple[str, int]]) -> None:
    pool = page_pool.PagePool(library)
    pool.keep(0)
    pool.keep(2**62)
    base = pool.usage().used  # tensors of other tests that are still alive
    pool.reset_peak()
    live: list[Block] = []
    bound, most = 2**62, 0
    for mark, (step, number) in enumerate(steps):
        if step == "allocate":
            live.append(Block(library, number, mark))
        elif step == "free" and live:
            block = live.pop(number % len(live))
            block.check()
            assert library.lms_pool_free(block.address) == 1
        elif step == "keep":
            bound = base + number
            pool.keep(bound)
        used = sum(block.span for block in live)
        most = max(most, used)
        usage = pool.usage()
        assert usage.used - base == used
        assert usage.used_peak - base == most
        assert usage.used + usage.idle <= max(bound, usage.used)
        assert usage.used + usage.idle <= base + most, "more pages than were in use at once"
        for block in live:
            block.check()
    for block in live:
        assert library.lms_pool_free(block.address) == 1
    pool.keep(0)
    assert pool.usage().idle == 0


def test_pages_of_several_blocks_become_one_without_a_fresh_one(library: ctypes.CDLL, pool: page_pool.PagePool) -> None:
    blocks = [Block(library, 256 * KB, mark) for mark in range(8)]
    for block in blocks[::2]:
        library.lms_pool_free(block.address)
    before = pool.usage()
    large = Block(library, MB, 99)
    after = pool.usage()
    assert (after.fresh, after.stitched) == (before.fresh, before.stitched + 1)
    assert after.idle == before.idle - MB
    for block in (large, *blocks[1::2]):
        block.check()
        library.lms_pool_free(block.address)


def test_scratch_that_is_hardly_touched_is_not_kept_as_if_it_were_memory(
    library: ctypes.CDLL, pool: page_pool.PagePool
) -> None:
    pool.keep(0)
    pool.keep(2**62)
    resident = ResidentSet()
    beside = resident.current() - pool.usage().idle
    for touched, kept in ((1, 0), (32, 64 * MB), (1, 64 * MB)):  # of 32 pages; the last block is made of the one before
        address = library.lms_pool_allocate(64 * MB)
        for page in range(0, 64 * MB // PAGE):
            if page % 32 < touched:
                ctypes.memset(address + page * PAGE, 1, 1)
        library.lms_pool_free(address)
        assert pool.usage().idle == kept
        assert resident.current() - pool.usage().idle == pytest.approx(beside, abs=4 * MB)


def test_memory_that_is_not_the_pools_is_refused(library: ctypes.CDLL, pool: page_pool.PagePool) -> None:
    block = Block(library, 128 * KB, 1)
    assert library.lms_pool_free(block.address + PAGE) == 0
    assert library.lms_pool_free(block.address) == 1
    assert library.lms_pool_free(block.address) == 0


def test_a_block_that_no_machine_has_is_none_and_a_tensor_of_it_an_error(
    library: ctypes.CDLL, pool: page_pool.PagePool
) -> None:
    assert library.lms_pool_allocate(2**63) is None
    assert library.lms_pool_allocate(2**64 - 1) is None
    with pytest.raises(RuntimeError, match="can't allocate memory: you tried to allocate"):
        torch.empty(2**61, dtype=torch.uint8)


def test_a_tensor_that_the_system_would_refuse_is_refused(pool: page_pool.PagePool) -> None:
    # Reserved without asking, it would be there until it is touched, and then the process would be killed.
    with pytest.raises(RuntimeError, match="can't allocate memory: you tried to allocate"):
        torch.empty(2**44, dtype=torch.uint8)
    assert torch.ones(MB).sum() == MB


def test_a_mapping_that_somebody_split_costs_its_pages_at_most(library: ctypes.CDLL, pool: page_pool.PagePool) -> None:
    blocks = [Block(library, 256 * KB, mark) for mark in range(4)]
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.madvise(ctypes.c_void_p(blocks[0].address + 64 * KB), ctypes.c_size_t(PAGE), DONTDUMP) == 0
    for block in blocks[::2]:
        library.lms_pool_free(block.address)
    before = pool.usage()
    large = Block(library, 512 * KB, 99)
    after = pool.usage()
    replaced = after.fresh - before.fresh
    assert after.returned - before.returned == replaced
    assert replaced in (0, 256 * KB), "Linux 6.17 and later move all of it, others refuse"
    for block in (large, *blocks[1::2]):
        block.check()
        library.lms_pool_free(block.address)


LIMITS = """
import os, random, resource, sys
import torch
from lms.torch.cpu import page_pool
MB = 1 << 20
pool = page_pool.find()
assert pool.install()
random.seed(7)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
which, field = {"data": (resource.RLIMIT_DATA, "VmData"), "as": (resource.RLIMIT_AS, "VmSize")}[sys.argv[1]]
resource.setrlimit(which, ((int(status[field].split()[0]) << 10) + 64 * MB, resource.RLIM_INFINITY))
live, refused = [], 0
for turn in range(150):
    if len(live) > 1 and random.random() < 0.5:
        value, tensor = live.pop(random.randrange(len(live)))
        assert int(tensor.min()) == int(tensor.max()) == value
    try:
        live.append((turn % 251, torch.full((random.randrange(MB, 16 * MB),), turn % 251, dtype=torch.uint8)))
    except RuntimeError as error:
        assert "can't allocate memory" in str(error)
        refused += 1
        live = live[len(live) // 2 :]
usage = pool.usage()
assert refused and usage.stitched, (refused, usage)
assert usage.fresh - usage.returned == usage.used + usage.idle
assert all(int(tensor.min()) == int(tensor.max()) == value for value, tensor in live)
live.clear(); tensor = None
large = torch.ones(24 * MB, dtype=torch.uint8)  # what is free is free for it; the C library may keep 32 MB of its own
"""


@pytest.mark.parametrize("limit", ["data", "as"])
def test_a_limit_of_the_process_is_an_error_and_costs_no_bytes(limit: str) -> None:
    run_alone(LIMITS, limit)


MAPPINGS = """
import ctypes, mmap, random
import torch
from lms.memory.resident import ResidentSet
from lms.torch.cpu import page_pool
MB = 1 << 20
resident = ResidentSet().current
pool = page_pool.find()
assert pool.install()
random.seed(7)
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
live = [torch.full((MB,), value, dtype=torch.uint8) for value in range(48)]
most = int(open("/proc/sys/vm/max_map_count").read())
spare = libc.mmap(None, 2 * most * mmap.PAGESIZE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
count = len(open("/proc/self/maps").readlines())
for at in range((most - count - 12) // 2):  # each splits the run once more
    assert libc.mprotect(spare + 2 * at * mmap.PAGESIZE, mmap.PAGESIZE, mmap.PROT_READ) == 0
del live[::3]
before = pool.usage()
kept = [(value, torch.full((random.randrange(2 * MB, 5 * MB),), value, dtype=torch.uint8)) for value in range(4)]
after = pool.usage()
assert after.returned > before.returned, "no move was refused: the test tests nothing"
assert all(int(tensor.min()) == int(tensor.max()) == value for value, tensor in kept)
assert all(int(tensor.min()) == int(tensor.max()) for tensor in live)
held = resident() - after.used - after.idle
del live, kept
pool.retire()
assert resident() < held + 4 * MB, "pages stayed where the system refused a hole"
"""


def test_pages_of_moves_that_the_system_refuses_are_returned() -> None:
    run_alone(MAPPINGS)


def test_patchwork_is_given_up_before_the_process_runs_out_of_mappings(
    library: ctypes.CDLL, pool: page_pool.PagePool
) -> None:
    pages = [Block(library, PAGE, mark).address for mark in range(20_000)]
    for page in pages[::2]:
        library.lms_pool_free(page)
    before = pool.usage()
    large = Block(library, 10_000 * PAGE, 1)  # of as many pieces, if nobody cares
    after = pool.usage()
    assert after.returned - before.returned == after.fresh - before.fresh == 10_000 * PAGE
    assert after.idle == 0
    large.check()
    for block in (*pages[1::2], large.address):
        library.lms_pool_free(block)


def test_large_tensors_come_from_the_pool_and_small_ones_do_not(pool: page_pool.PagePool) -> None:
    before = pool.usage()
    small, large = torch.ones(page_pool.LEAST - 4, dtype=torch.uint8), torch.ones(page_pool.LEAST, dtype=torch.uint8)
    assert pool.usage().used - before.used == page_pool.LEAST
    assert small.sum() + large.sum() == 2 * page_pool.LEAST - 4
    assert large.data_ptr() % PAGE == 0
    del large
    assert pool.usage().used == before.used


def test_tensors_outlive_the_pools_use_in_both_directions(library: ctypes.CDLL) -> None:
    pool = page_pool.PagePool(library)
    before = torch.full((MB,), 1, dtype=torch.uint8)
    assert pool.install()
    inside = torch.full((MB,), 2, dtype=torch.uint8)
    del before
    pool.retire()
    after = torch.full((MB,), 3, dtype=torch.uint8)
    assert pool.usage().idle == 0
    assert (int(inside.min()), int(inside.max())) == (2, 2)
    used = pool.usage().used
    del inside
    assert used - pool.usage().used == MB
    assert pool.usage().idle == 0
    del after
    assert used - pool.usage().used == MB


def test_resizing_sharing_and_numpy_work_as_before(pool: page_pool.PagePool) -> None:
    tensor = torch.arange(MB, dtype=torch.int32)
    tensor.resize_(2 * MB)
    assert torch.equal(tensor[:MB], torch.arange(MB, dtype=torch.int32))
    array = tensor.numpy()
    array[0] = 7
    assert tensor[0] == 7
    shared = tensor.clone().share_memory_()
    assert torch.equal(shared, tensor)


def test_the_device_counts_idle_pages_as_resident_and_not_as_in_use() -> None:
    device = CpuDevice(page_pool.find())
    assert device.prepare(None) is None
    try:
        device.reset_peak()
        before = device.current()
        tensor = torch.ones(64 * MB, dtype=torch.uint8)
        assert device.current() - before == pytest.approx(64 * MB, abs=4 * MB)
        del tensor
        assert device.current() - before == pytest.approx(0, abs=4 * MB)
        device.reset_peak()
        peak = device.peak()
        assert peak.held - peak.in_use == pytest.approx(64 * MB, abs=4 * MB)
        assert peak.in_use == pytest.approx(before, abs=4 * MB)
    finally:
        device.release()
    device.reset_peak()
    assert device.peak().held == pytest.approx(before, abs=8 * MB)


def test_idle_pages_are_returned_when_the_limit_needs_them() -> None:
    device = CpuDevice(page_pool.find())
    limit = device.current() + 64 * MB
    assert device.prepare(limit) is None
    try:
        tensor = torch.ones(48 * MB, dtype=torch.uint8)
        del tensor
        outside = ctypes.create_string_buffer(40 * MB)
        ctypes.memset(outside, 1, 40 * MB)
        device.peak()  # sees that 40 MB more are somebody else's, so 24 may be kept, less a share of the limit
        device.reset_peak()
        assert device.peak().held <= limit + 2 * MB
        idle = page_pool.find().usage().idle  # type: ignore[union-attr]
        room = limit - limit // 128 - device.current()  # other tests may have left the process large
        assert room - 4 * MB <= idle < 40 * MB
        del outside
    finally:
        device.release()


def test_many_threads_share_the_pool(pool: page_pool.PagePool) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        kept: list[tuple[int, torch.Tensor]] = []
        for turn in range(200):
            nbytes = int(torch.randint(64 * KB, MB, (), generator=generator))
            kept.append((turn % 251, torch.full((nbytes,), turn % 251, dtype=torch.uint8)))
            if len(kept) > 6:
                value, tensor = kept.pop(int(torch.randint(len(kept), (), generator=generator)))
                if int(tensor.min()) != value or int(tensor.max()) != value:
                    wrong.append(turn)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


FORK = """
import os, torch
torch.set_num_threads(1)  # OpenMP does not survive a fork
from lms.torch.cpu import page_pool
pool = page_pool.find()
assert pool.install()
kept = torch.arange(1 << 20)
idle = torch.ones(1 << 20); del idle
child = os.fork()
if child == 0:
    # The idle pages are the parent's: kept here, each would be there twice once the parent writes to it.
    ok = not pool.installed and pool.usage().idle == 0
    new = torch.zeros(3 << 20)
    kept += 1
    ok &= pool.install()
    new = torch.zeros(3 << 20)  # from the child's own
    ok &= bool((new == 0).all()) and bool((kept == torch.arange(1, (1 << 20) + 1)).all())
    os._exit(0 if ok else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
assert pool.installed and pool.usage().idle == 4 << 20
assert bool((kept == torch.arange(1 << 20)).all())
"""


def test_a_forked_child_leaves_the_idle_pages_to_its_parent() -> None:
    run_alone(FORK)


def run_alone(script: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert done.returncode == 0, done.stderr


def test_a_library_that_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "page_pool-broken.so"
    monkeypatch.setattr("lms.build.library_path", lambda version, library: broken)
    assert page_pool.find.__wrapped__() is None, "not compiled: the session says what to do"
    broken.write_bytes(b"no library")
    with pytest.warns(RuntimeWarning, match=r"cannot be loaded.*remove page_pool-broken.so and compile it again"):
        assert page_pool.find.__wrapped__() is None
