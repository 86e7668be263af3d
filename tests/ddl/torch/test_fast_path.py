"""Which of the two backends is used, and why."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ddl
from ddl import build, library
from ddl.torch import fast_path

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test finds for itself, beside a libddl that needs no MPI."""
    find = fast_path.find
    find.cache_clear()
    monkeypatch.setattr(library, "load", lambda: SimpleNamespace(ddl_version=lambda: 100))
    yield
    find.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where compiled backends are looked for: nothing is there."""
    monkeypatch.setattr(build, "NATIVE", tmp_path)
    return tmp_path


def test_without_a_compiled_one_it_is_python_and_the_reason_says_what_to_do(folder: Path) -> None:
    choice = fast_path.choose({})
    assert choice.native is None
    assert f"none was compiled for PyTorch {torch.__version__}: compile it with `python -m ddl.build torch`" in (
        choice.reason
    )
    with pytest.raises(ddl.UnsupportedError, match=r"asks for the backend in C\+\+, but none was compiled"):
        fast_path.choose({"DDL_TORCH_BACKEND": "native"})


def test_one_for_another_pytorch_is_known_as_such(folder: Path) -> None:
    (folder / "backend-torch2.11.0-cpython-311-x86_64-linux-gnu-00000000.so").write_text("no library at all")
    choice = fast_path.choose({"DDL_TORCH_BACKEND": "auto"})
    assert choice.native is None
    assert "(backend-torch2.11.0-cpython-311-x86_64-linux-gnu-00000000.so is for another PyTorch" in choice.reason


def test_one_that_cannot_be_loaded_is_left_alone(folder: Path) -> None:
    build.library_path(torch).write_text("no library at all")
    choice = fast_path.choose({})
    assert choice.native is None
    assert "cannot be loaded" in choice.reason
    assert "remove it" in choice.reason


def test_one_for_another_libddl_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.library_path(torch).touch()
    old = SimpleNamespace(DDL_VERSION=(0, 0), translate=None)
    monkeypatch.setattr(fast_path, "module_from_spec", lambda spec: old)
    monkeypatch.setattr(fast_path.ExtensionFileLoader, "exec_module", lambda loader, module: None)
    choice = fast_path.choose({})
    assert choice.native is None
    assert "is for libddl (0, 0), and not for (0, 1)" in choice.reason


def test_python_can_be_asked_for_and_nothing_is_looked_for_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_path, "find", lambda: pytest.fail("looked"))
    assert fast_path.choose({"DDL_TORCH_BACKEND": "python"}).native is None
    with pytest.raises(ddl.ArgumentError, match="DDL_TORCH_BACKEND is 'c': allowed are auto, python, native"):
        fast_path.choose({"DDL_TORCH_BACKEND": "c"})


def test_the_choice_and_its_reason_are_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    group = SimpleNamespace(group_name="7")
    with caplog.at_level(logging.INFO, "ddl.torch"):
        assert fast_path.wrapped(group) is group  # type: ignore[comparison-overlap,arg-type]
    assert "process group '7': the backend in Python: none was compiled for PyTorch" in caplog.text


@pytest.mark.parametrize(("asked", "kind"), [("python", "ProcessGroup"), ("native", "Backend")])
def test_a_script_gets_the_one_that_it_asks_for(command: Callable[..., object], asked: str, kind: str) -> None:
    if asked == "native" and not build.library_path(torch).exists():
        pytest.skip("the backend in C++ was not compiled: `python -m ddl.build torch` says what is missing")
    code = """
import torch, torch.distributed as dist, ddl
dist.init_process_group("ddl")
group = dist.group.WORLD
made = group if type(group).__module__.startswith("ddl") else group._get_backend(torch.device("cpu"))
print(type(made).__name__)
try:
    dist.all_reduce(torch.zeros(3, dtype=torch.int16))
except ddl.UnsupportedError as error:  # of that type, by either
    print(error)
"""
    done = command([sys.executable, "-c", code], timeout=60, DDL_TORCH_BACKEND=asked, **ALONE)
    lines = done.stdout.splitlines()
    assert lines[0] == kind, done.stdout
    assert lines[1].startswith("backend ddl: a reduction by SUM of torch.int16"), done.stdout
