"""Files written whole or not at all."""

from pathlib import Path

import pytest

from lms.files import write_aside


def test_a_file_is_written_with_the_folders_above_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "trace.json"
    write_aside(path, b"content")
    assert path.read_bytes() == b"content"


def test_an_old_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(b"old and longer")
    write_aside(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_of_the_old_file_never_sees_a_part_of_the_new(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(b"old")
    with path.open("rb") as reader:
        write_aside(path, b"new")
        assert reader.read() == b"old"


def test_a_write_that_fails_leaves_the_target_and_no_part(tmp_path: Path) -> None:
    target = tmp_path / "taken"
    target.mkdir()
    with pytest.raises(OSError, match="taken"):
        write_aside(target, b"content")
    assert list(tmp_path.iterdir()) == [target]


def test_a_written_file_can_be_read_by_others_as_ordinary_files_can(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_aside(path, b"content")
    assert path.stat().st_mode & 0o777 == 0o644
