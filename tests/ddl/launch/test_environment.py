import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from ddl.launch.dimensions import Dimensions
from ddl.launch.environment import ddl_options, exports, threads, visible, wrapper
from ddl.launch.mpi import Mpi
from ddl.launch.options import Export, Mode


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (
            "openmpi5",
            "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_SIZE=2",
        ),
        ("hydra", "PMI_RANK=3 MPI_LOCALRANKID=1 PMI_SIZE=4 MPI_LOCALNRANKS=2"),
    ],
)
def test_the_wrapper_says_what_torchrun_says_and_becomes_the_program(
    mpis: Mapping[str, Mpi], kind: str, given: str
) -> None:
    script = 'echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE "$1" $PPID'
    command = [*wrapper(mpis[kind]), "/bin/sh", "-c", script, "sh", "two  words; $(none)"]
    environment = dict(word.split("=") for word in given.split())
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    # Without a token it is our child itself: no process between, and no word about it.
    assert (done.stdout, done.stderr) == (f"3 1 4 2 two  words; $(none) {os.getpid()}\n", "")


SHELLS = [shell for shell in ("/bin/sh", "/bin/bash", "/bin/dash") if os.access(shell, os.X_OK)]


@pytest.fixture(params=["openmpi5", "hydra"])
def shell_line(request: pytest.FixtureRequest, mpis: Mapping[str, Mpi]) -> tuple[str, ...]:
    return wrapper(mpis[request.param])


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        (["sh", "-c", "exit 0"], 0, ""),
        (["sh", "-c", "exit 7"], 7, ""),
        (["sh", "-c", "printf partial >&2; kill -9 $$"], 137, "partial"),
        (["sh", "-c", "exec 2>&-; exit 3"], 3, ""),
        (["sh", "-c", 'test -z "$OMPI_DDLRUN_TOKEN"'], 0, ""),
        (["sh", "-c", 'read line; test "$line" = input'], 0, ""),
        (["test", "a", "=", "b"], 1, ""),
        (["no-such-program"], 127, None),
    ],
)
def test_with_a_token_it_reports_the_beginning_and_the_end(
    shell_line: tuple[str, ...], shell: str, program: list[str], status: int, said: str | None
) -> None:
    environment = {
        "PATH": os.environ["PATH"], "OMPI_DDLRUN_TOKEN": "T", "OMPI_COMM_WORLD_RANK": "3", "PMI_RANK": "3",
    }  # fmt: skip
    command = [shell, *shell_line[1:], *program]
    done = subprocess.run(command, env=environment, input="input\n", capture_output=True, text=True, timeout=30)
    assert done.returncode == status
    assert done.stderr.startswith("T 3 began\n" * 2)  # twice, because MPI may cut a line
    assert done.stderr.endswith(f"T 3 {status}\n" * 2)
    if said is not None:
        between = done.stderr.removeprefix("T 3 began\n" * 2).removesuffix(f"T 3 {status}\n" * 2)
        # Under hydra the shell may say what ended the program.
        assert between == said or (between.startswith(said) and "Killed" in between and "9>&" not in shell_line[2])


@pytest.mark.parametrize("shell", SHELLS)
def test_the_first_rank_of_a_host_starts_the_guard_and_the_program_finds_no_trace_of_it(
    shell_line: tuple[str, ...], shell: str, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    for rank in ("1", "0"):
        environment = {
            "PATH": os.environ["PATH"], "OMPI_COMM_WORLD_LOCAL_RANK": rank, "MPI_LOCALRANKID": rank,
            "OMPI_DDLRUN_GUARD": f'sleep 0.2; echo "$PPID" "$OMPI_DDLRUN_KEY" >{made}; exec sleep 20 >{tmp_path}/out',
            "OMPI_DDLRUN_KEY": "secret", "OMPI_DDLRUN_JOB": "mark",
        }  # fmt: skip
        begin = time.monotonic()
        program = f"cat {made} 2>/dev/null; echo $OMPI_DDLRUN_GUARD$OMPI_DDLRUN_KEY $OMPI_DDLRUN_JOB; wait"
        command = [shell, *shell_line[1:], "sh", "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
        before = f"{os.getpid()} secret\n" if rank == "0" else ""  # the program waits for the guard
        assert (done.stdout, done.stderr) == (f"{before}mark\n", "")
        assert time.monotonic() - begin < 15  # the guard holds nothing of the program's


@pytest.mark.parametrize("shell", SHELLS)
def test_signals_to_the_process_group_reach_the_program_and_its_answer_is_reported(
    shell_line: tuple[str, ...], shell: str
) -> None:
    environment = {**os.environ, "OMPI_DDLRUN_TOKEN": "T", "OMPI_COMM_WORLD_RANK": "0", "PMI_RANK": "0"}
    program = "trap 'echo got; exit 5' TERM; trap 'echo asked' USR1; echo ready; while :; do sleep 0.02; done"
    with subprocess.Popen(
        [shell, *shell_line[1:], "sh", "-c", program],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            os.killpg(process.pid, signal.SIGUSR1)
            assert process.stdout.readline() == "asked\n"
            os.killpg(process.pid, signal.SIGTERM)
            output, errors = process.communicate(timeout=30)
        finally:
            if process.poll() is None:  # it missed a signal
                os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, output, errors.count("T 0 5 asked\n")) == (5, "got\n", 2)


def test_what_ranks_need_goes_without_asking_and_the_user_s_word_is_the_last() -> None:
    environ = {"PATH": "/bin", "PYTHONPATH": "", "DDL_TIMEOUT": "9", "NCCL_DEBUG": "INFO", "SECRET": "x"}
    chosen = exports([Export("FOO", "1"), Export("DDL_OPTIONS", "mine")], environ, {"DDL_OPTIONS": "-mode p"})
    assert chosen == (
        Export("DDL_TIMEOUT"),
        Export("NCCL_DEBUG"),
        Export("PATH"),
        Export("DDL_OPTIONS", "mine"),
        Export("FOO", "1"),
    )


def test_an_empty_list_of_visible_gpus_hides_them_from_ranks_too() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "", "PATH": ""}
    assert exports((), environ, {}) == (Export("CUDA_VISIBLE_DEVICES", ""),)
    assert visible((), environ) == ""
    assert visible((), {"CUDA_VISIBLE_DEVICES": "1"}) == "1"
    assert visible([Export("CUDA_VISIBLE_DEVICES", "0")], environ) == "0"
    assert visible((), {}) is None


def test_ddl_options_have_the_mode_and_the_dimensions() -> None:
    assert ddl_options(Mode(), Dimensions((4, 2, 1, 1), ""), ()) == "-mode p:4x2x1x1"
    assert ddl_options(Mode("r"), Dimensions((), ""), ("-dbg_level", "1")) == "-mode r -dbg_level 1"
    assert ddl_options(Mode(), Dimensions((2,), ""), ("--mode", "n:2")) == "--mode n:2"


def test_libddl_says_what_it_measured_where_ddlrun_is_verbose() -> None:
    assert ddl_options(Mode(), Dimensions((), ""), (), verbose=True) == "-mode p -dbg_level 1"
    assert ddl_options(Mode(), Dimensions((), ""), ("-dbg_level", "2"), verbose=True) == "-mode p -dbg_level 2"


def test_threads_are_the_cores_of_a_rank_s_own() -> None:
    assert threads({"a": 4, "b": 4}, {"a": 32, "b": 16}) == 4
    assert threads({"a": 4}, {"a": 2}) == 1
    assert threads({"a": 4}, {}) is None
