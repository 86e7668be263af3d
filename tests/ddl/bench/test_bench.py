"""The whole: on this host with real peers, and on the virtual cluster in small."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from page import page
from runs import Goodput, Run
from scenarios import ALL, Allreduce, Target
from verdicts import judge

from ddl import ddlrun
from ddl.bench import chart, cli
from ddl.bench.contest import Turns
from ddl.bench.contestants import DDL, FLAT, of_ddl, peers
from ddl.bench.controller import CrewError
from ddl.bench.crew import Crew, WrongSum
from ddl.launch import mpi
from ddl.launch.decide import Found
from ddl.launch.hosts import Allocation

ROOT = Path(__file__).parents[3]


def record(size: int = 64 << 20, **seconds: list[float]) -> dict[str, object]:
    names = {"ours": DDL, "flat": FLAT}
    turns = [
        {"contestant": names.get(name, name), "bytes": size, "repeats": 1, "seconds": found}
        for name, found in seconds.items()
    ]
    return {"turns": turns}


def run_of(
    *targets: Target, orders: tuple[tuple[int, ...], ...] = (), records: list[dict[str, object]]
) -> Run[Allreduce]:
    scenario = Allreduce("x", "x", racks=(2, 2), ranks=2, sizes="64MiB", orders=orders, targets=targets)
    link = Goodput(link=24e6, uplink=12e6)
    keys = orders or ((0, 1, 2, 3),)
    return Run(scenario, [{"order": key, **its} for key, its in zip(keys, records, strict=True)], link, link)


def test_the_bound_is_that_of_the_calibrated_links() -> None:
    # Two racks behind 12 MB/s: 2 (2-1)/2 x 64 MiB / 12 MB/s = 5.592 s.
    (verdict,) = judge(run_of(Target("bound", 1.08), records=[record(ours=[5.592405])]))
    assert verdict.value == pytest.approx(1.0, abs=1e-6)
    assert verdict.reached


def test_the_fastest_peer_counts_and_never_our_own_ring() -> None:
    found = record(ours=[1.0, 2.0], flat=[0.1, 0.1], **{"Open MPI, a": [3.0, 6.0], "Open MPI, b": [1.4, 2.8]})
    (verdict,) = judge(run_of(Target("ratio", 1.5, "Open MPI"), records=[found]))
    assert (verdict.value, verdict.reached) == (pytest.approx(1.4), False)
    assert str(verdict).startswith("MISSED")


def test_the_page_has_links_targets_and_the_best_setting_of_each_size() -> None:
    found = record(ours=[1.0, 2.0], gloo=[1.5, 3.5], **{"Open MPI, a": [3.0, 6.0], "Open MPI, b": [1.4, 2.8]})
    for one in found["turns"]:
        one["family"] = "Open MPI" if one["contestant"].startswith("Open") else ""
    text = page([run_of(Target("ratio", 1.7, "gloo"), records=[found])])
    assert "Links of 200mbit, uplinks of 100mbit; a link 192 Mbit/s, an uplink 96 Mbit/s before" in text
    assert "| 64 MiB: time of gloo over ours | 1.625 | >= 1.7 | **missed** |" in text
    assert "| size | DDL | of the bound | gloo | best setting |" in text
    assert "| 64 MiB | 1.5 s | 373% | 1.62 | 1.40 (Open MPI, b) |" in text


def test_a_page_of_orders_has_each_run() -> None:
    orders = ((0, 1, 2, 3), (0, 2, 1, 3))
    text = page([run_of(orders=orders, records=[record(ours=[1.0]), record(ours=[1.25])])])
    assert "| 0 1 2 3 | 1 s |\n| 0 2 1 3 | 1.25 s |" in text


def test_a_peer_that_is_not_there_is_not_judged() -> None:
    (verdict,) = judge(run_of(Target("ratio", 1.5, "gloo"), records=[record(ours=[1.0])]))
    assert verdict.reached is None


@pytest.mark.parametrize(
    ("ours", "peer", "line"),
    [
        ([1.0, 1.0, 1.0], [0.96, 0.96, 0.96], "reached    1 KiB: time of gloo over ours: 0.960, target >= 0.95"),
        ([1.0, 1.0, 1.0], [0.94, 0.94, 0.94], "MISSED     1 KiB: time of gloo over ours: 0.940, target >= 0.95"),
        ([1.0, 1.0, 1.0], [0.8, 0.91, 0.95], "reached    1 KiB: time of gloo over ours: 0.910, target >= 0.91"),
        ([1.0, 1.0, 1.0], [0.6, 0.9, 1.2], "not judged 1 KiB: time of gloo over ours: 0.900, target >= 0.78"),
        ([1.0, 1.0, 1.0], [0.2, 0.5, 0.8], "MISSED     1 KiB: time of gloo over ours: 0.500, target >= 0.65"),
        ([1.0], [1.0], "not judged 1 KiB: time of gloo over ours: 1.000, one round says nothing"),
    ],
)
def test_the_best_peers_own_spread_excuses_what_is_small_and_never_noise(
    ours: list[float], peer: list[float], line: str
) -> None:
    made = run_of(Target("small", 1024), records=[record(1024, ours=ours, gloo=peer)])
    (said,) = judge(made)
    assert str(said).startswith(line)
    assert (said.why == "noise") == ("0.78" in line)


def test_the_worst_order_is_compared_with_the_best() -> None:
    orders = ((0, 1, 2, 3), (0, 2, 1, 3))
    made = run_of(Target("order", 1.05), orders=orders, records=[record(ours=[2.0]), record(ours=[2.2])])
    (verdict,) = judge(made)
    assert (verdict.value, verdict.reached) == (pytest.approx(1.1), False)


def test_two_calibrations_are_apart_by_their_worst_link() -> None:
    assert Goodput(100.0, 50.0).apart(Goodput(99.0, 45.0)) == pytest.approx(0.1)


def test_a_record_is_judged_without_a_virtual_cluster() -> None:
    program = "import sys, page, verdicts; sys.exit('testbed' in sys.modules)"
    folders = [str(ROOT / "ddl" / "bench"), str(ROOT / "ddl" / "src")]
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": ":".join(folders)}, check=True)


def test_every_scenario_has_a_target() -> None:
    assert all(scenario.targets for scenario in ALL)


def test_a_picture_draws_no_line_over_a_size_at_which_one_was_not_timed() -> None:
    pytest.importorskip("matplotlib")
    turns = [Turns("a", size, 1, {0: 1.0}) for size in (1024, 4096, 16384)]
    turns += [Turns("b", size, 1, {0: 2.0}) for size in (1024, 16384)]
    (axes,) = chart.draw(turns, None, "t").axes
    drawn = next(line for line in axes.get_lines() if line.get_label() == "b").get_ydata()
    assert [str(value) for value in drawn] == ["2.0", "nan", "2.0"]


def test_nothing_is_made_for_a_peer_that_is_not_wanted(tmp_path: Path) -> None:
    other = mpi.Mpi(tmp_path / "mpirun", mpi.HYDRA, (9, 0))  # there is no compiler beside it
    found = peers(mpi.find(), 2, [], [other], lambda name: "ring" in name and "Open MPI" in name, transport="tcp")
    assert [one.name for one in found] == ["Open MPI, ring", "Open MPI, segmented ring"]


@pytest.mark.parametrize(("transport", "other"), [("tcp", "MPI"), ("mpi", "TCP")])
def test_ddl_is_timed_over_the_other_transport_and_no_two_jobs_meet_at_one_port(transport: str, other: str) -> None:
    here = mpi.find()
    ours = peers(here, 2, [], [], lambda name: name.startswith(DDL), transport=transport)
    assert [one.name for one in ours] == [FLAT, f"DDL over {other}"]
    assert [one.value for one in ours[1].exports] == [other.lower()]
    found = Found(here, Allocation((), ""), {}, {}, {}, ports=(1, 2, 3, 4))
    assert [one.found(found).ports[:2] for one in (of_ddl(here), *ours)] == [(1, 2), (1, 3), (1, 4)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_bench_that_is_ended_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    words = [Path(sys.executable).with_name("ddlrun"), "bench", "-np", "2", "--sizes", "4MiB", "--seconds", "300"]
    with subprocess.Popen(words, env={**os.environ, "TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE) as bench:
        deadline = time.monotonic() + 60
        while len(ranks := workers(tmp_path)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(ranks) == 2
        time.sleep(1)  # they are being timed
        bench.send_signal(number)
        assert bench.wait(30) == 128 + number
    assert list(tmp_path.glob("ddlrun-bench-*")) == []
    assert workers(tmp_path) == []


def workers(folder: Path) -> list[int]:
    """The processes that are workers with this TMPDIR."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words, variables = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
            if words.partition(b"\0")[0].endswith(b"/bench_ddl") and f"TMPDIR={folder}".encode() in variables:
                found.append(int(process.name))
    return found


def test_ddlrun_bench_times_ddl_beside_mpi_and_gloo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plot = tmp_path / "a.json", tmp_path / "a.svg"
    words = ["-np", "2", "--compare", "--only", "default|gloo|flat", "--sizes", "1KiB,1MiB"]
    status = ddlrun.main(
        ["bench", *words, "--rounds", "2", "--seconds", "0.01", "--json", str(output), "--plot", str(plot)]
    )
    printed = capsys.readouterr()
    assert status == 0, printed.err
    found = json.loads(output.read_text())
    turns = found["turns"]
    assert {one["contestant"] for one in turns} == {DDL, FLAT, "Open MPI, default", "gloo"}
    assert all(len(one["seconds"]) == 2 and min(one["seconds"]) > 0 for one in turns)
    assert "1 MiB" in printed.out
    assert (found["rounds"], found["seconds"], found["ddl"]["mode"], found["error"]) == (2, 0.01, "p", "")
    assert "2 ranks on 1 host, plan" in " ".join(found["ddl"]["said"])
    assert {"ddl", "mpi", "python", "torch"} <= found["versions"].keys()
    assert found["left_out"] == []
    assert plot.read_text().startswith("<?xml")


def test_a_temporary_folder_whose_name_open_mpi_misreads_is_hidden_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "Experiments"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)  # it is read anew
    status = ddlrun.main(["bench", "-v", "-np", "2", "--sizes", "1KiB", "--rounds", "1", "--seconds", "0.01"])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert "1 KiB" in printed.out
    assert "ddlrun: ranks: 2 (-np 2)" in printed.err
    assert list(folder.glob("ddlrun-bench-*")) == []


@pytest.mark.parametrize(
    ("broken", "error", "goes_on", "printed"),
    [
        (DDL, CrewError("DDL: a rank ended"), False, "ddlrun: error: ddlrun bench: DDL: a rank ended"),
        (FLAT, WrongSum(f"{FLAT}: wrong"), True, f"left out from 4 KiB on: {FLAT}: wrong"),
    ],
)
def test_what_was_measured_is_printed_and_kept_when_a_job_breaks_down(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
    error: RuntimeError,
    goes_on: bool,
    printed: str,
) -> None:
    def hold(entries: list[Crew], *args: object) -> list[Turns]:
        drop = args[-1]
        assert callable(drop)
        assert drop(next(one for one in entries if one.name == broken), 4096, error) is goes_on
        return [Turns(DDL, 1024, 1, {0: 0.5, 1: 0.25})]

    monkeypatch.setattr(cli.contest, "hold", hold)
    output = tmp_path / "a.json"
    status = ddlrun.main(["bench", "-np", "1", "--compare", "--only", "flat", "--json", str(output)])
    said = capsys.readouterr()
    assert status == 1
    assert "1 KiB  DDL" in said.out
    assert printed in said.out + said.err
    found = json.loads(output.read_text())
    assert (len(found["turns"]), found["error"]) == (1, "" if goes_on else "DDL: a rank ended")
    assert [one["wrong"] for one in found["left_out"]] == [True] * goes_on


def test_a_size_that_memory_does_not_hold_is_said_in_a_line() -> None:
    command = f"ulimit -v 4000000; {sys.executable} -m ddl.ddlrun bench -np 1 --sizes 8GiB"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "there is no memory for buffers of this size; time smaller ones: --sizes" in done.stderr


@pytest.mark.parametrize("full", ["stdout", "--json /dev/full"])
def test_one_output_that_cannot_be_written_does_not_cost_the_others(tmp_path: Path, full: str) -> None:
    output = "/dev/full" if full != "stdout" else tmp_path / "a.json"
    words = ["bench", "-np", "2", "--sizes", "1KiB", "--rounds", "1", "--seconds", "0.01", "--json", output]
    with open("/dev/full", "wb") as disk:
        stdout = disk if full == "stdout" else subprocess.PIPE
        command = [Path(sys.executable).with_name("ddlrun"), *words]
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert line.startswith(f"ddlrun: error: ddlrun bench: {full}")
    assert line.endswith("could not be written: No space left on device")
    if full == "stdout":
        assert json.loads((tmp_path / "a.json").read_text())["turns"]
    else:
        assert "1 KiB  DDL" in done.stdout


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.usefixtures("needs_testbed")
@pytest.mark.timeout(900)
def test_the_bench_on_the_virtual_cluster_runs_in_small(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "ddl" / "bench", "--quick", "--output", tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ddl.md").read_text().startswith("## ")
    found = json.loads((tmp_path / "ddl.json").read_text())
    assert [run["scenario"]["name"] for run in found["runs"]] == [scenario.name for scenario in ALL]
    assert "MPICH, default" in done.stdout
