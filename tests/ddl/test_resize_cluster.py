"""`ddl.resize` between hosts: the links are measured again, whoever dies meanwhile."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from testbed import cluster, running

PROGRAM = Path(__file__).parent / "programs" / "resize.py"
SOURCES = Path(__file__).parents[2] / "ddl" / "src"


@pytest.mark.root
@pytest.mark.alone
@pytest.mark.timeout(180)
@pytest.mark.parametrize("late", [0.3, 0.6, pytest.param(1.0, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("needs_testbed")
def test_one_on_another_host_joins_after_one_that_died_while_links_were_measured(late: float) -> None:
    with running(cluster([3], link="200mbit")) as bed:

        def start(host: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
            shared = {"PYTHONPATH": str(SOURCES), "MASTER_ADDR": "h0", "MASTER_PORT": "29700", "DDL_TIMEOUT": "60"}
            command = ["sh", "-c", 'exec "$@" 2>&1', "sh", sys.executable, "-u", str(PROGRAM)]
            command += ["until", "0,1,2,101", f"{late}+100", "apart", *arguments]
            return bed.popen(host, command, env={**shared, **variables})

        jobs = [start(f"h{rank // 2}", RANK=str(rank), WORLD_SIZE="3", DDL_TRANSPORT="tcp") for rank in range(3)]
        first = start("h2", "join", "100")
        print(first.communicate(timeout=60)[0])
        jobs.append(start("h2", "join", "101"))
        with ThreadPoolExecutor(4) as pool:
            outputs = list(pool.map(lambda job: job.communicate(timeout=90)[0], jobs))
    for name, output in zip((0, 1, 2, 101), outputs, strict=True):
        assert re.search(rf"^{name}: right to the end, with \[0, 1, 2, 101\]$", output, re.MULTILINE), output
