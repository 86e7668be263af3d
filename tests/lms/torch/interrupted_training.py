"""A training that is interrupted N times at random moments, and goes on: `interrupted_training.py N SEED BUDGET`.

Prints as JSON how many interrupts were lost, what was still held after each, and whether planning went on.
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
from torch import nn

import lms

LOST_AFTER = 5.0  # seconds in which an interrupt must arrive


class Sender(threading.Thread):
    """Sends SIGINT to the main thread, each time after a random pause, once the one before has arrived or is lost."""

    def __init__(self, interrupts: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.interrupts = interrupts
        self.random = random.Random(seed)
        self.arrived = threading.Event()
        self.go_on = threading.Event()
        self.lost = 0
        self.sent = 0

    def run(self) -> None:
        """Send all of them."""
        for _ in range(self.interrupts):
            self.go_on.wait()
            self.go_on.clear()
            time.sleep(self.random.uniform(0, 0.02))
            self.arrived.clear()
            self.sent += 1
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            self.lost += not self.arrived.wait(LOST_AFTER)
            self.go_on.set()


def main(interrupts: int, seed: int, budget: int) -> None:
    """Train until all interrupts were sent."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(*(m for _ in range(12) for m in (nn.Linear(32, 32), nn.Tanh())))
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    gc.disable()  # memory must come back by counting references alone
    sender = Sender(interrupts, seed)
    left = 0
    with lms.LMS(net, optimizer, budget=budget, min_size=0) as session:

        def step() -> None:
            optimizer.zero_grad()
            net(torch.randn(64, 32)).square().mean().backward()
            optimizer.step()

        step()
        sender.start()
        sender.go_on.set()
        while sender.is_alive():
            try:
                while sender.is_alive():
                    step()
            except KeyboardInterrupt:
                pass
            else:
                continue
            # Optimizer.step of PyTorch 2.13 leaves gradients off if the interrupt comes in its own `finally`.
            torch.set_grad_enabled(True)
            # The exception and its frames are gone by now, and with them the graph.
            left += session._swapper.live
            sender.arrived.set()
        passes, misses = session.stats()["passes"], session.stats()["misses"]
        for _ in range(5):
            step()
        after = session.stats()
        result = {
            "sent": sender.sent,
            "lost": sender.lost,
            "records left": left,
            "bytes left in the file": session.engine.usage()["file"],
            "passes after": int(after["passes"] or 0) - int(passes or 0),
            "misses after": int(after["misses"] or 0) - int(misses or 0),
            "held": session._swapper.stepper.holdings.held,
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
