"""A rank that dies, leaves, is late or calls something else: named by the others, within seconds, and nothing stays."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
Run = Callable[..., subprocess.CompletedProcess[str]]
BOTH = pytest.mark.parametrize("ranks", ["mpi", "tcp"], indirect=True)
BOTH_IN_THE_END = pytest.mark.parametrize("ranks", ["mpi", pytest.param("tcp", marks=pytest.mark.slow)], indirect=True)


def left_over(mark: str) -> list[str]:
    """Processes that have `mark` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has ended meanwhile, or is somebody else's
    return found


def suffer(ranks: Run, fault: str, *arguments: str, **variables: str) -> str:
    """Run the fault; the job must fail within 10 s beyond its timeout and leave no process."""
    mark = f"fault-{os.getpid()}-{fault}"
    begin = time.monotonic()
    done = ranks(4, "faults.py", fault, *arguments, timeout=40, DDL_TEST_MARK=mark, **variables)
    assert done.returncode != 0, done.stdout
    assert time.monotonic() - begin < 15 + float(variables.get("DDL_TIMEOUT", "0")), done.stdout
    # mpirun returns when it has told the ranks to end; the kernel takes a moment.
    deadline = time.monotonic() + 5
    while left_over(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left_over(mark)
    return done.stdout


@BOTH
@pytest.mark.parametrize("count", ["300000", "1000"])  # through the transport, and through shared memory alone
@pytest.mark.parametrize("fault", ["kill", "leave"])
def test_a_rank_that_dies_is_named_at_once(ranks: Run, fault: str, count: str) -> None:
    output = suffer(ranks, fault, count)
    # The launcher may end the others before they have said what they got, but not before one has named the dead.
    assert re.search(r"ddl: rank 1 \(host \S+, process \d+\) died", output), output
    for seconds in re.findall(r"after ([\d.]+) s: PeerLostError: rank 1 .* died during allreduce #20", output):
        assert float(seconds) < 10


def test_a_rank_that_died_between_two_starts_is_named_on_every_rank(command: Run, tmp_path: Path) -> None:
    # mpirun lets the others live, as ddlrun's job of a library with its own recovery would.
    program = Path(__file__).parent / "programs/init_after_death.py"
    mpirun = [Path(sys.executable).with_name("mpirun"), "--enable-recovery", "-np", "4", "--map-by", ":OVERSUBSCRIBE"]
    done = command([*mpirun, "--bind-to", "none", sys.executable, program, tmp_path], timeout=60, DDL_TIMEOUT="6")
    said = re.findall(r"^rank (\d) after (\d+) s: (.*)$", done.stdout, re.MULTILINE)
    assert sorted(rank for rank, _, _ in said) == ["0", "1", "3"], done.stdout
    assert {words for _, _, words in said} == {"PeerLostError: ddl_init: rank 2 died"}, done.stdout
    assert max(int(seconds) for _, seconds, _ in said) < 6


def test_ranks_that_do_not_come_to_a_later_start_are_named(ranks: Run, tmp_path: Path) -> None:
    program = tmp_path / "starts_twice.py"
    program.write_text(
        "import os, time, ddl\n"
        "ddl.init(); rank = ddl.rank(); ddl.finalize()\n"
        "if rank in (1, 2): time.sleep(30)\n"
        "try: ddl.init()\n"
        "except ddl.RankTimeoutError as error: print(f'rank {rank}: {error}', flush=True)\n"
        "time.sleep(1); os._exit(0)\n"
    )
    done = ranks(4, program, DDL_TIMEOUT="4")
    assert "ddl: warning: ddl_init: rank 0 has waited 2 s for ranks 1, 2\n" in done.stdout, done.stdout
    for rank in (0, 3):
        assert f"rank {rank}: ddl_init: rank 0 has waited 4 s for ranks 1, 2: not started, stopped" in done.stdout


@BOTH_IN_THE_END
def test_a_rank_whose_program_fails_is_named(ranks: Run) -> None:
    output = suffer(ranks, "raise")
    assert "ValueError: a defect of the program" in output
    assert re.search(r"ShutdownError: .* rank 1 \(host \S+\) has finalized without calling it", output), output


@BOTH
def test_a_mismatch_names_both_calls(ranks: Run) -> None:
    output = suffer(ranks, "other")
    assert "MismatchError" in output, output
    assert "allreduce #20 of communicator 0 (float64, max, 7 elements)" in output
    assert "allreduce #20 of communicator 0 (float32, average, 300000 elements)" in output


def test_a_rank_that_does_not_come_is_warned_of_and_then_an_error(ranks: Run) -> None:
    output = suffer(ranks, "late", DDL_TIMEOUT="3")
    missing = r"rank 1 \(host \S+\) has not called it; its last call was allreduce #19"
    assert re.search("ddl: warning: .*" + missing, output), output
    assert re.search(r"after 3\.\d s: RankTimeoutError: .*" + missing + ".*DDL_TIMEOUT", output), output


def test_a_rank_that_stops_in_the_midst_of_ddl_init_is_named_by_all(ranks: Run, tmp_path: Path) -> None:
    stops = tmp_path / "stops.so"
    compiler = [Path(sys.executable).with_name("mpicc"), "-shared", "-fPIC", "-o", stops]
    subprocess.run([*compiler, PROGRAMS / "stops_in_idup.c"], check=True, timeout=60)
    begin = time.monotonic()
    done = ranks(4, "init.py", timeout=50, DDL_TIMEOUT="4", LD_PRELOAD=str(stops), STOPS="2")
    assert done.returncode != 0
    assert time.monotonic() - begin < 25, done.stdout
    silent = r"rank 2 \(host \S+, process \d+\) does not answer \(stopped, or its link is cut\)"
    assert re.search(rf"ddl: warning: rank \d \(host \S+\) has waited 2 s in ddl_init: {silent}", done.stdout), (
        done.stdout
    )
    found = rf"RankTimeoutError: rank (\d) \(host \S+\) has waited 4 s in ddl_init: {silent}\. DDL_TIMEOUT sets"
    # The launcher may end the last ones before they have said it.
    assert re.findall(found, done.stdout), done.stdout


@BOTH_IN_THE_END
def test_sigusr1_prints_what_is_in_flight(ranks: Run, tmp_path: Path) -> None:
    done = ranks(2, "signal_report.py", str(tmp_path / "asked"), timeout=40)
    assert done.returncode == 0, done.stdout
    assert re.search(r"rank 0 \(host \S+\): allreduce #0 .*, awaiting rank 1", done.stdout), done.stdout
    assert "has no requests in flight" in done.stdout
