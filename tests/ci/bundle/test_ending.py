import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
POOL = """
import os, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from bundle import ending
if __name__ == "__main__":
    with ProcessPoolExecutor(1, get_context("spawn"), ending.end_with, (os.getpid(),)) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 600)
        time.sleep(600)
"""


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_who_works_for_a_process_that_is_killed_ends_with_it(tmp_path: Path) -> None:
    program = tmp_path / "pool.py"
    program.write_text(POOL)
    variables = os.environ | {"PYTHONPATH": str(ROOT / "ci")}
    with subprocess.Popen([sys.executable, program], env=variables, stdout=subprocess.PIPE, text=True) as pool:
        assert pool.stdout is not None
        worker = int(pool.stdout.readline())
        assert state(worker) not in ("gone", "Z")
        pool.kill()
    until = time.monotonic() + 20
    while state(worker) not in ("gone", "Z") and time.monotonic() < until:
        time.sleep(0.05)
    assert state(worker) in ("gone", "Z")
