"""Horovod's names for PyTorch."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

UNEVEN = """
import sys, torch
import ddl.horovod.torch as hvd

hvd.init()
weight = torch.nn.Parameter(torch.ones(2))

def wrap():
    return hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0))

def step(optimizer):
    weight.sum().backward()
    optimizer.step()

if hvd.rank() == 0:
    {first}
else:
    {second}; hvd.join()
"""


def test_collectives_and_the_optimizer_do_what_horovods_do(ranks: Run) -> None:
    done = ranks(3, "horovod_torch.py", timeout=110)
    assert done.returncode == 0, done.stdout
    for rank in range(3):
        assert f"rank {rank}: " in done.stdout


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_calls_are_matched_by_name_and_an_error_is_one_of_its_call(ranks: Run, size: int) -> None:
    done = ranks(size, "horovod_names.py", timeout=110, DDL_TIMEOUT="4")
    assert done.stdout.count("all right") == size, done.stdout


def test_an_optimizers_state_takes_its_own_memory_on_a_rank_that_receives_it(ranks: Run) -> None:
    done = ranks(2, "horovod_state.py", "100", timeout=60)
    grown = dict(re.findall(r"rank (\d): grew by (\d+) MiB", done.stdout))
    assert set(grown) == {"0", "1"}, done.stdout
    assert int(grown["0"]) < 20, done.stdout
    assert 95 < int(grown["1"]) < 130, done.stdout  # the largest tensor is 6 MiB


@pytest.mark.slow
def test_the_scripts_calls_do_not_stand_in_the_order_of_the_optimizers(ranks: Run) -> None:
    done = ranks(2, "horovod_torch.py", "orders", timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_so_they_do_on_an_even_number_of_ranks(ranks: Run) -> None:
    done = ranks(4, "horovod_torch.py", timeout=110)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("hvd.join()", "hvd.allgather(torch.ones(3))", "go on without a rank; sparse gradients need sparse_as_dense"),
        ("hvd.join()", "wrap()", "rank 1 called DistributedOptimizer after rank 0 had joined"),
        ("hvd.join()", "sys.exit(0)", "rank 1 (host "),
        ("hvd.join()", "hvd.shutdown(); sys.exit(0)", "rank 0 called join, which the ranks could not agree on: rank 0"),
    ],
)
def test_what_does_not_go_on_without_a_rank_that_has_joined_is_named(
    ranks: Run, tmp_path: Path, first: str, second: str, words: str
) -> None:
    script = tmp_path / "uneven.py"
    script.write_text(UNEVEN.format(first=first, second=second))
    done = ranks(2, script, timeout=60)
    assert done.returncode != 0
    assert words in done.stdout, done.stdout
    if "sys.exit" in second:
        assert re.search("died|finalized|shutdown", done.stdout), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("it = wrap(); del it; hvd.join()", "step(wrap())"),
        ("it = wrap(); hvd.join()", "it = wrap(); weight.sum().backward(); del it"),
    ],
)
def test_a_rank_that_has_joined_needs_no_optimizer(ranks: Run, tmp_path: Path, first: str, second: str) -> None:
    script = tmp_path / "uneven.py"
    script.write_text(
        UNEVEN.format(first=first, second=second) + "assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == 2\n"
    )
    done = ranks(2, script, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_ranks_may_join_at_any_time(ranks: Run, seed: int) -> None:
    done = ranks(4, "horovod_joins.py", str(seed), "8", timeout=170)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("all right") == 4


CURRENT = """
import threading, torch
import ddl.horovod.torch as hvd
from ddl.horovod.torch import process_sets

main, answer, devices = threading.current_thread(), process_sets.starting.answer, set()

def watched(announcement, group, device):
    devices.add(device)
    return answer(announcement, group, device)

process_sets.starting.answer = watched
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 3 if threading.current_thread() is main else 0
hvd.init()
if hvd.rank() == 1:
    hvd.allreduce(torch.ones(1))
hvd.join()
assert devices == (set() if hvd.rank() == 1 else {3}), devices
print("all right")
"""


def test_a_rank_that_has_joined_answers_on_the_gpu_that_was_current_in_join(ranks: Run, tmp_path: Path) -> None:
    script = tmp_path / "current.py"
    script.write_text(CURRENT)
    done = ranks(2, script, timeout=60)
    assert done.stdout.count("all right") == 2, done.stdout


SILENT = """
import time, torch
import ddl.horovod.torch as hvd

hvd.init()
if hvd.rank() == 0:
    hvd.allreduce(torch.ones(1), name="a")
else:
    time.sleep(8)
"""


def test_a_rank_that_makes_no_call_at_all_is_named_in_the_scripts_words(ranks: Run, tmp_path: Path) -> None:
    script = tmp_path / "silent.py"
    script.write_text(SILENT)
    done = ranks(2, script, timeout=60, DDL_TIMEOUT="8")
    assert done.returncode != 0
    assert re.search(
        r"RankTimeoutError: rank 0 called allreduce 'a' .*, which the ranks could not agree on: rank 0 \(host .*\) has "
        r"waited \d+ s: rank 1 \(host .*\) has made no call\. DDL_TIMEOUT",
        done.stdout,
    ), done.stdout


def test_one_rank_joins_alone(ranks: Run, tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text("import ddl.horovod.torch as hvd\nhvd.init()\nprint('the last:', hvd.join())\n")
    done = ranks(1, script, timeout=60)
    assert "the last: 0" in done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--fp16-allreduce", "--clip", "2", "--gradient-predivide-factor", "2"],
        ["--batches-per-allreduce", "2"],
        ["--use-mixed-precision"],
    ],
)
def test_a_script_written_from_horovods_documentation_trains(ranks: Run, options: list[str]) -> None:
    done = ranks(2, "horovod_digits.py", *options, timeout=110)
    assert done.returncode == 0, done.stdout
    accuracies = [float(text) for text in re.findall(r"accuracy ([\d.]+)", done.stdout)]
    assert len(accuracies) == 3, done.stdout
    assert accuracies[-1] > 0.7, done.stdout


@pytest.mark.slow
def test_so_it_does_where_it_starts_its_own_ranks(command: Run) -> None:
    script = Path(__file__).parents[1] / "programs" / "horovod_digits.py"
    done = command([sys.executable, script, "--num-proc", "2", "--communication", "mpi"], timeout=110)
    assert done.returncode == 0, done.stdout
    accuracies = re.search(r"of each rank: \[([\d.]+), ([\d.]+)\]", done.stdout)
    assert accuracies, done.stdout
    assert float(accuracies[1]) == float(accuracies[2]) > 0.7


@pytest.mark.slow
def test_adasum_is_refused_by_name(ranks: Run) -> None:
    done = ranks(1, "horovod_digits.py", "--use-adasum", timeout=110)
    assert done.returncode != 0
    assert "DDL has no Adasum; use op=Average" in done.stdout


def test_processes_that_mpi_did_not_start_are_told_so(command: Run, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import ddl.horovod.torch as hvd\nhvd.init()\n")
    done = command([sys.executable, str(script)], timeout=60, HOROVOD_SIZE="2", HOROVOD_RANK="1")
    assert done.returncode == 1
    assert "hvd.init(): HOROVOD_SIZE is 2, but this process does not know how to find the other ranks" in done.stdout
    assert "ddlrun -np 2 python SCRIPT" in done.stdout


ALONE = """
import time, torch
import ddl
import ddl.horovod.torch as hvd
from ddl.horovod.torch import starting

ddl.init()  # so that the job goes on after shutdown()
hvd.init()
hvd.barrier()
begin = starting.reduce_now

def fail(*arguments):
    if arguments[0][0].numel() == 3:
        raise MemoryError("no room for this one")
    return begin(*arguments)

if hvd.rank() == 1:
    starting.reduce_now = fail
calls = [hvd.allreduce_async(torch.ones(size), name=str(size)) for size in (2, 3, 4)]
started = time.monotonic()
failed = 0
for call in calls:
    try:
        hvd.synchronize(call)
    except (hvd.HorovodInternalError, MemoryError) as error:
        failed += 1
        print(f"rank {hvd.rank()}: {error}", flush=True)
assert failed >= 2 and time.monotonic() - started < 10, (failed, time.monotonic() - started)
ddl.barrier()
print("all right", flush=True)
"""


def test_an_error_of_one_rank_in_the_midst_of_a_batch_ends_the_others_at_once(ranks: Run, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ALONE)
    done = ranks(2, str(script), timeout=60, DDL_TIMEOUT="40")
    assert done.stdout.count("all right") == 2, done.stdout
    assert re.search(r"rank 0: .*rank 1 .* has freed the communicator", done.stdout), done.stdout
