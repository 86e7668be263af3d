"""Which engine and which device a kind of device gets."""

import warnings
from pathlib import Path

import pytest
import torch

import lms
from lms.errors import SpillError, UsageError
from lms.memory.device import CpuDevice
from lms.memory.disk import disk_of
from lms.torch.backend import device_for, make_engine
from lms.torch.cpu.engine import CpuEngine

CPU = torch.device("cpu")


def test_without_a_folder_the_file_lives_in_the_temporary_one(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(on_disk))
    engine = make_engine(CPU, spill_dir=None, host_limit=None, verify=False)
    assert isinstance(engine, CpuEngine)
    assert engine.file.directory == on_disk
    assert engine.name == f"file in {on_disk}"
    engine.close()


def test_a_folder_in_memory_is_refused_before_a_session_begins() -> None:
    if not disk_of(Path("/dev/shm")).memory:
        pytest.skip("/dev/shm is not in memory here")
    with pytest.raises(UsageError, match="spill_dir='/dev/shm': it is on tmpfs, which is memory"):
        lms.LMS(torch.nn.Linear(1, 1), spill_dir="/dev/shm").open()
    with lms.LMS(torch.nn.Linear(1, 1)):  # and nothing of it is left open
        pass


def test_a_host_limit_on_a_cpu_is_an_option_without_effect(on_disk: Path) -> None:
    with pytest.warns(RuntimeWarning, match="host_limit has no effect on a CPU device"):
        engine = make_engine(CPU, spill_dir=on_disk, host_limit=1000, verify=False)
    engine.close()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpillError, match="spill_dir="):
        make_engine(CPU, spill_dir=tmp_path / "missing", host_limit=None, verify=False)


def test_the_device_of_a_cpu_is_its_resident_set() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(device_for(CPU), CpuDevice)


def test_the_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    whole = device_for(CPU).capacity()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert device_for(CPU).capacity() == whole // 4


def test_a_session_says_what_its_rank_has_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with lms.LMS(torch.nn.Linear(1, 1), frac=0.5) as session:
        said = session.describe()
    assert said.endswith(", which each of 2 ranks has of this host")
    assert session.limit == session.device.capacity() // 2
