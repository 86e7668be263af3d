from __future__ import annotations

import os
from pathlib import Path

import checkpoint
import pytest
import torch
from checkpoint import CheckpointError
from torch import nn

Training = tuple[nn.Module, torch.optim.Optimizer]
SETTINGS = {"width": 8, "lr": 0.1}


def training(seed: int, steps: int = 1) -> Training:
    """A net that has taken some steps, with an optimizer that remembers them."""
    torch.manual_seed(seed)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(steps):
        step(net, optimizer)
    return net, optimizer


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """One step on a random batch; the parameters after it."""
    optimizer.zero_grad()
    net(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    return [parameter.detach().clone() for parameter in net.parameters()]


def state(net: nn.Module) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(parameter.detach().clone() for parameter in net.parameters())]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_next_step_from_a_checkpoint_is_bit_for_bit_the_one_that_was_not_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "folder that is not there yet" / "state.pt"
    whole = training(seed=1, steps=3)
    checkpoint.save(path, *whole, 3, SETTINGS)
    expected = step(*whole)
    resumed = training(seed=2)
    assert checkpoint.restore(path, *resumed, SETTINGS) == 3
    assert same(step(*resumed), expected)


def test_a_checkpoint_takes_the_place_of_the_old_one_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    for steps in (1, 2):
        checkpoint.save(path, *training(seed=1), steps, SETTINGS)
    assert [found.name for found in tmp_path.iterdir()] == ["state.pt"]
    assert checkpoint.restore(path, *training(seed=1), SETTINGS) == 2


def test_the_bytes_are_on_the_disk_before_the_name_is_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: done.append(os.fstat(file).st_size) or sync(file))
    monkeypatch.setattr(os, "replace", lambda *names: done.append("renamed") or replace(*names))
    path = tmp_path / "state.pt"
    checkpoint.save(path, *training(seed=1), 1, SETTINGS)
    assert done == [path.stat().st_size, "renamed"]


@pytest.mark.parametrize(("devices", "restored"), [(2, True), (1, False)])
def test_the_random_numbers_of_gpus_go_on_where_there_are_as_many(
    devices: int, restored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, found = [torch.zeros(3, dtype=torch.uint8), torch.ones(3, dtype=torch.uint8)], []
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    checkpoint.save(tmp_path / "state.pt", *training(seed=1), 1, SETTINGS)
    resumed = training(seed=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", found.extend)
    checkpoint.restore(tmp_path / "state.pt", *resumed, SETTINGS)
    assert same(found, states if restored else [])


def refused(path: Path, settings: dict[str, int | float]) -> str:
    """The message; and nothing has changed."""
    net, optimizer = training(seed=2)
    before, steps = state(net), optimizer.state_dict()["state"][0]["step"].item()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.restore(path, net, optimizer, settings)
    assert same(state(net), before)
    assert optimizer.state_dict()["state"][0]["step"].item() == steps
    return str(caught.value)


def test_a_checkpoint_that_is_not_there_is_refused_with_what_to_do(tmp_path: Path) -> None:
    assert refused(tmp_path / "state.pt", {}).endswith("state.pt; leave --resume out to start anew")


@pytest.mark.parametrize(("setting", "value"), [("width", 16), ("lr", 0.2), ("depth", 3)])
def test_a_checkpoint_of_another_training_is_refused_by_the_setting_that_differs(
    setting: str, value: float, tmp_path: Path
) -> None:
    path = tmp_path / "state.pt"
    checkpoint.save(path, *training(seed=1, steps=3), 3, SETTINGS)
    message = refused(path, {**SETTINGS, setting: value})
    assert f"was written with --{setting} {SETTINGS.get(setting)}, and {value} was asked for" in message


@pytest.mark.parametrize(
    "content",
    [b"", b"hello\n", b"step,loss\n1,2.5\n", b"c\xea\x0c\x06", b"\x89PNG\r\n\x1a\n", b"PK\x03\x04"],
    ids=["nothing", "a text", "a table", "no text", "a picture", "a zip's beginning"],
)
def test_a_file_that_is_no_checkpoint_is_refused_whatever_is_in_it(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    path.write_bytes(content)
    assert refused(path, {}) == f"--resume: {path} is no checkpoint of this example"


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_part_of_a_checkpoint_is_none(share: float, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    checkpoint.save(path, *training(seed=1), 1, {})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert "is no checkpoint of this example" in refused(path, {})


@pytest.mark.parametrize("other", [[1, 2], {"model": {}}, {"format": "brain-mri-0"}])
def test_what_another_program_saved_is_no_checkpoint(other: object, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save(other, path)
    assert "is no checkpoint of this example" in refused(path, {})
