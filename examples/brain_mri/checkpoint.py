"""Checkpoints: everything that the next step depends on, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

_FORMAT = "brain-mri-1"


class CheckpointError(RuntimeError):
    """The checkpoint is missing, is none, or belongs to another training. The message says which."""


def save(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, settings: Mapping[str, int | float]
) -> None:
    """Write the state after `step` steps. Killed at any time, it leaves the old checkpoint or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            torch.save(
                {
                    "format": _FORMAT,
                    "settings": dict(settings),
                    "step": step,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "random": torch.get_rng_state(),
                    "random_cuda": torch.cuda.get_rng_state_all(),
                },
                file,
            )
            file.flush()
            os.fsync(file.fileno())  # or a power cut could leave the new name on an empty file
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, settings: Mapping[str, int | float]) -> int:
    """Put the state at `path` into the model, the optimizer and the random generators; returns the steps already done.

    Raises CheckpointError, before anything has changed, for a file that is missing, is no checkpoint of this example,
    or was written with other settings.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise CheckpointError(f"--resume: there is no checkpoint at {path}; leave --resume out to start anew") from None
    with file:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception:  # of a file that is none of its own, torch takes the bytes for a pickle's: any error may come
            state = None
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise CheckpointError(f"--resume: {path} is no checkpoint of this example")
    for name, value in settings.items():
        if state["settings"].get(name) != value:
            raise CheckpointError(
                f"--resume: {path} was written with --{name} {state['settings'].get(name)}, and {value} was asked for"
            )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    if torch.cuda.is_available() and len(state["random_cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["random_cuda"])
    return int(state["step"])
