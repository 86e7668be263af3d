"""The brain on two ranks of ddlrun: the training of one process with both noisy copies, and the same bits under LMS."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import train
from data import CLASSES, load
from loss import dice_cross_entropy, one_hot
from net import UNet3D

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = str(Path(train.__file__).resolve())
STEPS = 3
SMALL = ["--width", "2", "--depth", "2", "--device", "cpu", "--quiet", "--steps", str(STEPS)]


def ddlrun(*program: str) -> str:
    """Run two ranks of a program; what they and the launcher printed."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    sources = os.pathsep.join(str(ROOT / part / "src") for part in ("ddl", "lms"))
    done = subprocess.run(
        [sys.executable, "-m", "ddl.ddlrun", "-np", "2", *program],
        env={**os.environ, **root, "PYTHONPATH": sources},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def losses(report: dict[str, Any]) -> list[float]:
    return [step["loss"] for step in report["steps"]]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_train_as_one_process_with_both_copies_does_and_lms_changes_no_bit(
    tmp_path: Path, folder: Path
) -> None:
    words = [SCRIPT, *SMALL, "--data", str(folder)]
    plain, managed, trace = (tmp_path / name for name in ("plain.json", "managed.json", "trace.json"))
    printed = ddlrun(sys.executable, *words, "--json", str(plain))
    assert "2 ranks: the same bits of all parameters" in printed
    assert printed.count("step 1 loss") == 1  # rank 0 speaks for all
    lms = [sys.executable, "-m", "lms", "run", "--budget", "0", "--trace", str(trace)]
    said = ddlrun(*lms, *words, "--json", str(managed))
    first, second = json.loads(plain.read_text()), json.loads(managed.read_text())
    assert losses(second) == losses(first)
    assert second["sha256"] == first["sha256"]
    assert (first["ranks"], first["same_bits"], second["same_bits"]) == (2, True, True)
    assert losses(first) == pytest.approx(alone(folder), rel=1e-5)
    for rank in range(2):  # both swapped, all of what they may
        assert f"lms: rank {rank}: {STEPS} steps, {STEPS} passes" in said
    assert trace.is_file()
    assert (tmp_path / "trace.rank1.json").is_file()


def alone(folder: Path) -> list[float]:
    """The losses of one process that trains on both noisy copies in each step."""
    torch.manual_seed(0)
    model = UNet3D(len(CLASSES), 2, 2)
    volume = load(4, model.multiple, folder)
    goal = one_hot(volume.truth, len(CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        copies = [volume.image + train.NOISE * torch.randn(volume.image.shape) for _ in range(2)]
        each = [dice_cross_entropy(model(copy), goal) for copy in copies]
        loss = torch.stack(each).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_each_rank_keeps_its_own_and_draws_for_all() -> None:
    drawn = []
    for rank in range(3):
        torch.manual_seed(5)
        its = ranks.Ranks(rank, 3).own(lambda: torch.randn(4))
        drawn.append((its, torch.randn(1)))
    torch.manual_seed(5)
    expected = [torch.randn(4) for _ in range(3)]
    after = torch.randn(1)
    for (its, next_one), one in zip(drawn, expected, strict=True):
        assert torch.equal(its, one)
        assert torch.equal(next_one, after)


def test_one_process_exchanges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with ranks.joined() as alone_:
        assert alone_ == ranks.Ranks()
        model = torch.nn.Linear(1, 1)
        assert alone_.wrap(model) is model
        assert alone_.mean(torch.tensor(2.5)) == 2.5
        assert alone_.agree("a")
    assert not torch.distributed.is_initialized()
