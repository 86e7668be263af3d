"""The folder of the file tier."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lms.errors import UsageError
from lms.memory.disk import disk_of
from lms.memory.spill import spill_folder


@pytest.fixture(params=["tmpfs", "ramfs"])
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A folder in memory."""
    folder = tmp_path / request.param
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", request.param, "none", folder], capture_output=True, text=True, check=False
    ).returncode  # fmt: skip
    if mounted != 0:
        folder = Path("/dev/shm")
        if request.param != "tmpfs" or not disk_of(folder).memory:
            pytest.skip(f"no {request.param} can be mounted here")
    yield folder
    if mounted == 0:
        subprocess.run(["umount", folder], check=True)


def test_a_folder_in_memory_is_refused_with_one_to_choose(memory: Path, on_disk: Path) -> None:
    with pytest.raises(UsageError, match=f"spill_dir='{memory}': it is on (tmpfs|ramfs), which is memory.*such as /"):
        spill_folder(memory)


def test_a_folder_below_and_a_link_to_one_in_memory_are_refused_too(memory: Path, on_disk: Path) -> None:
    (memory / "below").mkdir(exist_ok=True)
    (on_disk / "link").symlink_to(memory / "below")
    with pytest.raises(UsageError, match="which is memory"):
        spill_folder(on_disk / "link")
    (memory / "below").rmdir()


def test_the_first_usual_folder_on_a_disk_is_taken(memory: Path, on_disk: Path) -> None:
    assert spill_folder(among=[memory, on_disk / "missing", on_disk, Path("/")]) == on_disk


def test_without_one_each_folder_is_named_with_its_reason(memory: Path, on_disk: Path) -> None:
    missing = on_disk / "missing"
    with pytest.raises(UsageError) as caught:
        spill_folder(among=[memory, missing])
    said = str(caught.value)
    assert f"{memory}: it is on " in said
    assert f"{missing}: it does not exist" in said
    assert "choose a folder on a disk (--spill-dir" in said


def test_the_temporary_folder_comes_first(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(on_disk))
    assert spill_folder() == on_disk


def test_a_temporary_folder_in_memory_is_passed_over(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(memory))
    assert not disk_of(spill_folder()).memory


def test_no_temporary_folder_at_all_is_passed_over(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none)
    assert spill_folder().is_dir()
