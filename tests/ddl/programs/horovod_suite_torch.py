"""Plugin of pytest for `make horovod-suite`: Horovod's names for PyTorch are ours."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from tests.ddl.programs.horovod_suite import pytest_runtest_logreport as pytest_runtest_logreport

import ddl.horovod.torch

sys.modules["horovod.torch"] = ddl.horovod.torch

# The tests take every optimizer of PyTorch, which has had one more since 2.9: it takes no biases.
torch.optim.Muon.__module__ = "later"

# Horovod skips these over MPI, which cannot begin again after its end: DDL can.
_BEGIN_AGAIN = ("test_horovod_reinit", "test_horovod_is_initialized")


@pytest.fixture(autouse=True)
def _may_begin_again(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.name in _BEGIN_AGAIN:
        monkeypatch.setenv("HOROVOD_RANK", os.environ["OMPI_COMM_WORLD_RANK"])
