"""DTensors under LMS: each rank's part moves, and every bit and every error is plain autograd's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lms.torch.session import Session

Make = Callable[..., Session]
PROGRAM = Path(__file__).with_name("tensor_parallel.py")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """One rank that is the whole job."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(mesh: DeviceMesh, *shape: int) -> DTensor:
    torch.manual_seed(5)
    return distribute_tensor(torch.randn(*shape), mesh, [Shard(0)])


def bits(tensors: list[Tensor]) -> list[tuple[object, ...]]:
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return [(type(t), t.shape, getattr(t, "placements", None), p.tolist()) for t, p in zip(tensors, parts, strict=True)]


def chain(w: DTensor) -> list[Tensor]:
    """Saves results, views, one storage twice, and one that an in-place operation changed before it was saved."""
    x = torch.tanh(w @ w.t())
    y = x.view(-1).exp().view(8, 8) * x.t()
    z = y.add(1.0).relu_()
    loss = (z * z.t()).sum() + (x * x).sum() + x.redistribute(w.device_mesh, [Replicate()]).exp().sum()
    (grad,) = torch.autograd.grad(loss, w)
    return [loss, grad]


def test_gradients_are_those_of_plain_training_and_every_byte_moves(lms: Make, mesh: DeviceMesh) -> None:
    w = sharded(mesh, 8, 8).requires_grad_()
    theirs = bits(chain(w))
    with lms(verify=True) as session:
        for _ in range(4):
            assert bits(chain(w)) == theirs
        stats = session.stats()
    assert stats["kept_types"] == 0
    assert stats["swapped_out"] >= stats["recorded"] - 4 * stats["largest"] > 0, "all but what is in hand at the turn"
    assert stats["kept_parameters"] > 0, "the weight and its transpose stay"


def test_views_of_one_dtensor_are_one_record_that_is_written_once(lms: Make, mesh: DeviceMesh) -> None:
    w = sharded(mesh, 8, 8).requires_grad_()
    with lms() as session:
        for _ in range(2):
            chain(w)
        trace = session.trace
    assert trace is not None
    kinds = [access.kind for access in trace.accesses]
    assert "hold" in kinds
    assert kinds.count("write") == len(trace.tensors)


def test_what_the_script_does_not_keep_is_planned_for(lms: Make, mesh: DeviceMesh) -> None:
    w = sharded(mesh, 8, 8).requires_grad_()
    with lms(budget=1 << 40) as session:
        x = torch.tanh(w * 1.0)
        y = torch.exp(x)
        (y * y).sum().backward()
        assert session.trace is not None
        assert [record.pinned for record in session.trace.records] == [True, True], "x and y are this test's"
        torch.exp(torch.tanh(w * 1.0).exp()).sum().backward()
        assert [record.pinned for record in session.trace.records] == [False, False, False]


def test_views_of_one_dtensor_move_once(lms: Make, mesh: DeviceMesh) -> None:
    w = sharded(mesh, 8, 8).requires_grad_()
    with lms() as session:
        x = torch.tanh(w)
        loss = sum((x.view(64) * x.view(64)).sum() + (x * x).sum() for _ in range(3))
        loss.backward()
        assert session.stats()["recorded"] == 8 * 8 * 4


def test_a_change_in_place_since_it_was_saved_is_an_error(lms: Make, mesh: DeviceMesh) -> None:
    w = sharded(mesh, 8, 8).requires_grad_()

    def late(x: Tensor) -> None:
        with torch.no_grad():
            x.mul_(2)

    for change in (late, lambda x: late(x.view(64)), lambda x: late(x.detach())):
        with lms():
            x = torch.exp(w)
            more = [torch.exp(x * k) for k in range(3)]  # so that it was swapped by then
            loss = x.sum() + sum(y.sum() for y in more)
            change(x)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            del x, more, loss


def test_what_is_saved_after_a_change_in_place_is_what_comes_back(lms: Make, mesh: DeviceMesh) -> None:
    """The local tensor's own version does not tell, so two saves around a change are two records."""
    w = sharded(mesh, 8, 8).requires_grad_()

    def run() -> list[Tensor]:
        x = w * 2
        dropped = x * x  # saves x as it is now, and is never used
        with torch.no_grad():
            x.add_(1)
        loss = (x * x).sum()
        del x  # as long as somebody has it, nothing needs to come back
        grad = torch.autograd.grad(loss, w)[0]
        del dropped
        return [loss, grad]

    theirs = bits(run())
    with lms(verify=True) as session:
        for _ in range(3):
            assert bits(run()) == theirs
    assert session.stats()["swapped_out"] > 0


def test_another_dtensor_over_the_same_storage_has_a_record_of_its_own(lms: Make, mesh: DeviceMesh) -> None:
    w = sharded(mesh, 8, 8).requires_grad_()

    def run() -> list[Tensor]:
        x = w * 2
        dropped = x * x
        with torch.no_grad():
            x.add_(1)
            local = x.to_local()
        again = DTensor.from_local(local, mesh, [Shard(0)])  # version 0, as x was when it was saved
        loss = (w * again).sum()
        del x, local, again
        grad = torch.autograd.grad(loss, w)[0]
        del dropped
        return [loss, grad]

    theirs = bits(run())
    with lms(verify=True):
        for _ in range(3):
            assert bits(run()) == theirs


def test_parameters_that_are_dtensors_stay(lms: Make, mesh: DeviceMesh) -> None:
    net = nn.Linear(8, 8)
    net.weight = nn.Parameter(sharded(mesh, 8, 8))
    net.bias = nn.Parameter(sharded(mesh, 8))
    for models in ((), (net,)):
        with lms(*models) as session:
            net(sharded(mesh, 4, 8).requires_grad_() * 1.0).sum().backward()
            stats = session.stats()
        assert stats["kept_parameters"] >= 8 * 8 * 4
        assert stats["recorded"] == 4 * 8 * 4, "the input alone"


def test_what_a_collective_may_still_be_making_stays(lms: Make, mesh: DeviceMesh) -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    local = AsyncCollectiveTensor(torch.randn(8, 8))
    pending = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    w = sharded(mesh, 8, 8).requires_grad_()
    with lms() as session:
        (w * pending).sum().backward()
        assert session.stats()["recorded"] == 0
        assert session.stats()["kept_types"] == 8 * 8 * 4


@pytest.mark.parametrize("backend", ["gloo", pytest.param("ddl", marks=pytest.mark.slow)])
def test_tensor_parallel_training_of_two_ranks_has_the_bits_of_plain(backend: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(PROGRAM), backend]
    if backend == "ddl":
        commands = [[sys.executable, "-m", "ddl.ddlrun", "-np", "2", *command]]
    else:
        store = f"file://{tmp_path / 'store'}"
        commands = [[*command, store, str(rank)] for rank in range(2)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env) for words in commands]
    lines = [line for rank in ranks for line in rank.communicate(timeout=110)[0].splitlines() if line[:1] == "{"]
    assert len(lines) == 2
    for stats in map(json.loads, lines):
        assert stats["same"]
        assert stats["kept_types"] == 0
        assert stats["swapped_out"] >= 0.9 * stats["recorded"] > 0
        assert stats["recorded"] > 4 * 300_000, "DTensors are most of what is saved"
