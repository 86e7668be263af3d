"""The GPU's pager over paper: blocks are there when the computation comes to them, whichever stream runs first."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lms.errors import UsageError
from lms.torch import backend, state
from lms.torch.cuda.pager import Block, CudaPager
from lms.torch.session import Session

SIZE = 4096
ORDERS = list(itertools.permutations(("compute", "out", "back")))
EVERYTHING = "activations,optimizer,parameters,gradients"


def made(pager: CudaPager, count: int) -> tuple[list[Block], list[Tensor]]:
    """Blocks, and the tensors that have them."""
    blocks = [pager.block(SIZE) for _ in range(count)]
    return blocks, [pager.memory(block) for block in blocks]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("room", [3, 5, 9])
def test_what_is_used_is_on_the_gpu_and_no_more_than_there_is_room_for(
    order: tuple[str, ...], room: int, paper: ModuleType
) -> None:
    streams = paper.PaperStreams(order)
    memory = paper.PaperManaged(streams)
    pager = CudaPager(streams, memory)
    pager.keep(room * SIZE)
    blocks, tensors = made(pager, 12)
    course = [(block,) for block in (*blocks, *reversed(blocks), *blocks)]
    missing: list[int] = []

    def step(known: bool) -> None:
        for position, used in enumerate(course):
            pager.reach(position if known else None, used)
            address = used[0].region.address
            streams.launch(lambda address=address: address in memory.on_gpu or missing.append(address))

    step(known=False)
    pager.expect(course)
    for _ in range(3):
        step(known=True)
    streams.finish()
    assert not missing
    assert memory.most <= room * SIZE
    usage = pager.usage()
    assert usage.tracked == 12 * SIZE
    assert usage.resident <= room * SIZE
    assert usage.out >= usage.back > 0
    assert len(tensors) == 12


def test_copies_run_beside_the_computation(paper: ModuleType) -> None:
    streams = paper.PaperStreams(("compute", "out", "back"))
    pager = CudaPager(streams, paper.PaperManaged(streams))
    pager.keep(16 * SIZE)
    blocks, _tensors = made(pager, 24)
    course = [(block,) for block in blocks]
    pager.expect(course)
    streams.finish()
    compute = streams.all["compute"]
    began, steps = compute.clock, 4
    for _ in range(steps):
        for position, used in enumerate(course):
            pager.reach(position, used)
            streams.launch(lambda: None, 2 * SIZE / paper.BANDWIDTH)  # half a copy a use would hide it
    streams.finish()
    ideal = steps * len(course) * 2 * SIZE / paper.BANDWIDTH
    assert compute.clock - began < 1.1 * ideal


@pytest.mark.parametrize("discards", [True, False])
def test_memory_of_tensors_that_are_gone_is_used_again_and_freed_at_the_end(discards: bool, paper: ModuleType) -> None:
    streams = paper.PaperStreams()
    memory = paper.PaperManaged(streams, discards=discards)
    pager = CudaPager(streams, memory)
    pager.keep(10 * SIZE)
    block = pager.block(SIZE, transient=True)
    first = pager.memory(block)
    address = first.data_ptr()
    assert pager.track(block, address)
    second = pager.memory(block)  # while the first lives on, as a gradient that the script keeps
    assert second.data_ptr() != address
    assert not pager.track(block, address)
    kept = second.data_ptr()
    del first, second
    third = pager.memory(block)
    assert third.data_ptr() == kept
    assert list(memory.sizes) == [kept]
    pager.stop()
    del third, block
    gc.collect()
    assert not memory.sizes


def test_freed_memory_is_written_out_only_if_the_driver_cannot_discard_it(paper: ModuleType) -> None:
    written = []
    for discards in (True, False):
        streams = paper.PaperStreams()
        pager = CudaPager(streams, paper.PaperManaged(streams, discards=discards))
        pager.keep(SIZE)
        blocks, tensors = made(pager, 1)
        tensors.clear()
        other = pager.block(SIZE)
        _tensor = pager.memory(other)
        written.append(pager.usage().out)
        del blocks
    assert written == [0, SIZE]


def test_nothing_is_asked_of_the_gpu_while_a_graph_is_captured_and_after_the_end(paper: ModuleType) -> None:
    streams = paper.PaperStreams()
    pager = CudaPager(streams, paper.PaperManaged(streams))
    blocks, _tensors = made(pager, 2)
    with streams.capture():
        assert pager.capturing()
    assert not pager.capturing()
    pager.stop()
    with streams.capture():  # it allows no call
        pager.reach(None, blocks)


def test_a_forked_child_frees_nothing_of_its_parents(monkeypatch: pytest.MonkeyPatch, paper: ModuleType) -> None:
    streams = paper.PaperStreams()
    memory = paper.PaperManaged(streams)
    pager = CudaPager(streams, memory)
    pager.stop()
    blocks, tensors = made(pager, 1)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        tensors.clear()
        blocks.clear()
        gc.collect()
    assert memory.sizes


# Whole trainings, on a CPU whose tensors move into such memory


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.layers[-1].weight = self.layers[0].weight
        self.layers[3].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.fixture
def managed(monkeypatch: pytest.MonkeyPatch, paper: ModuleType) -> Iterator[Any]:
    """The managed memory that sessions use."""
    streams = paper.PaperStreams()
    memory = paper.PaperManaged(streams, prompt=True)
    monkeypatch.setattr(state, "make_pager", lambda _: CudaPager(streams, memory))
    monkeypatch.setattr(CudaPager, "least", 1)
    yield memory
    gc.collect()
    streams.finish()
    assert not memory.sizes, "all is freed with the models"


def trained(make: Any, *, steps: int = 5, accumulated: int = 1, to_none: bool = True, **options: Any) -> list[Tensor]:
    torch.manual_seed(0)
    net = Net()
    optimizer = make([one for one in net.parameters() if one.requires_grad])
    session = Session(net, optimizer, **options) if options else None
    if session is not None:
        session.open()
    results, kept = [], []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=to_none)
        for _ in range(accumulated):
            loss = net(torch.full((4, 64), 0.1 * step)).square().mean()
            loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)  # uses that nobody foresees
        kept.append(net.layers[1].weight.grad)  # lives on
        optimizer.step()
        results.append(loss.detach().clone())
        if session is not None and step == 2:
            with session.pause(), torch.no_grad():
                net(torch.ones(4, 64))
    if session is not None:
        stats = session.stats()
        session.close()
        assert stats["state_out"] > 0
        assert stats["state_in"] > 0
    twin = Net()
    twin.load_state_dict(net.state_dict())
    return [*results, *kept, *twin.parameters(), *(one for s in optimizer.state.values() for one in s.values())]


MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw-loop": lambda p: torch.optim.AdamW(p, 1e-2, foreach=False),
}


@pytest.mark.parametrize("swap", ["parameters", "gradients", "parameters,gradients", EVERYTHING])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("loop", [{}, {"accumulated": 2}, {"to_none": False}])
def test_a_training_has_plains_bits(swap: str, maker: str, loop: dict[str, Any], managed: Any) -> None:
    plain = trained(MAKERS[maker], **loop)
    ours = trained(MAKERS[maker], **loop, budget=0, min_size=0, swap=swap)
    for one, other in zip(ours, plain, strict=True):
        assert torch.equal(one, other)


def test_what_a_former_session_moved_may_be_freed_in_the_next(managed: Any) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    for _ in range(3):
        with Session(net, optimizer, budget=0, min_size=0, swap=EVERYTHING):
            for step in range(3):
                net(torch.ones(4, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=step != 1)
                if step == 1:
                    optimizer.load_state_dict(optimizer.state_dict())
                    net.layers[2].weight.data = net.layers[2].weight.data * 2
    assert managed.sizes


def test_new_storages_take_the_memory_of_the_old_ones(managed: Any) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    sizes = []
    with Session(net, optimizer, budget=0, min_size=0, swap="parameters"):
        for _ in range(6):
            net(torch.ones(4, 64)).square().mean().backward()
            optimizer.step()
            for parameter in net.parameters():
                parameter.data = parameter.data - 0.1
            sizes.append(sum(managed.sizes.values()))
    assert sizes[-1] <= 2 * sizes[0]


def test_after_a_graph_was_captured_tensors_stay_where_they_are(managed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    with Session(net, budget=0, min_size=0, swap="parameters,gradients"):
        with monkeypatch.context() as capturing:
            capturing.setattr(CudaPager, "capturing", lambda _: True)
            net(torch.ones(4, 64)).sum().backward()
        addresses = [one.grad.data_ptr() for one in net.parameters() if one.grad is not None]
        net(torch.ones(4, 64)).sum().backward()
        assert [one.grad.data_ptr() for one in net.parameters() if one.grad is not None] == addresses


def test_sessions_may_follow_each_other(managed: Any) -> None:
    torch.manual_seed(0)
    net = Net()
    addresses = set()
    for _ in range(3):
        with Session(net, budget=0, min_size=0, swap="parameters") as session:
            net(torch.ones(4, 64)).sum().backward()
            assert session.stats()["state"] == sum({one.data_ptr(): one.nbytes for one in net.parameters()}.values())
        addresses.add(net.layers[2].weight.data_ptr())
    assert len(addresses) == 1
    assert managed.sizes


def test_a_gpu_without_managed_memory_is_refused(monkeypatch: pytest.MonkeyPatch, paper: ModuleType) -> None:
    class Unable:
        is_supported = False

        def __init__(self, _device: torch.device) -> None:
            pass

    monkeypatch.setattr(backend, "ManagedMemory", Unable)
    with pytest.raises(UsageError, match="concurrentManagedAccess"):
        backend.make_pager(paper.engine_on(paper.PaperStreams()))
