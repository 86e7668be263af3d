"""Copies to a file and back."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from lms.errors import SpillError
from lms.link.file import FileProbe
from lms.memory.file import Place, address_of

MB = 1 << 20


@pytest.fixture
def probe(tmp_path: Path):
    probe = FileProbe(tmp_path, 4 * MB)
    yield probe
    probe.close()


@pytest.mark.parametrize("direction", ["out", "back", "both"])
def test_a_copy_takes_time(probe: FileProbe, direction: str) -> None:
    with probe.copies(direction) as copy:  # type: ignore[arg-type]
        assert all(copy(nbytes) > 0 for nbytes in (4096, MB, 2 * MB))


def test_what_was_written_is_what_is_read(probe: FileProbe) -> None:
    with probe.copies("out") as copy:
        copy(4 * MB)
    with probe.copies("back") as copy:
        copy(4 * MB)
    source, target = probe._ready()
    assert source[:] == target[:]
    assert len(set(source[: 1 << 16])) == 256  # noise, that no disk can spare itself


def test_nothing_is_read_that_was_not_written(probe: FileProbe) -> None:
    with probe.copies("out") as copy:
        copy(4096)
    with probe.copies("back") as copy:
        copy(4096)
    # The file's last block too, which no copy has written.
    source, target = probe._ready()
    probe.file.read(Place(4 * MB - 4096, 4096, 0), address_of(target))
    assert target[:4096] == source[-4096:]


def test_both_ways_at_once_touch_other_halves(probe: FileProbe) -> None:
    before = probe._ready()[0][: 2 * MB]
    with probe.copies("both") as copy:
        for _ in range(5):
            copy(MB)
    target = probe._ready()[1]
    probe.file.read(Place(0, 2 * MB, 0), address_of(target))
    assert target[: 2 * MB] == before


def test_copies_go_on_where_the_one_before_ended(probe: FileProbe) -> None:
    with probe.copies("out") as copy:
        copy(MB)
        ctypes.memset(address_of(probe._ready()[0]), 7, MB)
        copy(MB)
    target = probe._ready()[1]
    probe.file.read(Place(MB, MB, 0), address_of(target))
    assert set(target[:MB]) == {7}


def test_a_slow_disk_is_asked_for_less(probe: FileProbe) -> None:
    probe.shrink(2 * MB)
    assert probe.largest == 2 * MB
    probe.shrink(4096)
    assert probe.largest == MB
    probe.shrink(4 * MB)
    assert probe.largest == MB
    with probe.copies("both") as copy:
        copy(MB // 2)


def test_nothing_stays_behind(tmp_path: Path) -> None:
    probe = FileProbe(tmp_path, MB)
    with probe.copies("out") as copy:
        copy(MB)
        assert list(tmp_path.iterdir()) == []
    probe.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpillError, match="no file can be made there"):
        FileProbe(tmp_path / "none", MB)
