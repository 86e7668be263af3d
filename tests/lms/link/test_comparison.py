"""Two machines side by side: ratios, and a recorded step on each."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest

from lms.core.plan import make_plan, table
from lms.core.trace import Access, Tensor
from lms.link import catalogue
from lms.link.comparison import SLOWER, at_speed, batch, compare, predict
from lms.link.profile import MeasuredLink, Profile
from lms.link.series import Series
from lms.trace import Trace

MB, GB = 10**6, 10**9


def step(*, device: str = "NVIDIA V100", other: int = 300 * MB, seconds: float = 1e-3) -> Trace:
    """Eight layers that save 100 MB each, on a device that holds 300 MB beside."""
    accesses = [Access("write", at, seconds, other) for at in range(8)]
    accesses += [Access("read", at, seconds, other) for at in reversed(range(8))]
    tensors = tuple(Tensor(100 * MB, 16 - at, let_go=at + 1) for at in range(8))
    return Trace(tensors, tuple(accesses), device=device, capacity=GB, tail=seconds, tail_other=other)


def machine(name: str, rate: float, *, kind: str = "gpu", device: int = GB, below: int = 100 * GB) -> Profile:
    series = (Series("out", "pinned", rate, 1e-5), Series("back", "pinned", rate, 1e-5))
    link = MeasuredLink("x", kind, "a link", series)  # type: ignore[arg-type]
    capacity = {"device": device, "host": below} if kind == "gpu" else {"host": device, "file": below}
    return Profile(name, "measured", (link,), capacity=capacity)


def test_each_kind_of_link_has_a_row_with_its_ratio() -> None:
    rows = {(row.kind, row.direction): row for row in compare(catalogue.load("ac922-4"), catalogue.load("pcie-3")).rows}
    assert rows["gpu", "out"].ratio == pytest.approx(68 / 12)
    assert rows["peer", "out"].other is None
    assert rows["peer", "out"].ratio is None


def test_of_several_links_of_a_kind_the_slowest_counts() -> None:
    fast, slow = machine("a", 9e9).links[0], machine("a", 5e9).links[0]
    both = Profile("a", "measured", (replace(fast, name="gpu0"), replace(slow, name="gpu1")))
    (out, _) = compare(both, machine("b", 5e9)).rows
    assert out.ratio == 1.0
    assert predict(both, "gpu", step()).link.out == 5e9


def test_a_copy_between_nodes_is_no_copy_within_one() -> None:
    def link(name: str, kind: str, rate: float) -> MeasuredLink:
        return MeasuredLink(name, kind, "", (Series("copy", "1 thread", rate, 0.0),))  # type: ignore[arg-type]

    nodes = Profile("a", "measured", (link("node0", "memory", 90e9), link("node1-node0", "numa", 7e9)))
    alone = Profile("b", "measured", (link("memory", "memory", 45e9),))
    memory, numa = compare(nodes, alone).rows
    assert (memory.kind, memory.ratio) == ("memory", 2.0)
    assert (numa.kind, numa.other) == ("numa", None)


def test_the_faster_link_never_takes_longer() -> None:
    ours, theirs = compare(machine("a", 70e9), machine("b", 10e9), step()).step  # type: ignore[misc]
    assert all(one.seconds <= other.seconds for one, other in zip(ours.shares, theirs.shares, strict=True))
    assert ours.shares[-1].seconds < theirs.shares[-1].seconds
    assert ours.largest.hidden > theirs.largest.hidden  # type: ignore[union-attr]


def test_a_machine_beside_itself_is_equal() -> None:
    found = compare(machine("a", 10e9), machine("a", 10e9), step())
    assert [row.ratio for row in found.rows] == [1.0, 1.0]
    assert found.step is not None
    assert found.step[0] == found.step[1]


def test_the_prediction_is_the_simulators() -> None:
    trace = step()
    prediction = predict(machine("a", 10e9), "gpu", trace)
    plans = table(trace, prediction.link)
    assert [one.seconds for one in prediction.shares] == [plan.forecast.seconds for plan in plans]
    assert prediction.shares[0].moved == 0
    assert prediction.shares[-1].slowdown > 1.0


def test_the_largest_batches_stand_in_their_order() -> None:
    largest = predict(machine("a", 20e9, device=GB), "gpu", step()).largest
    assert largest is not None
    # 0.9 GB may be filled, 0.3 are not saved bytes and do not grow: three quarters of the 0.8 GB that are saved fit.
    assert largest.plain == pytest.approx(0.75, rel=0.02)
    assert largest.plain <= largest.hidden <= largest.most


def test_a_slow_link_hides_nothing_more_than_plain() -> None:
    largest = predict(machine("a", 1e6), "gpu", step()).largest
    assert largest is not None
    assert largest.hidden == pytest.approx(largest.plain, rel=0.03)
    assert largest.most > 2 * largest.plain


def test_what_is_swapped_must_fit_below() -> None:
    room = predict(machine("a", 20e9, below=100 * GB), "gpu", step()).largest
    little = predict(machine("a", 20e9, below=100 * MB), "gpu", step()).largest
    assert room is not None
    assert little is not None
    assert little.most < room.most


def test_without_the_machines_memory_there_is_no_largest() -> None:
    assert predict(replace(machine("a", 1e9), capacity={}), "gpu", step()).largest is None


def test_a_device_that_holds_nothing_has_none() -> None:
    largest = predict(machine("a", 20e9, device=MB), "gpu", step()).largest
    assert largest is not None
    assert (largest.plain, largest.hidden, largest.most) == (0.0, 0.0, 0.0)


def test_a_step_of_a_cpu_is_compared_over_files() -> None:
    both = [
        Profile("x", "measured", (*machine("x", 5e9).links, replace(machine("x", 1e9, kind="file").links[0], name="f")))
        for _ in range(2)
    ]
    assert [side.kind for side in compare(*both, step(device="cpu")).step or ()] == ["file", "file"]
    assert [side.kind for side in compare(*both, step()).step or ()] == ["gpu", "gpu"]


def test_machines_without_a_link_in_common_are_compared_by_their_own_and_it_is_said() -> None:
    found = compare(machine("a", 1e9, kind="file"), machine("b", 9e9), step())
    assert found.step is not None
    assert [side.kind for side in found.step] == ["file", "gpu"]
    assert "no link of one kind" in found.notes[0]


def test_a_machine_with_nothing_to_swap_over_is_named() -> None:
    with pytest.raises(ValueError, match="b: no link to swap over"):
        compare(machine("a", 1e9), machine("b", 1e9, kind="peer"), step())


def test_faster_computation_takes_less_time_and_hides_less() -> None:
    trace = step()
    assert at_speed(trace, 10.0).seconds == pytest.approx(trace.seconds / 10)
    slow, fast = (compare(machine("a", 10e9), machine("b", 10e9), trace, speedup=x).step for x in (0.01, 10.0))
    assert slow is not None
    assert fast is not None
    assert slow[0].shares[-1].slowdown < fast[0].shares[-1].slowdown


def test_a_larger_batch_has_more_of_all_but_what_it_holds_anyway() -> None:
    trace = replace(step(), tail_other=500 * MB)
    twice = batch(trace, 2.0)
    assert twice.saved == 2 * trace.saved
    assert twice.seconds == pytest.approx(2 * trace.seconds)
    assert twice.accesses[0].other == trace.accesses[0].other  # parameters
    assert twice.tail_other == 700 * MB  # 300 that stay, and twice the 200 beside them


def test_the_json_has_every_figure(traces: ModuleType) -> None:
    document = compare(machine("a", 2e9), machine("b", 1e9), step()).to_dict()
    assert document["format"] == "lms-link-comparison-1"
    assert document["rows"][0]["rates"] == [2e9, 1e9]  # type: ignore[index]
    assert document["rows"][0]["ratio"] == 2.0  # type: ignore[index]
    assert len(document["step"]) == 2  # type: ignore[arg-type]


def test_hidden_is_what_takes_a_tenth_longer_than_its_computation_at_most() -> None:
    prediction = predict(machine("a", 60e9), "gpu", step())
    largest = prediction.largest
    assert largest is not None
    assert largest.plain < largest.hidden < largest.most

    def slowdown(times: float) -> float:
        larger = batch(step(), times)
        return make_plan(larger, prediction.link, limit=int(0.9 * GB)).forecast.seconds / larger.seconds

    assert slowdown(largest.hidden) <= SLOWER == 1.10 < slowdown(1.02 * largest.hidden)
