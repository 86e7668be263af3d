"""The device that a session takes if nothing names one."""

from __future__ import annotations

import pytest
import torch

from lms.torch.arguments import training_device


@pytest.mark.parametrize(("local", "gpu"), [("0", 0), ("1", 1), ("2", 0), ("", 0), (None, 0)])
def test_a_rank_has_the_gpu_with_its_number_on_the_host(
    local: str | None, gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_RANK", local)
    assert training_device(None, []) == torch.device("cuda", gpu)
    assert training_device("cpu", []) == torch.device("cpu")
