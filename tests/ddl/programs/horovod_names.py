"""Calls that are matched by name, and errors of one call, after which the job goes on. Each part may run alone."""

from __future__ import annotations

import random
import sys
import time

import pytest
import torch

import ddl
import ddl.horovod.torch as hvd

torch.set_num_threads(1)
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def goes_on() -> None:
    total = hvd.allreduce(torch.tensor([RANK + 1.0]), op=hvd.Sum)
    assert total.item() == SIZE * (SIZE + 1) / 2, total


def orders() -> None:
    """Every rank begins the same calls in an order of its own."""
    a, b = torch.tensor([1.0 + RANK]), torch.tensor([10.0 * (1 + RANK)])
    named = {"a": a, "b": b}
    handles = {}
    for name in ("a", "b") if RANK == 0 else ("b", "a"):
        handles[name] = hvd.allreduce_async(named[name], name=name, op=hvd.Sum)
    whole = SIZE * (SIZE + 1) / 2
    assert [hvd.synchronize(handles[name]).item() for name in ("a", "b")] == [whole, 10 * whole]
    # Rank 0 waits for the second that it began, which the others wait for before they begin the first.
    if RANK == 0:
        first = hvd.allreduce_async(a, name="first", op=hvd.Sum)
        assert hvd.allreduce(b, name="second", op=hvd.Sum).item() == 10 * whole
        assert hvd.synchronize(first).item() == whole
    else:
        assert hvd.allreduce(b, name="second", op=hvd.Sum).item() == 10 * whole
        assert hvd.allreduce(a, name="first", op=hvd.Sum).item() == whole
    # Calls of all kinds, waited for in yet another order.
    for round_number in range(5):
        calls = {
            "sum": lambda: hvd.allreduce_async(a, name="x", op=hvd.Sum),
            "largest": lambda: hvd.allreduce_async(a, name="y", op=hvd.Max),
            "several": lambda: hvd.grouped_allreduce_async([a, b], name="z", op=hvd.Sum),
            "rows": lambda: hvd.allgather_async(torch.full((RANK + 1,), float(RANK)), name="x"),
            "copy": lambda: hvd.broadcast_async(b, SIZE - 1, name="x"),
            "parts": lambda: hvd.alltoall_async(torch.full((SIZE,), float(RANK)), name="x"),
            "share": lambda: hvd.reducescatter_async(torch.full((SIZE, 2), 1.0 + RANK), name="x", op=hvd.Sum),
        }
        own = random.Random(f"{round_number}, {RANK}")
        kinds = list(calls)
        own.shuffle(kinds)
        begun = {}
        for kind in kinds:
            begun[kind] = calls[kind]()
            time.sleep(own.choice([0, 0, 0.003]))
        own.shuffle(kinds)
        results = {kind: hvd.synchronize(begun[kind]) for kind in kinds}
        assert results["sum"].item() == whole
        assert results["largest"].item() == SIZE
        assert [its.item() for its in results["several"]] == [whole, 10 * whole]
        assert results["rows"].tolist() == [float(rank) for rank in range(SIZE) for _ in range(rank + 1)]
        assert results["copy"].item() == 10.0 * SIZE
        assert results["parts"][0].tolist() == [float(rank) for rank in range(SIZE)]
        assert results["share"].tolist() == [[whole, whole]]
    # One that rank 0 begins long before the others, while all make calls without names, which go by their order.
    late = hvd.allreduce_async(a, name="late", op=hvd.Sum) if RANK == 0 else None
    for step in range(50):
        assert hvd.allreduce(a + step, op=hvd.Sum).item() == whole + step * SIZE
    late = late or hvd.allreduce_async(a, name="late", op=hvd.Sum)
    assert hvd.synchronize(late).item() == whole


def mismatches() -> None:
    """An error of one call on every rank, which leaves its tensor alone."""
    last = SIZE - 1
    plain = torch.full((3,), 1.0 + RANK)
    odd: dict[str, tuple[object, str]] = {
        "shape": (lambda: hvd.allreduce(torch.ones(4 if last == RANK else 3)), "float32 of shape"),
        "same size": (lambda: hvd.allreduce(torch.ones((3, 2) if last == RANK else (2, 3))), r"of shape \(3, 2\)"),
        "type": (lambda: hvd.allreduce(plain.double() if last == RANK else plain), "float64 of shape"),
        "operation": (lambda: hvd.allreduce(plain, op=hvd.Max if last == RANK else hvd.Sum), "Max"),
        "factor": (lambda: hvd.allreduce(plain, prescale_factor=2.0 if last == RANK else 1.0), "2"),
        "root": (lambda: hvd.broadcast(plain, RANK), "root 0"),
        "broadcast's shape": (lambda: hvd.broadcast(torch.ones(4 if last == RANK else 3), 0), r"of shape \(4,\)"),
        "rows": (lambda: hvd.allgather(torch.ones(2, 4 if last == RANK else 3)), r"of shape \(2, 4\)"),
        "gathered type": (lambda: hvd.allgather(plain.double() if last == RANK else plain), "float64"),
        "share": (lambda: hvd.reducescatter(torch.ones(5 if last == RANK else 4)), r"of shape \(5,\)"),
        "alltoall's": (lambda: hvd.alltoall(torch.ones(SIZE, 2 if last == RANK else 3)), r"of shape \(\d, 2\)"),
        "call": (lambda: hvd.barrier() if last == RANK else hvd.allreduce(plain), "called barrier"),
        "group": (lambda: hvd.grouped_allreduce([plain] * (2 if last == RANK else 3)), "float32"),
        "set": (lambda: hvd.add_process_set([0] if last == RANK else [last]), "add_process_set"),
    }
    for what, (call, words) in odd.items():
        with pytest.raises(ddl.MismatchError, match=words) as found:
            call()
        assert isinstance(found.value, RuntimeError), what
        assert isinstance(found.value, hvd.HorovodInternalError), what
        other = 1 if what == "root" else last
        assert f"rank {other} " in str(found.value), (what, found.value)
        goes_on()
    assert plain.tolist() == [1.0 + RANK] * 3
    handle = hvd.allreduce_async_(plain, op=hvd.Max if last == RANK else hvd.Sum, prescale_factor=3.0)
    with pytest.raises(hvd.HorovodInternalError):
        hvd.synchronize(handle)
    assert hvd.poll(handle)
    assert plain.tolist() == [1.0 + RANK] * 3, "a call that failed has changed its tensor"
    goes_on()


def duplicates() -> None:
    """A name may stand for one call at a time."""
    data = torch.full((5,), 1.0 + RANK)

    def twice(begin: object) -> object:
        handle = begin()
        with pytest.raises(ValueError, match=r"'twice' .*in flight"):
            begin()
        return handle

    for begin in (
        lambda: hvd.allreduce_async(data, name="twice", op=hvd.Sum),
        lambda: hvd.allgather_async(data, name="twice"),
        lambda: hvd.broadcast_async(data, 0, name="twice"),
    ):
        handle = twice(begin) if RANK == 0 else None
        hvd.barrier()
        handle = handle or begin()
        first = hvd.synchronize(handle)
        again = hvd.synchronize(begin())  # it is free again
        assert torch.equal(first, again)
    goes_on()


def absences() -> None:
    """A name that one rank never calls: an error of that call within DDL_TIMEOUT. Calls go on meanwhile and after."""
    began = time.monotonic()
    handle = None if RANK == 1 else hvd.allreduce_async(torch.ones(2), name="forgotten")
    while True:
        hvd.allreduce(torch.ones(2), name="known")
        if hvd.allreduce(torch.tensor([time.monotonic() - began]), op=hvd.Max).item() >= 1:
            break
    if RANK != 1:
        with pytest.raises(ddl.RankTimeoutError, match=r"allreduce 'forgotten'.*rank 1 has not called it; its last"):
            hvd.synchronize(handle)
        assert time.monotonic() - began < 10
    hvd.barrier()
    goes_on()


def lateness() -> None:
    """A rank that is later than DDL_TIMEOUT has an error of its own, and its next call meets the others' next."""
    beside = None
    if RANK == 1:
        beside = hvd.allreduce_async(torch.ones(1), name="beside")  # until it ends, this rank takes part in rounds
        time.sleep(5)
    words = "rank 1 called .* too late" if RANK == 1 else "rank 1 has not called it"
    for step in range(4):
        handle = hvd.allreduce_async(torch.tensor([10.0**step]), name="late", op=hvd.Sum)
        if step > 0:
            assert hvd.synchronize(handle).item() == SIZE * 10**step
            continue
        with pytest.raises(ddl.RankTimeoutError, match=words):
            hvd.synchronize(handle)
    if beside is not None:
        with pytest.raises(ddl.RankTimeoutError, match="call the same names"):
            hvd.synchronize(beside)
    goes_on()


def miscounts() -> None:
    """After a call without a name was given up no other can be matched: a late one and one left out look the same."""
    if RANK == 1:
        beside = hvd.allreduce_async(torch.ones(1), name="beside")  # until it ends, this rank takes part in rounds
        time.sleep(5)
        with pytest.raises(ddl.RankTimeoutError, match="call the same names"):
            hvd.synchronize(beside)
    for _ in range(3):
        with pytest.raises(ddl.RankTimeoutError, match=r"rank 1 has not called it.* no other call without a name"):
            hvd.allreduce(torch.ones(1))
    assert hvd.allreduce(torch.ones(1), name="with a name", op=hvd.Sum).item() == SIZE


def joins() -> None:
    """What does not go on without a rank that has joined is an error of its caller, at once; both go on."""
    for call, name in (
        (lambda: hvd.allgather(torch.ones(3)), "allgather"),
        (lambda: hvd.broadcast(torch.ones(3), 1), "broadcast"),
        (lambda: hvd.alltoall(torch.ones(SIZE)), "alltoall"),
        (lambda: hvd.reducescatter(torch.ones(SIZE)), "reducescatter"),
        (lambda: hvd.barrier(), "barrier"),
        (lambda: hvd.add_process_set([1]), "add_process_set"),
    ):
        if RANK != 0:
            total = hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum)
            while total.item() == SIZE:  # until rank 0 has joined
                total = hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum)
            began = time.monotonic()
            with pytest.raises(ddl.UnsupportedError, match=f"ranks? .*{name}.*after rank 0 had joined"):
                call()
            assert time.monotonic() - began < 5
        else:
            hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum)
        assert hvd.join() > 0
        goes_on()


def optimizers() -> None:
    """Parameters of other shapes on one rank: an error of that step, on every rank."""
    weight = torch.nn.Parameter(torch.ones(4 if RANK == SIZE - 1 else 3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    weight.sum().backward()
    with pytest.raises(hvd.HorovodInternalError, match=r"of shape \(4,\)"):
        optimizer.step()
    goes_on()


parts = {
    its.__name__: its for its in (orders, mismatches, duplicates, joins, optimizers, absences, lateness, miscounts)
}
for part in sys.argv[1:] or parts:
    parts[part]()
hvd.shutdown()
print(f"rank {RANK}: all right", flush=True)
