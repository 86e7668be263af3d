"""A host that loses its power, and a cable that is pulled, in the middle of allreduces between three hosts."""

import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from testbed import AGENT, Testbed, cluster, running

PROGRAM = Path(__file__).parent / "programs" / "faults.py"
SOURCES = Path(__file__).parents[2] / "ddl" / "src"

pytestmark = pytest.mark.alone


def said(job: subprocess.Popen[str], seconds: float, counts: dict[str, int]) -> str:
    """The job's output from now on, until each pattern was found as often as asked, or the time is over."""
    assert job.stdout
    text = ""
    deadline = time.monotonic() + seconds
    while any(len(re.findall(pattern, text)) < count for pattern, count in counts.items()):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([job.stdout], [], [], left)[0]:
            break
        if not (chunk := os.read(job.stdout.fileno(), 1 << 16)):  # past the buffer, of which select() knows nothing
            break
        text += chunk.decode(errors="replace")
    return text


def start(bed: Testbed, folder: Path) -> subprocess.Popen[str]:
    """mpirun on three hosts. It keeps its files in `folder`, as in conftest.py."""
    command = [str(Path(sys.executable).with_name("mpirun")), "-H", "h0:2,h1:2,h2:2", "--bind-to", "none"]
    command += ["--map-by", ":OVERSUBSCRIBE", "--mca", "mpi_yield_when_idle", "1", "-x", "PYTHONPATH"]
    variables = {
        "PRTE_MCA_plm_ssh_agent": str(AGENT),
        "PRTE_MCA_prte_local_tmpdir_base": str(folder),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PYTHONPATH": str(SOURCES),
    }
    command += [sys.executable, "-u", str(PROGRAM), "none"]
    return bed.popen("h0", ["sh", "-c", 'exec "$@" 2>&1', "sh", *command], env=variables)


def ranks_left(bed: Testbed, seconds: float) -> list[str]:
    """The ranks that still run on any host when so much time is over, or none as soon as there is none."""
    deadline = time.monotonic() + seconds
    while True:
        left = [process.command for process in bed.processes() if process.command.startswith(sys.executable)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


@pytest.mark.root
@pytest.mark.usefixtures("needs_testbed")
def test_when_a_link_is_cut_every_rank_on_both_sides_ends_with_an_error_that_names_the_other(tmp_path: Path) -> None:
    with running(cluster([3], link="200mbit")) as bed:
        job = start(bed, tmp_path)
        before = said(job, 30, {"begun": 1})
        assert "begun" in before, before
        begin = time.monotonic()
        bed.cut("h2")
        lost = r"rank [45] \(host h2"
        # (mpirun does not come back from this: it waits for its daemon on h2. ddlrun ends it.)
        # Ranks and what watches them speak on ways of their own: in any order.
        errors, gone = f"PeerLostError: {lost}", f"ddl: {lost}, process \\d+\\) is gone"
        text = said(job, 12, {errors: 4, gone: 1})
        assert time.monotonic() - begin < 10, text
        assert re.search(f"{errors}.* during allreduce", text), text
        assert re.search(gone, text), text
        assert not ranks_left(bed, 10 - (time.monotonic() - begin))


@pytest.mark.root
@pytest.mark.usefixtures("needs_testbed")
def test_when_a_host_is_killed_every_rank_ends_and_the_host_is_named(tmp_path: Path) -> None:
    with running(cluster([3], link="200mbit")) as bed:
        job = start(bed, tmp_path)
        before = said(job, 30, {"begun": 1})
        assert "begun" in before, before
        bed.kill("h2")
        # If mpirun notices that its daemon is gone, it ends the ranks before their own probes have told them.
        named = r"(PeerLostError: rank|Remote host:) .*h2"
        text = said(job, 10, {named: 1})
        assert re.search(named, text), text
        assert not ranks_left(bed, 10)
