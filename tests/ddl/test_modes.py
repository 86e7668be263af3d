"""Modes m, n and b, and buffers in a GPU's memory: over MPI itself, and on a stub of CUDA and NCCL (nccl_stub)."""

import re
import subprocess
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def built(compiled: Callable[[str], Path]) -> Path:
    return compiled("ddl_nccl_stub") / "libddl_nccl_stub.so"


@pytest.fixture
def stub(built: Path, tmp_path: Path) -> dict[str, str]:
    """What chooses the stub for CUDA and NCCL; calls are written down in `tmp_path`."""
    # libddl knows the driver by its name.
    file = tmp_path / "libcuda.so.1"
    file.symlink_to(built)
    return {"DDL_CUDA_LIB": str(file), "DDL_NCCL_LIB": str(file), "DDL_STUB_DIR": str(tmp_path)}


@pytest.fixture
def on_stub(ranks: Run, stub: dict[str, str]) -> Run:
    """`ranks`, with the stub."""

    def run(
        size: int, program: str, *arguments: str, timeout: float = 60, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        return ranks(size, program, *arguments, timeout=timeout, **{**stub, **variables})

    return run


def right(done: subprocess.CompletedProcess[str], *lines: str) -> None:
    assert done.returncode == 0, done.stdout
    for line in lines:
        assert line in done.stdout


def check_order(folder: Path, ranks: int) -> set[str]:
    """That ranks made the same calls on each communicator in the same order; returns the names of the calls."""
    collectives: dict[str, list[list[str]]] = defaultdict(list)
    messages: dict[tuple[str, str, int], list[str]] = defaultdict(list)
    names = set()
    for rank in range(ranks):
        mine: dict[str, list[str]] = defaultdict(list)
        for line in (folder / f"calls.{rank}").read_text().splitlines():
            comm, call, *rest = line.split()
            names.add(call)
            if call in ("Send", "Recv"):
                count, dtype, _peer = rest
                messages[comm, call, rank].append(f"{count} {dtype}")
                mine[comm].append("message")
            else:
                mine[comm].append(f"{call} {rest}")
        for comm, calls in mine.items():
            # Runs of messages are groups: how many there are in one depends on which parts are empty.
            collectives[comm].append([c for i, c in enumerate(calls) if c != "message" or calls[i - 1] != "message"])
    for comm, sequences in collectives.items():
        assert len(sequences) > 1, f"only one rank used {comm}"
        without = [[call for call in sequence if call != "message"] for sequence in sequences]
        assert all(sequence == without[0] for sequence in without), f"ranks differ in what they called on {comm}"
        sent = sorted(m for (c, call, _), all_ in messages.items() if (c, call) == (comm, "Send") for m in all_)
        received = sorted(m for (c, call, _), all_ in messages.items() if (c, call) == (comm, "Recv") for m in all_)
        assert sent == received
    return names


def test_mode_m_is_right_in_every_type(ranks: Run) -> None:
    right(ranks(4, "sweep.py", "4", "host", "m", "mr:2x2"), "-mode m: right", "-mode mr:2x2: right")


def test_buffers_on_a_gpu_are_staged_where_nccl_has_no_part(on_stub: Run) -> None:
    right(on_stub(3, "sweep.py", "3", "device", "r", "m"), "-mode r: right", "-mode m: right")


@pytest.mark.parametrize(
    ("size", "modes", "calls"),
    [
        (4, ("n", "nr:2x2", "bm:2x2"), {"ReduceScatter", "AllGather", "Reduce", "Broadcast", "Send", "Recv"}),
        pytest.param(2, ("b", "n"), {"ReduceScatter", "AllGather", "Send"}, marks=pytest.mark.slow),
        pytest.param(6, ("bn:3x2", "rn:2x3"), {"ReduceScatter", "Reduce", "Recv"}, marks=pytest.mark.slow),
        pytest.param(8, ("nrm:2x2x2", "bnr:2x2x2"), {"ReduceScatter", "AllGather"}, marks=pytest.mark.slow),
    ],
)
def test_nccl_is_called_in_one_order_and_the_numbers_are_right(
    on_stub: Run, tmp_path: Path, size: int, modes: tuple[str, ...], calls: set[str]
) -> None:
    done = on_stub(size, "sweep.py", str(size), "device", *modes, timeout=120)
    right(done, *(f"-mode {mode}: right" for mode in modes))
    assert calls <= check_order(tmp_path, size)


def test_nccl_needs_no_mpi(tcp_ranks: Run, stub: dict[str, str], tmp_path: Path) -> None:
    right(
        tcp_ranks(4, "sweep.py", "4", "device", "nb:2x2", timeout=120, DDL_STUB_GPUS="1", **stub), "-mode nb:2x2: right"
    )
    assert {"ReduceScatter", "AllGather", "Send"} <= check_order(tmp_path, 4)


@pytest.mark.parametrize("options", ["-mode n", "-mode r"])
def test_calls_with_buffers_on_a_gpu_wait_for_their_stream_and_refuse_what_they_must(
    on_stub: Run, options: str
) -> None:
    right(on_stub(2, "device.py", options), "device: right")


def test_host_buffers_in_modes_n_and_b_are_reduced_by_rings(on_stub: Run, tmp_path: Path) -> None:
    right(on_stub(4, "sweep.py", "4", "host", "nb:2x2"), "-mode nb:2x2: right")
    assert not list(tmp_path.glob("calls.*"))


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"DDL_STUB_NCCL_FAILS": "1"},
            r"TransportError: .*rank 1 \(host \S+\): ncclCommInitRankConfig failed: unhandled cuda error",
        ),
        (
            {"DDL_STUB_NCCL_STUCK": "1", "DDL_TIMEOUT": "3"},
            r"RankTimeoutError: .*rank \d \(host \S+\): it has waited 3 s in ddl_init for NCCL.*NCCL_DEBUG=INFO",
        ),
        ({"DDL_STUB_GPUS": "0"}, r"UnsupportedError: .*rank 0 \(host \S+\): no GPU is seen .*CUDA_VISIBLE_DEVICES"),
        ({"DDL_NCCL_LIB": "/nowhere/libnccl.so"}, r"UnsupportedError: .*NCCL.*/nowhere/libnccl.so.*DDL_NCCL_LIB"),
        ({"DDL_CUDA_LIB": "/nowhere/libcudart.so"}, r"UnsupportedError: .*CUDA runtime.*DDL_CUDA_LIB"),
    ],
)
def test_what_nccl_lacks_is_said_in_ddl_init_with_the_rank(on_stub: Run, variables: dict[str, str], words: str) -> None:
    done = on_stub(2, "init.py", DDL_OPTIONS="-mode n", **variables)
    assert done.returncode != 0
    assert len(re.findall(words, done.stdout)) == 2, done.stdout  # each rank says it


@pytest.mark.parametrize("memory", ["host", "device"])
def test_a_session_leaves_no_communicator_and_no_context_behind(on_stub: Run, memory: str) -> None:
    right(on_stub(2, "sessions.py", memory), "2 ranks: right")


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        (["missing"], {}, "UnsupportedError: .*CUDA runtime.*(was not found|cannot be used).*DDL_CUDA_LIB"),
        ([], {"DDL_STUB_POINTER_ERROR": "35"}, "UnsupportedError: .*driver version is insufficient.*DDL_CUDA_LIB"),
        ([], {"DDL_STUB_POINTER_ERROR": "700"}, "UnsupportedError: .*illegal memory access"),
    ],
)
def test_gpu_memory_is_never_taken_for_host_memory(
    on_stub: Run, arguments: list[str], variables: dict[str, str], words: str
) -> None:
    done = on_stub(2, "memory.py", *arguments, **variables)
    right(done, "host: right")
    assert len(re.findall(words, done.stdout)) == 2, done.stdout


def test_an_empty_variable_names_no_library(ranks: Run) -> None:
    right(ranks(2, "sweep.py", "2", "host", "m", DDL_CUDA_LIB="", DDL_NCCL_LIB=""), "-mode m: right")


@pytest.mark.parametrize("fault", ["kill", "other", "late"])
@pytest.mark.parametrize("mode", ["m", pytest.param("mr:2x2", marks=pytest.mark.slow)])
def test_mode_m_ends_with_the_same_errors_as_rings(ranks: Run, mode: str, fault: str) -> None:
    done = ranks(4, "faults.py", fault, timeout=40, DDL_OPTIONS=f"-mode {mode}", DDL_TIMEOUT="3")
    assert done.returncode != 0, done.stdout
    words = {
        "kill": r"ddl: rank 1 \(host \S+, process \d+\) died",
        "other": r"MismatchError: .*allreduce #20 of communicator 0 \(float64, max, 7 elements\)",
        "late": r"RankTimeoutError: .*rank 1 \(host \S+\) has not called it; its last call was allreduce #19",
    }
    assert re.search(words[fault], done.stdout), done.stdout


@pytest.mark.parametrize("fault", ["kill", "late"])
def test_a_rank_that_fails_in_nccl_ends_the_others(on_stub: Run, fault: str) -> None:
    done = on_stub(4, "faults.py", fault, timeout=40, DDL_OPTIONS="-mode nr:2x2", DDL_TIMEOUT="3")
    assert done.returncode != 0, done.stdout
    words = {
        "kill": r"ddl: rank 1 \(host \S+, process \d+\) died",
        "late": r"RankTimeoutError: .*rank 1 .*not called",
    }
    assert re.search(words[fault], done.stdout), done.stdout


def test_what_nccl_leaves_undone_is_no_result(on_stub: Run) -> None:
    # The allgather of the first allreduce: nothing that comes after it could tell.
    done = on_stub(2, "device.py", "-mode n", DDL_STUB_NCCL_GIVES_UP="1:2")
    assert done.returncode != 0, done.stdout
    assert "TransportError: an NCCL collective failed: unhandled system error" in done.stdout, done.stdout


# In the first dimension, and in the second.
@pytest.mark.parametrize("step", [88, pytest.param(100, marks=pytest.mark.slow)])
def test_a_gpu_that_stops_in_one_of_several_nccl_dimensions_ends_all_of_them(on_stub: Run, step: int) -> None:
    hangs = f"1:{step}"
    done = on_stub(4, "faults.py", "hang", DDL_OPTIONS="-mode nn:2x2", DDL_TIMEOUT="3", DDL_STUB_NCCL_HANGS=hangs)
    assert done.returncode != 0, done.stdout
    assert len(re.findall(r"rank \d after .* s: RankTimeoutError", done.stdout)) == 4, done.stdout
