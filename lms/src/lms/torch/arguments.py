"""Reads the arguments of a session that are PyTorch's objects."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch

from lms.errors import UsageError

T = TypeVar("T")


def listed(given: T | Iterable[T] | None, kind: type[T], argument: str) -> list[T]:
    """The objects that `argument` was given: one or several of `kind`, or none. Raises UsageError for others."""
    items: list[object]
    if given is None:
        items = []
    elif isinstance(given, kind) or not isinstance(given, Iterable):
        items = [given]
    else:
        items = list(given)
    found = [item for item in items if isinstance(item, kind)]
    if len(found) < len(items):
        wrong = next(item for item in items if not isinstance(item, kind))
        raise UsageError(f"{argument}: expected a {kind.__name__} or several, found {type(wrong).__name__}")
    return found


def training_device(given: str | torch.device | None, models: Sequence[torch.nn.Module]) -> torch.device:
    """The device of the training: as given, or that of the first parameter, or this rank's GPU if there is one.

    A rank is taken to train on the GPU with its number on the host (LOCAL_RANK), as trainers do. Raises UsageError when
    LMS cannot swap its tensors.
    """
    parameter = next((p for model in models for p in model.parameters()), None)
    if given is not None:
        device = torch.device(given)
    elif parameter is not None:
        device = parameter.device
    elif torch.cuda.is_available():
        local = os.environ.get("LOCAL_RANK", "")
        mine = local.isdecimal() and int(local) < torch.cuda.device_count()
        device = torch.device("cuda", int(local)) if mine else torch.device("cuda")
    else:
        device = torch.device("cpu")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device={str(device)!r}: LMS swaps tensors of a device of type 'cpu' or 'cuda'")
    if str(device) == "cuda":  # whichever is current
        return torch.device("cuda", torch.cuda.current_device())
    return device
