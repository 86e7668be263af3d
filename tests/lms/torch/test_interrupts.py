"""Ctrl-C under LMS: none is lost, and none leaves anything half done."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import FrameType

import pytest

from lms.torch import interrupts
from lms.torch.interrupts import Shield

PROGRAM = Path(__file__).with_name("interrupted_training.py")


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("budget", [0, 1 << 40], ids=["all moves", "all stays"])
@pytest.mark.parametrize("interrupts", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_interrupts_at_random_times_are_none_lost_and_training_goes_on(interrupts: int, budget: int) -> None:
    seed = int(time.time())
    command = [sys.executable, PROGRAM, *map(str, (interrupts, seed, budget))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    assert json.loads(done.stdout) == {
        "sent": interrupts,
        "lost": 0,
        "records left": 0,
        "bytes left in the file": 0,
        "passes after": 5,
        "misses after": 0,
        "held": 0,
    }, f"seed {seed}: {done.stderr}"


@pytest.fixture
def received() -> Generator[list[str], None, None]:
    """What function each SIGINT arrived in; the handler that was there before comes back."""
    functions: list[str] = []

    def note(_: int, frame: FrameType | None) -> None:
        assert frame is not None
        functions.append(frame.f_code.co_name)

    before = signal.signal(signal.SIGINT, note)
    yield functions
    signal.signal(signal.SIGINT, before)


def wait_for(received: list[str]) -> None:
    end = time.monotonic() + 5
    while not received and time.monotonic() < end:
        time.sleep(0.001)


def test_a_signal_waits_until_the_shielded_code_has_returned(received: list[str]) -> None:
    shield = Shield(frozenset({__file__}))
    shield.put_up()
    signal.raise_signal(signal.SIGINT)
    time.sleep(0.02)
    assert received == []
    shield.take_down()
    wait_for(received)
    assert received, "it was lost"


def test_other_code_is_interrupted_at_once(received: list[str]) -> None:
    shield = Shield(frozenset({"somewhere else"}))
    shield.put_up()
    signal.raise_signal(signal.SIGINT)
    shield.take_down()
    assert len(received) == 1


def test_code_that_never_returns_is_interrupted_in_the_end(
    received: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "_PATIENCE", 0.05)
    shield = Shield(frozenset({__file__}))
    shield.put_up()
    signal.raise_signal(signal.SIGINT)
    wait_for(received)
    shield.take_down()
    assert len(received) == 1


def test_a_handler_that_somebody_installs_meanwhile_stays(received: list[str]) -> None:
    shield = Shield(frozenset({__file__}))
    shield.put_up()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    shield.take_down()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_no_handler_of_pythons_is_left_alone(handler: signal.Handlers, received: list[str]) -> None:
    signal.signal(signal.SIGINT, handler)
    shield = Shield(frozenset({__file__}))
    shield.put_up()
    assert signal.getsignal(signal.SIGINT) is handler
    shield.take_down()
    assert signal.getsignal(signal.SIGINT) is handler


def test_another_thread_puts_up_no_shield(received: list[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=Shield(frozenset()).put_up)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before


INTERRUPTED = """
import signal, sys, time
import torch
from lms.torch.session import Session
from lms.torch.training import Training

opening = (Session.__enter__, Session.open, Session._claim, Session._acquire, Training.__init__)
methods = (*opening, Training.close, Session.close, Session.__exit__)
codes = {method.__code__ for method in methods}
net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh())
count = 0

def trace(frame, event, _):
    global count
    if frame.f_code not in codes:
        return None
    if event == "line":
        count += 1
        if count == at:
            signal.raise_signal(signal.SIGINT)
    return trace

def session():
    with Session(budget=0, min_size=0):
        net(torch.randn(64, 32)).sum().backward()

session()
at = caught = 0
while at == 0 or count >= at:
    at, count = at + 1, 0
    try:
        sys.settrace(trace)
        session()
        sys.settrace(None)
        if count >= at:
            time.sleep(5)  # what was held back comes within milliseconds
    except KeyboardInterrupt:
        caught += 1
    finally:
        sys.settrace(None)
    session()
    net(torch.randn(64, 32)).sum().backward()
print(at - 1, caught)
"""


def test_ctrl_c_while_a_session_opens_or_closes_leaves_nothing_half_open() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines, caught = map(int, done.stdout.split())
    assert lines == caught > 20
