"""Plugin of pytest for `make horovod-suite`: each rank writes what became of its tests."""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import types
import unittest.mock
from collections.abc import Callable
from pathlib import Path

import pytest

import ddl.horovod


def _thread(target: Callable[[], object]) -> threading.Thread:
    made = threading.Thread(target=target, daemon=True)
    made.start()
    return made


def module(name: str, **members: object) -> None:
    """Make a module that the tests import."""
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(members)


sys.modules["horovod"] = ddl.horovod
# What the tests' helpers import beside it.
sys.modules.setdefault("mock", unittest.mock)
sys.modules.setdefault("cloudpickle", pickle)
for package in ("horovod.runner", "horovod.runner.util"):
    module(package)
module("horovod.runner.util.threads", in_thread=_thread)

_results = Path(os.environ["HOROVOD_SUITE_RESULTS"]) / f"rank{os.environ['OMPI_COMM_WORLD_RANK']}.jsonl"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    name = report.nodeid.rpartition("::")[2]
    with _results.open("a") as file:
        file.write(json.dumps([name, report.outcome, _reason_of(report)]) + "\n")


def _reason_of(report: pytest.TestReport) -> str:
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return (str(report.longrepr) if crash is None else crash.message).partition("\n")[0]
