"""What the tests of LMS share."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from lms.errors import UsageError
from lms.memory.disk import disk_of
from lms.memory.spill import spill_folder


def loaded(name: str) -> ModuleType:
    """A file of helpers: no folder of tests is a package, so nothing can import them by name."""
    path = Path(__file__).parent / name
    module_name = f"lms_test_{path.stem}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[module_name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[module_name]


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Path]:
    """An empty folder on a disk: the test's own, or one elsewhere if that is in memory."""
    if not disk_of(tmp_path).memory:
        yield tmp_path
        return
    try:
        disk = spill_folder()
    except UsageError as error:
        pytest.skip(f"no disk: {error}")
    with tempfile.TemporaryDirectory(dir=disk) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def traces() -> ModuleType:
    """Passes for the planner."""
    return loaded("traces.py")


@pytest.fixture(scope="session")
def event_files() -> ModuleType:
    """A reader of TensorBoard's event files."""
    return loaded("event_files.py")


@pytest.fixture(scope="session")
def paper() -> ModuleType:
    """Streams of paper, and the CUDA engine on them."""
    return loaded("torch/paper_streams.py")


@pytest.fixture(scope="session")
def models() -> ModuleType:
    """Small models of known shapes, and a training step."""
    return loaded("torch/models.py")


@pytest.fixture(scope="session")
def replay() -> ModuleType:
    """NVML of machines that are described in files."""
    return loaded("link/nvml_replay.py")


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> object:
    """The engine of the next session: a fake one."""
    from lms.torch import session

    engine = loaded("engines.py").FakeEngine()
    monkeypatch.setattr(session, "make_engine", lambda *_args, **_options: engine)
    return engine
