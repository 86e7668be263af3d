"""The example's own modules, as its scripts import them, its volume prepared once, and PyTorch's settings put back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "brain_mri"
sys.path.insert(0, str(EXAMPLE))  # as `python examples/brain_mri/train.py` does


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for prepared volumes, empty when the tests start."""
    return tmp_path_factory.mktemp("brain_mri")


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """Training sets these for its process; the next test must not inherit them."""
    mode = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors gain nothing from more, and lose much on a busy machine
    yield
    torch.set_deterministic_debug_mode(mode)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
    torch.set_rng_state(state)
    torch.set_num_threads(threads)
