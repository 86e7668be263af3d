import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ddl.launch import probe
from ddl.launch.machine import Machine

ROOT = Path(__file__).parents[3]


def test_lines_of_many_hosts_are_found_among_others(machine: Callable[..., Machine]) -> None:
    one, other = machine("h0"), machine("h1", gpus=2)
    text = f"Welcome to h1!\n{probe.line(other, 1)}\n{probe.line(one, 0)}\nbye\n"
    assert probe.parse(text) == {0: one, 1: other}


def test_a_torn_line_is_left_out(machine: Callable[..., Machine]) -> None:
    whole = probe.line(machine(), 0)
    assert probe.parse(whole[:-9] + "\n" + probe.MARK + "{}\n" + probe.MARK + "3") == {}


def test_a_large_host_is_one_line_that_a_pipe_does_not_tear(machine: Callable[..., Machine]) -> None:
    assert len(probe.line(machine(sockets=2, cores=128, gpus=8), 99)) < 4096


def test_the_program_prints_this_host() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "ddl/src"), "PMI_RANK": "3"}
    command = [sys.executable, "-m", "ddl.launch.probe"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    found = probe.parse(done.stdout)
    assert list(found) == [3]
    assert found[3].free_port > 0
    assert json.loads(done.stdout.removeprefix(probe.MARK))["rank"] == 3
