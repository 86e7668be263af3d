"""TensorBoard's event files, read by TensorBoard's own messages and checksums."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lms.metrics.events import EventFile


def test_tensorboard_reads_what_was_written(tmp_path: Path, event_files: ModuleType) -> None:
    events = EventFile(tmp_path / "runs" / "a")
    events.write(1, 1700000000.5, {"lms/peak_bytes": 2.0**33, "lms/steps": 1})
    events.write(300, 1700000001.5, {f"ddl/late_calls/{rank}": -rank / 4 for rank in range(200)})
    events.write(2**40, 1700000002.5, {"lms/step_seconds": math.nan})
    events.close()
    assert events.path.name.startswith("events.out.tfevents.")  # by which TensorBoard finds it
    first, *rest = event_files.read(events.path)
    assert first.file_version == "brain.Event:2"
    assert [(one.step, one.wall_time) for one in rest] == [
        (1, 1700000000.5),
        (300, 1700000001.5),
        (2**40, 1700000002.5),
    ]
    assert event_files.scalars(rest[0]) == {"lms/peak_bytes": 2.0**33, "lms/steps": 1}
    assert event_files.scalars(rest[1]) == {f"ddl/late_calls/{rank}": -rank / 4 for rank in range(200)}
    assert math.isnan(event_files.scalars(rest[2])["lms/step_seconds"])


def test_a_full_disk_leaves_whole_records_and_later_ones_follow_them(tmp_path: Path, event_files: ModuleType) -> None:
    # The limit of a file's size refuses bytes as a full disk does: after it took a part.
    program = """
import resource, signal, sys
from pathlib import Path
from lms.metrics.events import EventFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
events = EventFile(Path(sys.argv[1]))
events.write(1, 1.0, {"a": 1})
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (events.path.stat().st_size + 10, hard))
try:
    events.write(2, 2.0, {"a": 2})
except OSError:
    print("refused")
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
events.write(3, 3.0, {"a": 3})
print(events.path)
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    refused, path = done.stdout.split()
    assert refused == "refused"
    assert [one.step for one in event_files.read(Path(path))] == [0, 1, 3]


def test_a_folder_that_cannot_be_made_is_an_error_of_the_file_system(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        EventFile(tmp_path / "file" / "runs")
