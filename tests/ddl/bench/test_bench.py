"""The whole: on this host with real peers, and on the virtual cluster in small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from scenarios import ALL, Scenario, Target
from shaped import Goodput, Run
from verdicts import judge, lines

from ddl import ddlrun
from ddl.bench.contestants import DDL, FLAT

ROOT = Path(__file__).parents[3]


def record(**seconds: list[float]) -> dict[str, object]:
    names = {"ours": DDL, "flat": FLAT}
    size = 64 << 20
    turns = [
        {"contestant": names.get(name, name), "bytes": size, "repeats": 1, "seconds": found}
        for name, found in seconds.items()
    ]
    return {"turns": turns}


def run_of(*targets: Target, orders: tuple[tuple[int, ...], ...] = (), records: list[dict[str, object]]) -> Run:
    scenario = Scenario("x", "x", racks=(2, 2), ranks=2, sizes="64MiB", orders=orders, targets=targets)
    link = Goodput(link=24e6, uplink=12e6)
    keys = orders or ((0, 1, 2, 3),)
    return Run(scenario, link, link, tuple(zip(keys, records, strict=True)))


def test_the_bound_is_that_of_the_calibrated_links() -> None:
    # Two racks behind 12 MB/s: 2 (2-1)/2 x 64 MiB / 12 MB/s = 5.592 s.
    (verdict,) = judge(run_of(Target("bound", 1.08), records=[record(ours=[5.592405])]))
    assert verdict.value == pytest.approx(1.0, abs=1e-6)
    assert verdict.reached


def test_the_fastest_peer_counts_and_never_our_own_ring() -> None:
    found = record(ours=[1.0, 2.0], flat=[0.1, 0.1], **{"Open MPI, a": [3.0, 6.0], "Open MPI, b": [1.4, 2.8]})
    (verdict,) = judge(run_of(Target("ratio", 1.5, "Open MPI"), records=[found]))
    assert (verdict.value, verdict.reached) == (pytest.approx(1.4), False)
    assert lines([verdict])[0].startswith("MISSED")


def test_a_peer_that_is_not_there_is_not_judged() -> None:
    (verdict,) = judge(run_of(Target("ratio", 1.5, "gloo"), records=[record(ours=[1.0])]))
    assert verdict.reached is None


def test_the_worst_order_is_compared_with_the_best() -> None:
    orders = ((0, 1, 2, 3), (0, 2, 1, 3))
    made = run_of(Target("order", 1.05), orders=orders, records=[record(ours=[2.0]), record(ours=[2.2])])
    (verdict,) = judge(made)
    assert (verdict.value, verdict.reached) == (pytest.approx(1.1), False)


def test_two_calibrations_are_apart_by_their_worst_link() -> None:
    assert Goodput(100.0, 50.0).apart(Goodput(99.0, 45.0)) == pytest.approx(0.1)


def test_every_scenario_has_a_target() -> None:
    assert all(scenario.targets for scenario in ALL)


def test_ddlrun_bench_times_ddl_beside_mpi_and_gloo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plot = tmp_path / "a.json", tmp_path / "a.svg"
    words = ["-np", "2", "--compare", "--only", "default|gloo|flat", "--sizes", "1KiB,1MiB"]
    status = ddlrun.main(
        ["bench", *words, "--rounds", "2", "--seconds", "0.01", "--json", str(output), "--plot", str(plot)]
    )
    printed = capsys.readouterr()
    assert status == 0, printed.err
    turns = json.loads(output.read_text())["turns"]
    assert {one["contestant"] for one in turns} == {DDL, FLAT, "Open MPI, default", "gloo"}
    assert all(len(one["seconds"]) == 2 and min(one["seconds"]) > 0 for one in turns)
    assert "1 MiB" in printed.out
    assert plot.read_text().startswith("<?xml")


@pytest.mark.slow
@pytest.mark.usefixtures("needs_testbed")
@pytest.mark.timeout(900)
def test_the_bench_on_the_virtual_cluster_runs_in_small(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "ddl" / "bench", "--quick", "--output", tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "ddl.json").read_text())
    assert [run["scenario"]["name"] for run in found["runs"]] == [scenario.name for scenario in ALL]
    assert "MPICH, default" in done.stdout
