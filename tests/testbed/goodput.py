"""Measures what a testbed's links carry: bytes that programs receive over TCP, all flows at the same time.

Goodput is the bytes that the receiving program read within a window, over the window's length, in bits a second. All
flows share one window, which opens after TCP has found its rate; the clock is the machine's, one for all hosts.

Run as a program it is one end of one flow: `goodput.py receive PORT` or `goodput.py send ADDRESS PORT`. It says "ready"
when it listens or is connected, reads a line OPENS CLOSES (readings of CLOCK_MONOTONIC, which all hosts share), and the
receiver prints what it counted.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from testbed import Testbed

WARM_UP_SECONDS = 0.5

_PORT = 5001
_CHUNK = 256 * 1024
_CONNECT_SECONDS = 10


def measure(bed: Testbed, flows: Sequence[tuple[str, str]], seconds: float = 1.0) -> list[float]:
    """The goodput of each flow (from host, to host) in bits a second, while all of them run, in a window of `seconds`.

    A link that carries nothing is 0.0 when it was cut meanwhile, and an error when the flow could not begin. Raises
    TestbedError for that, and when a host does not exist or was killed.
    """
    with ExitStack() as running:

        def started(host: str, *words: object) -> subprocess.Popen[str]:
            process = running.enter_context(bed.popen(host, [sys.executable, "-E", "-S", __file__, *map(str, words)]))
            running.callback(process.kill)
            expect_ready(process, f"goodput, {host} {' '.join(map(str, words))}")
            return process

        ends: list[tuple[subprocess.Popen[str], subprocess.Popen[str]]] = []
        for port, (source, target) in enumerate(flows, start=_PORT):
            receiver = started(target, "receive", port)
            ends.append((receiver, started(source, "send", bed.topology.address(target), port)))
        opens = time.monotonic() + WARM_UP_SECONDS
        for end in (end for pair in ends for end in pair):
            assert end.stdin is not None
            end.stdin.write(f"{opens!r} {opens + seconds!r}\n")
            end.stdin.flush()
        counts = [receiver.communicate(timeout=seconds + 30)[0] for receiver, _ in ends]
        return [8 * int(count) / seconds for count in counts]


def expect_ready(process: subprocess.Popen[str], what: str) -> None:
    """Wait until a program on a host says "ready". Raises TestbedError, with its last words, where it does not."""
    from testbed import TestbedError  # it knows us too: it is imported when both are complete

    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        _, complaint = process.communicate()
        raise TestbedError(f"{what}: {complaint.strip().splitlines()[-1] if complaint.strip() else 'it was killed'}")


def receive(port: int) -> None:
    """Take one connection and print how many bytes arrived within the window."""
    with socket.create_server(("", port)) as server:
        print("ready", flush=True)
        server.settimeout(_CONNECT_SECONDS)
        connection, _ = server.accept()
    with connection:
        opens, closes = _window()
        buffer = bytearray(_CHUNK)
        count = 0
        while (now := time.monotonic()) < closes:
            connection.settimeout(closes - now)
            try:
                got = connection.recv_into(buffer)
            except TimeoutError:  # a link that was cut carries nothing: a finding, and no error
                break
            if not got:
                break
            if opens <= time.monotonic() < closes:
                count += got
        print(count, flush=True)


def send(address: str, port: int) -> None:
    """Send as much as the link takes, until the window has closed or the receiver has had enough."""
    block = bytes(_CHUNK)
    with socket.create_connection((address, port), timeout=_CONNECT_SECONDS) as connection:
        print("ready", flush=True)
        _, closes = _window()
        while (now := time.monotonic()) < closes:
            connection.settimeout(closes - now)
            try:
                connection.send(block)
            except (TimeoutError, ConnectionResetError, BrokenPipeError):
                break


def _window() -> tuple[float, float]:
    opens, closes = map(float, sys.stdin.readline().split())
    return opens, closes


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(int(sys.argv[2]))
    else:
        send(sys.argv[2], int(sys.argv[3]))
