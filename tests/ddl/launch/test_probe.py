import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ddl.launch import probe, routes
from ddl.launch.machine import Machine
from ddl.launch.probe import Answer
from ddl.launch.routes import Gap

ROOT = Path(__file__).parents[3]


def test_lines_of_many_hosts_are_found_among_others(machine: Callable[..., Machine]) -> None:
    one, other = machine("h0"), machine("h1", gpus=2)
    silent = Answer(other, (Gap(0, "No route to host", False),))
    text = f"Welcome to h1!\n{probe.line(silent, 1)}\n{probe.line(Answer(one), 0)}\nbye\n"
    assert probe.parse(text) == {0: Answer(one), 1: silent}


def test_a_torn_line_is_left_out(machine: Callable[..., Machine]) -> None:
    whole = probe.line(Answer(machine()), 0)
    assert probe.parse(whole[:-9] + "\n" + probe.MARK + "{}\n" + probe.MARK + "3") == {}


def test_a_large_host_is_one_line_that_a_pipe_does_not_tear(machine: Callable[..., Machine]) -> None:
    gaps = tuple(Gap(at, "Destination address required", False) for at in range(routes.SHOWN))
    assert len(probe.line(Answer(machine(sockets=2, cores=128, gpus=8), gaps), 99)) < 4096


def test_the_program_prints_this_host() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "ddl/src"), "PMI_RANK": "3"}
    command = [sys.executable, "-m", "ddl.launch.probe", "127.0.0.2,,127.0.0.1,127.0.0.3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    found = probe.parse(done.stdout)
    assert list(found) == [3]
    assert min(found[3].machine.free_ports) > 0
    assert found[3].gaps == ()
    assert json.loads(done.stdout.removeprefix(probe.MARK))["rank"] == 3
