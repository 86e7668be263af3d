"""`ddl.shrink` between three hosts, when a cable is pulled."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from testbed import cluster, running

PROGRAM = Path(__file__).parent / "programs" / "shrink.py"
SOURCES = Path(__file__).parents[2] / "ddl" / "src"


def lines(job: subprocess.Popen[str], until: str) -> Iterator[str]:
    assert job.stdout
    for line in job.stdout:
        yield line
        if until in line:
            return


@pytest.mark.root
@pytest.mark.alone
@pytest.mark.timeout(120)
@pytest.mark.parametrize("host", ["h0", "h2"])
@pytest.mark.usefixtures("needs_testbed")
def test_when_a_cable_is_pulled_the_larger_part_goes_on_and_the_other_ends(host: str) -> None:
    with running(cluster([3], link="200mbit")) as bed:
        variables = {"PYTHONPATH": str(SOURCES), "WORLD_SIZE": "6", "MASTER_ADDR": "h0", "MASTER_PORT": "29700"}
        command = ["sh", "-c", 'exec "$@" 2>&1', "sh", sys.executable, "-u", str(PROGRAM), "cut"]
        jobs = [
            bed.popen(f"h{rank // 2}", command, env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)})
            for rank in range(6)
        ]
        with ThreadPoolExecutor(6) as pool:
            assert all(pool.map(lambda job: "begun" in "".join(lines(job, "begun")), jobs))
            cut = time.monotonic()
            bed.cut(host)
            outputs = list(pool.map(lambda job: "".join(lines(job, "no such line")), jobs))
    cut_off = [rank for rank in range(6) if host == f"h{rank // 2}"]
    left = [rank for rank in range(6) if rank not in cut_off]
    for rank, output in enumerate(outputs):
        if rank in cut_off:
            assert f"PeerLostError: rank {rank} was cut off from the job: 4 of its 6 ranks do not answer" in output
            continue
        assert f"{rank}: right to the end, with {left}" in output, output
        (right,) = re.findall(r"right at ([\d.]+), in epoch", output)
        assert float(right) - cut < 10, output  # 3.3 to 5.0 s without other load
