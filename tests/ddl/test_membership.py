"""What libddl's C gets of a store: its callbacks, called as C calls them."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import ddl
from ddl import job
from ddl.membership import Membership, _Struct, under_mpi


class Dictionary(dict[str, bytes]):
    """The least that a store can be; `get` returns None for a key that is not there."""

    set = dict.__setitem__


class Raising(Dictionary):
    """A store whose `get` raises KeyError for a key that is not there."""

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key]


def in_c(membership: Membership) -> _Struct:
    return ctypes.cast(membership.pointer, ctypes.POINTER(_Struct)).contents  # type: ignore[arg-type]


def get(struct: _Struct, key: bytes, capacity: int = 100, seconds: float = 0.05) -> tuple[int, bytes]:
    buffer, count = ctypes.create_string_buffer(capacity), ctypes.c_size_t()
    code = struct.get(None, key, ctypes.addressof(buffer), capacity, ctypes.byref(count), seconds)
    return code, buffer.raw[: count.value]


@pytest.mark.parametrize(
    "make",
    [
        Dictionary,
        Raising,
        dist.HashStore,
        lambda: dist.PrefixStore("0", dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)),
    ],
)
def test_c_sets_and_gets_bytes_and_is_told_of_a_timeout(make: Callable[[], object]) -> None:
    membership = Membership(make(), 1, 4)  # type: ignore[arg-type]
    struct = in_c(membership)
    assert (struct.rank, struct.size) == (1, 4)
    assert get(struct, b"contact") == (1, b"")
    value = b"a\0b\xff"
    assert struct.set(None, b"contact", value, len(value)) == 0
    assert get(struct, b"contact") == (0, value)
    assert struct.set(None, b"empty", None, 0) == 0
    assert get(struct, b"empty") == (0, b"")
    assert membership.error is None


def test_a_value_that_comes_later_is_waited_for_on_any_thread() -> None:
    store = Dictionary()
    struct = in_c(membership := Membership(store, 0, 2))
    found: list[tuple[int, bytes]] = []
    thread = threading.Thread(target=lambda: found.append(get(struct, b"late", seconds=30)))
    thread.start()
    time.sleep(0.05)
    assert not found
    store.set("late", b"here")
    thread.join(30)
    assert found == [(0, b"here")]
    assert membership.error is None


@pytest.mark.parametrize(
    ("value", "message"),
    [(b"x" * 101, "101 bytes under 'key', but libddl wrote at most 100"), ("text", "has a str under 'key'")],
)
def test_a_value_that_libddl_did_not_write_is_an_error(value: object, message: str) -> None:
    struct = in_c(membership := Membership(Dictionary(key=value), 0, 1))  # type: ignore[arg-type]
    assert get(struct, b"key") == (2, b"")
    assert isinstance(membership.error, ddl.ArgumentError)
    assert message in str(membership.error)


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_of_the_job_is_an_error(rank: int, size: int) -> None:
    with pytest.raises(ddl.ArgumentError, match=rf"rank is {rank} and size is {size}"):
        ddl.init(store=Dictionary(), rank=rank, size=size)


def test_a_store_without_its_methods_or_its_place_is_an_error() -> None:
    with pytest.raises(ddl.ArgumentError, match=r"store is object, which has no method set"):
        ddl.init(store=object(), rank=0, size=1)  # type: ignore[arg-type]
    with pytest.raises(ddl.ArgumentError, match="give all three, or none"):
        ddl.init(store=Dictionary(), rank=0)


class FakeLibrary:
    """A ddl_init_with that leaves a contact in the store and reads another rank's."""

    def __init__(self) -> None:
        self.options: bytes | None = None

    def __call__(self, name: str, pointer: object, options: bytes | None) -> None:
        assert name == "ddl_init_with"
        self.options = options
        struct = ctypes.cast(pointer, ctypes.POINTER(_Struct)).contents  # type: ignore[arg-type]
        code = struct.set(None, f"ddl/{struct.rank}".encode(), b"here", 4)
        code = code or get(struct, f"ddl/{1 - struct.rank}".encode(), seconds=0.01)[0]
        if code:
            raise ddl.TransportError("the store cannot be used")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    made = FakeLibrary()
    monkeypatch.setattr(job, "library", SimpleNamespace(call=made, number=lambda *_: 2))
    monkeypatch.setattr(job, "_registered", True)
    monkeypatch.setattr(job, "_memberships", [])
    return made


def test_init_gives_the_store_to_the_library_and_keeps_it(fake: FakeLibrary) -> None:
    store = Dictionary({"ddl/1": b"there"})
    ddl.init("-mode r:2", store=store, rank=0, size=2)
    assert store["ddl/0"] == b"here"
    assert fake.options == b"-mode r:2"
    assert len(job._memberships) == 1  # others may read rank 0's store later


def test_a_later_start_lets_the_former_store_go(fake: FakeLibrary) -> None:
    first = Dictionary({"ddl/1": b"there"})
    gone = weakref.ref(first)
    ddl.init(store=first, rank=0, size=2)
    del first
    with pytest.raises(ddl.TransportError):  # libddl may have either now
        ddl.init(store=Dictionary(), rank=0, size=2)
    assert gone() is not None
    ddl.init(store=Dictionary({"ddl/1": b"there"}), rank=0, size=2)
    gc.collect()
    assert gone() is None
    assert len(job._memberships) == 1


def test_what_the_store_raises_init_raises(fake: FakeLibrary) -> None:
    class Gone(Dictionary):
        def get(self, key: str) -> bytes:  # type: ignore[override]
            raise ConnectionError("the store is gone")

    with pytest.raises(ConnectionError, match="the store is gone") as raised:
        ddl.init(store=Gone(), rank=0, size=2)
    assert isinstance(raised.value.__cause__, ddl.TransportError)
    with pytest.raises(ddl.TransportError):  # the library's own, if the store is well
        ddl.init(store=Dictionary(), rank=0, size=2)


TORCHRUN = """
import torch.distributed as dist
from ddl import membership

store, rank, size = membership.from_torch()
store.set(f"{rank}", f"rank {rank} of {size}")
said = [store.get(f"{other}").decode() for other in range(size)]
dist.init_process_group("gloo")  # beside it, as a script of Horovod's may
again, *place = membership.from_torch()
assert place == [rank, size], place
again.set("again", "2")
dist.barrier()
dist.destroy_process_group()
print(", ".join(said) + "\\n", end="", flush=True)  # at once: the ranks share the output
"""


def test_the_store_of_torchruns_agent_is_found(command: Callable[..., object], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TORCHRUN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = command([*torchrun, str(script)], timeout=100)
    assert done.returncode == 0, done.stdout  # type: ignore[attr-defined]
    assert done.stdout.count("rank 0 of 2, rank 1 of 2") == 2, done.stdout  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("environment", "mpi"),
    [
        ({}, False),
        ({"OMPI_COMM_WORLD_RANK": "0"}, True),
        ({"PMI_RANK": "0", "DDL_TRANSPORT": "auto"}, True),
        ({"PMIX_RANK": "0", "DDL_TRANSPORT": "tcp"}, False),
        ({"DDL_TRANSPORT": "mpi"}, True),
        ({"OMPI_COMM_WORLD_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}, False),
        ({"RANK": "0", "WORLD_SIZE": "2"}, False),
    ],
)
def test_mpi_knows_a_process_that_its_launcher_started(environment: dict[str, str], mpi: bool) -> None:
    assert under_mpi(environment) == mpi
