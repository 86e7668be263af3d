"""The thread that samples: what fails is a warning, and the last sample comes at the end."""

from __future__ import annotations

import errno
import io
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from lms.metrics import Outputs, events, sampler, watch
from lms.metrics.families import Figure, sample_of


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "PERIOD", 0.02)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def wait_for(what: Callable[[], bool], seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it has not come"
        time.sleep(0.01)


class Source:
    """Figures that change with each look."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> Mapping[str, Figure]:
        self.looks += 1
        return {"steps": self.looks, "peak": 100, "floor": None, "advice": {("stalls", "limit"): 0.25}}


def test_a_process_that_becomes_another_rank_goes_on_under_its_new_number(
    tmp_path: Path, event_files: ModuleType
) -> None:
    source = Source()
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = int(one.getsockname()[1])
    outputs = Outputs(tmp_path, port)
    watch("ddl", source, outputs, rank=2)
    wait_for(lambda: source.looks > 1)
    watched = watch("ddl", source, outputs, rank=1)
    looks = source.looks
    wait_for(lambda: source.looks > looks + 2)
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=30).read().decode()
    watched.close()
    assert set(re.findall(r'rank="(\d)"', page)) == {"1"}
    assert sorted(one.name for one in tmp_path.iterdir()) == ["rank1", "rank2"]
    (path,) = (tmp_path / "rank1").iterdir()
    assert event_files.read(path)[-1].step == source.looks


def test_samples_go_to_the_folder_and_the_last_one_is_taken_at_the_end(tmp_path: Path, event_files: ModuleType) -> None:
    source = Source()
    watched = watch("lms", source, Outputs(tmp_path))
    wait_for(lambda: source.looks > 3)
    watched.close()
    watched.close()
    looks = source.looks
    (path,) = tmp_path.iterdir()
    _, *events = event_files.read(path)
    assert [one.step for one in events] == list(range(1, looks + 1))
    assert event_files.scalars(events[-1]) == {
        "lms/steps": looks,
        "lms/peak_bytes": 100,
        "lms/advice/stalls/limit": 0.25,
    }


def test_each_of_several_ranks_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    watch("lms", Source(), Outputs(tmp_path)).close()
    assert [one.name for one in tmp_path.iterdir()] == ["rank2"]


def test_sources_with_the_same_outputs_share_a_thread_that_ends_with_the_last(tmp_path: Path) -> None:
    first = watch("lms", Source(), Outputs(tmp_path))
    thread = first._sampler._thread
    second = watch("ddl", lambda: {}, Outputs(tmp_path))
    assert second._sampler is first._sampler
    first.close()
    assert thread.is_alive()
    second.close()
    assert not thread.is_alive()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_taken_port_is_one_warning_and_the_folder_gets_its_samples(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], event_files: ModuleType
) -> None:
    source = Source()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        watched = watch("lms", source, Outputs(tmp_path, port))
        wait_for(lambda: source.looks > 3)
        watched.close()
    said = capfd.readouterr().err
    assert said.count("warning") == 1
    assert f"--metrics-port={port} at 127.0.0.1: port {port} at 127.0.0.1 is taken by another program" in said
    (path,) = tmp_path.iterdir()
    assert len(event_files.read(path)) == source.looks + 1


def test_a_folder_that_takes_nothing_is_one_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    source = Source()
    watched = watch("lms", source, Outputs(tmp_path / "file" / "runs"))
    wait_for(lambda: source.looks > 3)
    watched.close()
    said = capfd.readouterr().err
    assert said.count("warning") == 1
    assert "Not a directory; the training goes on" in said


@pytest.mark.parametrize("at", [0, 2])
def test_a_full_disk_is_one_warning_and_leaves_no_empty_file(
    tmp_path: Path,
    at: int,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    event_files: ModuleType,
) -> None:
    """Full from the record `at` on: the file's first, or a sample's."""
    now = [1e9]

    def later() -> float:
        now[0] += 1  # files are named by the second
        return now[0]

    class Full(io.FileIO):
        records = 0

        def write(self, data: object) -> int:
            Full.records += 1
            if Full.records > at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)  # type: ignore[arg-type]

    monkeypatch.setattr(events.time, "time", later)
    monkeypatch.setattr(events, "open", lambda path, mode, buffering: Full(path, mode), raising=False)
    source = Source()
    watched = watch("lms", source, Outputs(tmp_path))
    wait_for(lambda: source.looks > 5)
    watched.close()
    assert capfd.readouterr().err == (
        f"lms: warning: --tensorboard={str(tmp_path)!r}: No space left on device; the training goes on\n"
    )
    files = list(tmp_path.iterdir())
    assert len(files) == min(at, 1)
    assert [len(event_files.read(one)) for one in files] == [2] * len(files)
    assert Full.records > at + 1, "it is tried again: there may be room later"


def test_a_source_that_fails_is_one_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def broken() -> Mapping[str, Figure]:
        raise RuntimeError("no figures")

    other = Source()
    outputs = Outputs(tmp_path)
    watches = [watch("ddl", broken, outputs), watch("lms", other, outputs)]
    wait_for(lambda: other.looks > 3)
    for one in watches:
        one.close()
    assert capfd.readouterr().err.count("the figures of ddl could not be read: RuntimeError('no figures')") == 1


def test_a_figure_without_its_labels_is_refused() -> None:
    with pytest.raises(ValueError, match="lms_advice"):
        sample_of("lms", {"advice": 1.0})


_PROGRAM = """
import os, sys
from pathlib import Path
from types import ModuleType
from lms.metrics import Outputs, watch
watched = watch("lms", lambda: {"steps": 42}, Outputs(Path(sys.argv[1]), int(sys.argv[2])))
if os.fork() == 0:
    watched.close()  # a worker: it writes nothing
    sys.exit()
os.wait()
"""


def test_a_process_that_just_ends_leaves_its_last_sample_and_its_forks_leave_none(
    tmp_path: Path, event_files: ModuleType
) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    subprocess.run([sys.executable, "-c", _PROGRAM, tmp_path, str(port)], check=True, timeout=60)
    (path,) = tmp_path.iterdir()
    _, *events = event_files.read(path)
    assert len(events) == 2  # the first at once, the last at the end
    assert event_files.scalars(events[-1]) == {"lms/steps": 42}
