"""A session that is watched: its figures on the port and in the folder."""

from __future__ import annotations

import socket
import time
import urllib.request
from pathlib import Path
from types import ModuleType

import pytest
import torch

import lms
from lms.errors import UsageError

pytestmark = pytest.mark.usefixtures("one_thread")


def is_open(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def train(session_steps: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(session_steps):
        model(torch.randn(512, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_sessions_last_figures_are_in_the_folder_and_its_port_closes_with_it(
    tmp_path: Path, event_files: ModuleType, free_port: int
) -> None:
    port, until = free_port, time.monotonic() + 60
    with lms.LMS(budget=0, min_size=0, tensorboard=tmp_path / "runs", metrics_port=port) as session:
        train(3)
        while not is_open(port) and time.monotonic() < until:  # another thread opens it
            time.sleep(0.05)
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=30).read().decode()
        assert "lms_budget_bytes" in page
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=30)
    (path,) = (tmp_path / "runs").iterdir()
    last = event_files.read(path)[-1]
    stats = session.stats()
    scalars = event_files.scalars(last)
    assert last.step == 3
    for tag, key in (("lms/steps", "steps"), ("lms/swapped_out_bytes", "swapped_out"), ("lms/peak_bytes", "peak")):
        assert scalars[tag] == pytest.approx(stats[key])
    assert scalars["lms/swapped_out_bytes"] > 0


def test_without_the_library_nothing_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lms.metrics.sampler.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs prometheus_client, .*\./lms\[metrics\]"):
        lms.LMS(metrics_port=9117)
    with lms.LMS(budget=0):  # none is open
        pass


def test_a_taken_port_ends_no_training(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with lms.LMS(budget=0, min_size=0, metrics_port=port) as session:
            train(2)
    assert session.stats()["steps"] == 2
    assert f"warning: --metrics-port={port} " in capfd.readouterr().err
