"""When work on the virtual cluster counts, on fake clusters whose links are chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from harness import BenchError, steady
from runs import Goodput, Run, Scenario

from testbed import Topology


class Cluster:
    """Its links' goodput, calibration by calibration; counts what is made and what is done."""

    def __init__(self, goodputs: Sequence[float]) -> None:
        self.left = [Goodput(link=one, uplink=one / 2) for one in goodputs]
        self.made: list[Topology] = []
        self.done = 0
        self.told: list[str] = []

    def steady(self) -> Run[Scenario]:
        @contextmanager
        def running(topology: Topology) -> Iterator[Cluster]:
            self.made.append(topology)
            yield self

        def calibrate(bed: Cluster) -> Goodput:
            return bed.left.pop(0)

        def work(scenario: Scenario, tell: object, bed: Cluster) -> list[dict[str, Any]]:
            bed.done += 1
            return [{"done": bed.done}]

        scenario = Scenario("x", "x", racks=(2, 2), ranks=1)
        return steady(scenario, work, self.told.append, running=running, calibrate=calibrate)


def test_work_counts_whose_links_held_still() -> None:
    cluster = Cluster([100, 96])
    held = cluster.steady()
    assert (held.records, held.tries, cluster.done) == ([{"done": 1}], 1, 1)
    assert (held.before.link, held.after.link) == (100, 96)
    assert [rack.uplink is not None for rack in cluster.made[0].racks] == [True, True]


def test_work_is_done_again_on_a_new_cluster_when_the_links_have_changed_meanwhile() -> None:
    cluster = Cluster([100, 90, 100, 100])
    held = cluster.steady()
    assert (held.records, held.tries, len(cluster.made)) == ([{"done": 2}], 2, 2)
    assert (held.before, held.after) == (Goodput(100, 50), Goodput(100, 50))
    assert [text for text in cluster.told if "changed" in text] == [
        "the links' goodput changed by 10% meanwhile: once more"
    ]


def test_links_that_never_hold_still_are_an_error() -> None:
    cluster = Cluster([100, 90, 100, 110, 100, 94])
    with pytest.raises(BenchError, match="x: the links' goodput was never the same within 5%"):
        cluster.steady()
    assert (cluster.done, cluster.left) == (3, [])
