"""Random graphs that Ctrl-C ends at random moments, and that then run again: `interrupted_graphs.py COUNT SEED`.

Prints as JSON how many interrupts were sent, how many were lost, and the seeds of graphs that were wrong after one.
"""

from __future__ import annotations

import gc
import json
import random
import signal
import sys
import threading
import time

import torch

from lms.runtime import plan_maker
from lms.torch.session import Session
from random_graphs import Outcome, Program, quietly
from random_trainings import digest

LOST_AFTER = 20.0  # seconds in which an interrupt must arrive
TIMES = 3  # that a graph is interrupted


def fresh(seed: int) -> Program:
    return Program(seed, digest, contexts=False)


def interrupted(seed: int, seconds: float) -> bool:
    """Run a graph, and interrupt it after so many seconds, or as it is over. False if no interrupt arrived."""
    done = threading.Event()

    def send() -> None:
        done.wait(seconds)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    sender = threading.Thread(target=send)
    try:
        sender.start()
        fresh(seed).run()
        done.set()
        sender.join()
        time.sleep(LOST_AFTER)
    except KeyboardInterrupt:
        return True
    finally:
        torch.set_grad_enabled(True)  # an interrupt in PyTorch's own contexts may leave it off
    return False


def main(count: int, first: int) -> None:
    """The program."""
    plan_maker.CALIBRATION = 1 << 16
    torch.set_num_threads(1)
    gc.freeze()
    wrong, lost = [], 0
    with quietly():
        for seed in range(first, first + count):
            rng = random.Random(-1 - seed)
            began = time.perf_counter()
            plain: Outcome = fresh(seed).run()
            with Session(budget=rng.choice((0, 500, 10**6)), min_size=0) as session:
                same = fresh(seed).run() == plain
                gc.collect()
                leaks = session._swapper.live > 0  # PyTorch frees some graphs never
                seconds = time.perf_counter() - began
                for _ in range(TIMES):
                    lost += not interrupted(seed, rng.random() * seconds)
                    gc.collect()
                    same = same and fresh(seed).run() == plain
            gc.collect()
            if not same or (not leaks and (session._swapper.live or session.engine.usage()["file"])):
                wrong.append(seed)
    print(json.dumps({"interrupts": count * TIMES, "lost": lost, "wrong": wrong}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
