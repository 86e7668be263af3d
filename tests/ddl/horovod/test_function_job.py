"""`ddl.horovod.run`: a function of a script on the ranks of a job."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import ddl
from ddl.horovod import function_job, run

SCRIPT = """
import sys, torch
import ddl.horovod as horovod
import ddl.horovod.torch as hvd

def total(start, step=1):
    hvd.init()
    if start < 0 and hvd.rank() == 1:
        raise ValueError("a start below 0")
    return hvd.rank(), hvd.allreduce(torch.tensor(start + step * hvd.rank()), op=hvd.Sum).item(), sys.argv[1]

if __name__ == "__main__":
    print(horovod.run(total, args=(int(sys.argv[1]),), kwargs={"step": 2}, np=2), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "total.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_starts_its_own_ranks_and_gets_what_they_return(
    command: Callable[..., subprocess.CompletedProcess[str]], script: Path
) -> None:
    done = command([sys.executable, script, "5"], timeout=100)
    assert done.returncode == 0, done.stdout
    assert "[(0, 12, '5'), (1, 12, '5')]" in done.stdout


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_job_with_its_words(
    command: Callable[..., subprocess.CompletedProcess[str]], script: Path
) -> None:
    done = command([sys.executable, script, "-5"], timeout=100)
    assert done.returncode == 1
    assert "ValueError: a start below 0" in done.stdout
    assert "JobError: run(total, np=2): the job ended with status 1" in done.stdout


def test_what_ranks_cannot_be_given_is_refused_before_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"run\(<lambda>\): its ranks cannot be given it .* at the top of a file"):
        run(lambda: 1)
    with pytest.raises(ValueError, match=r"run\(print, np=0\): np is the number of ranks: expected 1 or more"):
        run(print, np=0)
    with pytest.raises(ValueError, match="arguments that can be pickled"):
        run(print, args=(sys.stdout,))
    monkeypatch.setattr(function_job, "is_rank", True)
    with pytest.raises(ddl.StateError, match="under `if __name__"):
        run(print)


def test_hosts_and_words_are_ddlruns() -> None:
    words = function_job.command(Path("/shared/it"), 4, "h0:2,h1:2", None, 2, "python3.12")
    assert words[1:] == [
        *("-m", "ddl.ddlrun", "-np", "4", "-H", "h0:2,h1:2", "-v", "python3.12"),
        *("-m", "ddl.horovod.function_rank", "/shared/it"),
    ]
    assert "-hostfile" in function_job.command(Path("/shared/it"), 4, None, "hosts.txt", None, None)
