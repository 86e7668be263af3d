"""Kills trials and workers of a search at random moments, and starts the workers again, until the search is done."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def run(worker: Sequence[str], folder: Path, trials: int, kills: int, delay: float, seed: int) -> str:
    """Keep two workers at work in `folder` until both have ended by themselves; all that they said on stderr.

    `kills` times one of their processes gets SIGKILL, a worker or what it has started: each time when a random number
    of the `trials` has begun and up to `delay` seconds have passed.
    """
    print(f"seed {seed}")
    chance = random.Random(seed)
    moments = sorted(chance.sample(range(1, trials), kills))
    said = folder / "said"
    with said.open("ab") as stderr:

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(worker, cwd=folder, stdout=subprocess.DEVNULL, stderr=stderr)

        workers = [start(), start()]
        try:
            while any(one.poll() != 0 for one in workers):
                for at, one in enumerate(workers):
                    status = one.poll()
                    assert status in (None, 0, -signal.SIGKILL), said.read_text()
                    if status == -signal.SIGKILL:
                        workers[at] = start()
                if moments and len(list(folder.glob("*logs/*.log"))) >= moments[0]:
                    time.sleep(chance.uniform(0, delay))
                    one = chance.choice([one.pid for one in workers if one.poll() is None])
                    victims = [one] if chance.random() < 0.5 else _children(one)
                    if victims:
                        with suppress(ProcessLookupError):
                            os.kill(chance.choice(victims), signal.SIGKILL)
                        del moments[0]
                time.sleep(0.01)
        finally:
            for one in workers:
                one.kill()
                one.wait()
    assert not moments, f"the search was done before the kills at {moments}"
    return said.read_text()


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
