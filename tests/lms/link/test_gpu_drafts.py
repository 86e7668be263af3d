"""Which links of GPUs are measured, and under which names: on a PyTorch that a test imitates."""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from lms.errors import SpillError  # noqa: E402
from lms.link import gpu_drafts, nvml  # noqa: E402
from lms.link.draft import run  # noqa: E402
from lms.link.measure import QUICK_SECONDS, SECONDS  # noqa: E402
from lms.link.profile import Absence  # noqa: E402
from lms.link.sweep import GB, MB, QUICK_SIZES, SIZES  # noqa: E402
from lms.memory import machine  # noqa: E402


def uuid(index: int) -> str:
    return f"00000000-0000-0000-0000-{index:012d}"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch):
    """A PyTorch that sees these GPUs, in its own order."""

    def see(*uuids: str, free: object = 80 * GB, peers: bool = True, memory: int = 64 * GB) -> None:
        def info(index: int) -> tuple[int, int]:
            found = free[index] if isinstance(free, list) else free
            if isinstance(found, Exception):
                raise found
            return found, 80 * GB

        properties = [SimpleNamespace(uuid=one, name=f"GPU of {one[-2:]}", total_memory=80 * GB) for one in uuids]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(uuids))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
        monkeypatch.setattr(torch.cuda, "mem_get_info", info)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: peers)
        monkeypatch.setattr(machine, "memory_room", lambda share: memory)

    return see


def drafts(replay: ModuleType, name: str, absent: list[Absence] | None = None):
    gpus = nvml.look(replay.Replay(name)).gpus
    return gpu_drafts.of(gpus, SIZES, [] if absent is None else absent)


def test_links_bear_the_drivers_numbers_whatever_pytorchs_are(cuda, replay: ModuleType) -> None:
    cuda(uuid(1), uuid(0))
    first, second, pair = drafts(replay, "h100")
    assert [first.link.name, second.link.name, pair.link.name] == ["gpu1", "gpu0", "gpu1-gpu0"]
    assert first.link.ceiling.out == pytest.approx(63e9, rel=1e-3)
    assert "PCIe 5 x16" in first.link.what
    assert pair.link.ceiling.out == pytest.approx(18 * 26.562e9)


def test_a_gpu_is_measured_pinned_and_pageable_each_way_and_pinned_both_ways(cuda, replay: ModuleType) -> None:
    cuda(uuid(0))
    (draft,) = drafts(replay, "t4_x8")
    found = [(task.direction, task.via()) for task in draft.tasks]
    for way in ("out", "back", "both"):
        assert (way, "pinned") in found
    assert {("out", "pageable"), ("back", "pageable")} <= set(found)
    assert any("x8 lanes at most" in note for note in draft.link.notes)


def test_with_several_nodes_pinned_memory_lies_on_each_and_the_near_one_counts(
    cuda, replay: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda(uuid(0))
    monkeypatch.setattr(gpu_drafts.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(machine, "nodes", lambda: (machine.Node(0, (0,), 1, ()), machine.Node(1, (1,), 1, ())))
    gpus = [gpu_drafts.Gpu(0, "x", uuid=f"GPU-{uuid(0)}", node=1)]
    (draft,) = gpu_drafts.of(gpus, SIZES, [])
    assert [(task.direction, task.via()) for task in draft.tasks] == [
        ("out", "pinned"), ("back", "pinned"), ("both", "pinned"),
        ("out", "pinned, node 0"), ("back", "pinned, node 0"),
        ("out", "pageable"), ("back", "pageable"),
    ]  # fmt: skip


def test_peers_that_cannot_reach_each_other_go_through_the_host_and_it_is_said(cuda, replay: ModuleType) -> None:
    cuda(uuid(0), uuid(1), peers=False)
    pair = drafts(replay, "h100")[-1]
    assert "through host memory" in pair.link.what
    assert pair.tasks[0].via() == "host"


def test_a_gpu_that_nvml_does_not_know_has_pytorchs_number_and_no_ceiling(cuda, replay: ModuleType) -> None:
    cuda("MIG-1", uuid(1))
    instance, whole, _ = drafts(replay, "h100")
    assert (instance.link.name, whole.link.name) == ("cuda0", "gpu1")
    assert instance.link.ceiling is None


def test_without_nvml_the_links_are_measured_all_the_same(cuda, replay: ModuleType) -> None:
    cuda(uuid(0))
    (draft,) = drafts(replay, "no_library")
    assert draft.link.name == "gpu0"
    assert draft.link.ceiling is None
    assert draft.tasks


def test_a_full_gpu_gets_a_smaller_sweep_or_none_and_it_is_said(cuda, replay: ModuleType) -> None:
    cuda(uuid(0), free=GB)
    (draft,) = drafts(replay, "t4_x8")
    assert draft.tasks[0].sizes[-1] == 64 * MB
    assert any("smaller sweep, up to 67.1 MB" in note for note in draft.link.notes)
    cuda(uuid(0), free=1000)
    absent: list[Absence] = []
    assert drafts(replay, "t4_x8", absent) == []
    assert "too little" in absent[0].why


@pytest.mark.parametrize("busy", [0, MB, RuntimeError("CUDA error: out of memory\nmore")])
def test_one_busy_gpu_takes_nothing_from_the_others(cuda, replay: ModuleType, busy: object) -> None:
    cuda(uuid(0), uuid(1), free=[busy, 79 * GB])
    absent: list[Absence] = []
    (draft,) = drafts(replay, "h100", absent)
    assert draft.link.name == "gpu1"
    assert draft.tasks[0].sizes == SIZES
    (one,) = absent
    assert one.what.startswith("GPU copies of ")
    assert "\n" not in one.why


def test_a_pair_copies_what_the_smaller_of_both_has_room_for(cuda, replay: ModuleType) -> None:
    cuda(uuid(0), uuid(1), free=[79 * GB, GB])
    one, other, pair = drafts(replay, "h100")
    assert [draft.tasks[0].sizes[-1] for draft in (one, other, pair)] == [GB, 64 * MB, 64 * MB]
    assert "smaller sweep" in pair.link.notes[0]
    assert one.link.notes == ()


@pytest.mark.parametrize("nodes", [1, 2])
def test_all_pinned_and_pageable_memory_is_within_the_quarter(
    cuda, replay: ModuleType, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    room = 4 * GB
    monkeypatch.setattr(gpu_drafts.os, "sched_getaffinity", lambda _: set(range(nodes)))
    monkeypatch.setattr(machine, "nodes", lambda: tuple(machine.Node(at, (at,), 1, ()) for at in range(nodes)))
    cuda(uuid(0), memory=room)
    (draft,) = drafts(replay, "t4_x8")
    assert (2 * nodes + 1) * draft.tasks[0].sizes[-1] <= room


def test_that_a_link_sleeps_is_not_said_of_copies_that_wake_it(cuda, replay: ModuleType) -> None:
    cuda(uuid(0))
    assert any("asleep" in warning for warning in nvml.look(replay.Replay("t4_x8")).gpus[0].warnings())
    (draft,) = drafts(replay, "t4_x8")
    assert not any("asleep" in note for note in draft.link.notes)


def test_eight_gpus_on_two_nodes_are_measured_in_the_time(
    cuda, replay: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    locked: list[tuple[int, ...]] = []

    class Fake:
        def __init__(self, largest: int, *, near: tuple[int, ...]) -> None:
            now[0] += 2.0  # to lock and touch two GB
            locked.append(near)
            self.tensors = (range(largest), range(largest))

        def close(self) -> None:
            pass

    def copy(nbytes: int) -> float:
        now[0] += nbytes / 50e9
        return nbytes / 50e9

    monkeypatch.setattr(gpu_drafts, "Pinned", Fake)
    monkeypatch.setattr(gpu_drafts, "CudaStreams", lambda device: None)
    monkeypatch.setattr(gpu_drafts, "gpu_copies", lambda *_: nullcontext(copy))
    monkeypatch.setattr(gpu_drafts, "peer_copies", lambda *_: nullcontext(copy))
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)
    monkeypatch.setattr(gpu_drafts.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(machine, "nodes", lambda: (machine.Node(0, (0,), 1, ()), machine.Node(1, (1,), 1, ())))
    cuda(*map(uuid, range(8)))
    gpus = [gpu_drafts.Gpu(at, "x", uuid=f"GPU-{uuid(at)}", node=at // 4) for at in range(8)]
    for sizes, seconds, most in ((SIZES, SECONDS, 60.0), (QUICK_SIZES, QUICK_SECONDS, 10.0)):
        now[0] = 0.0
        locked.clear()
        absent: list[Absence] = []
        links = run(gpu_drafts.of(gpus, sizes, absent), seconds, absent, lambda: now[0])
        assert (len(links), absent) == (8 + 28, [])
        assert all(series.points for link in links for series in link.series)
        assert sorted(locked) == [(0,), (1,)]
        assert now[0] < most


def test_a_pytorch_that_sees_none_of_the_drivers_gpus_is_named(cuda, replay: ModuleType) -> None:
    cuda()
    absent: list[Absence] = []
    assert drafts(replay, "h100", absent) == []
    assert "sees no GPU" in absent[0].why


def test_pinned_memory_is_locked_once_for_tasks_near_the_same_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    closed: list[tuple[int, ...]] = []

    class Fake:
        def __init__(self, largest: int, *, near: tuple[int, ...]) -> None:
            if near == (9,):
                raise SpillError("no more")
            self._near = near
            made.append(near)

        def close(self) -> None:
            closed.append(self._near)

    monkeypatch.setattr(gpu_drafts, "Pinned", Fake)
    pinned = gpu_drafts._Pinned(MB)
    assert pinned.near((0,)) is pinned.near((0,))
    pinned.near((1,))
    pinned.near((0,))
    assert (made, closed) == ([(0,), (1,)], [])
    with pytest.raises(SpillError):
        pinned.near((9,))
    pinned.close()
    pinned.close()
    assert sorted(closed) == [(0,), (1,)]
