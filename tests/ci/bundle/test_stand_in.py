from collections.abc import Iterator
from pathlib import Path

import pytest
from small_channel import ROOT, SHARED

from bundle import base, channel, interpreter, stand_in, stubs, wheels
from bundle.errors import BundleError
from bundle.folders import Folders

VARIANTS = {"mpi": ["openmpi", "mpich"], "cxx_compiler_version": ["14"], "c_stdlib_version": ["2.28"]}


@pytest.mark.timeout(600)  # it may make the small channel
def test_the_stand_in_holds_what_was_asked_for_and_what_that_needs(below: base.Base) -> None:
    records = {record["name"]: record for record in channel.records(SHARED.stand_in / "channel")}
    assert {"python", "pip", "hatchling", "pathspec", "mpi", "gxx_linux-64", "sysroot_linux-64"} <= set(records)
    assert "pathspec >=0.10.1" in records["hatchling"]["depends"]
    assert all(record["depends"] is not None and record["sha256"] for record in records.values())
    assert below.is_stand_in


@pytest.mark.timeout(600)
def test_a_second_run_packs_nothing(below: base.Base) -> None:
    files = [*SHARED.stand_in.glob("channel/*/*.conda")]
    before = {path: path.stat().st_mtime_ns for path in files}
    stand_in.make(SHARED, [])
    assert {path: path.stat().st_mtime_ns for path in files} == before


def test_what_has_changed_is_packed_again_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "one", tmp_path / "two"]
    for file in files:
        file.touch()
    found: list[str] = []

    def pack(items: list[stand_in.Item], target: Path, *_: object) -> Iterator[tuple[stand_in.Item, Path]]:
        for item in items:
            found.append(item.source.name if isinstance(item.source, Path) else "python")
            path = target / f"{found[-1]}.conda"
            path.touch()
            yield item, path

    def packed() -> list[str]:
        found.clear()
        made = stand_in.make(Folders(ROOT, tmp_path), [])
        assert {path.stem for path in made.glob("*/*.conda")} == {"one", "two", "python"}
        return sorted(found)

    for where, name, stub in (
        (stand_in, "_pack", pack),
        (wheels, "download", lambda *_: files),
        (stubs, "stubs", lambda *_: []),
        (channel, "index", lambda _: None),
    ):
        monkeypatch.setattr(where, name, stub)
    assert packed() == ["one", "python", "two"]
    assert packed() == []
    files[0].write_text("another wheel")
    assert packed() == ["one"]
    (folder,) = tmp_path.glob("stand-in/channel/*/")
    (folder / "two.conda").write_text("damaged")
    assert packed() == ["two"]
    (folder / "python.conda").unlink()
    (folder / "three.conda").touch()  # which nothing makes
    assert packed() == ["python"]
    monkeypatch.setattr(interpreter, "identity", lambda: "another CPython")
    assert packed() == ["one", "python", "two"]


def test_a_python_that_cannot_be_moved_is_said_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreter, "obstacle", lambda: "it keeps packages elsewhere: make setup PYTHON=...")
    monkeypatch.setattr(wheels, "download", lambda *_: pytest.fail("wheels were fetched"))
    with pytest.raises(BundleError, match="make setup PYTHON="):
        stand_in.make(Folders(ROOT, tmp_path), [])
    assert list(tmp_path.iterdir()) == []


def test_another_compiler_of_the_systems_is_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "g++"
    monkeypatch.setenv("PATH", str(tmp_path))

    def keys() -> list[str]:
        return [item.key for item in stand_in.plan([], VARIANTS, "linux-64")]

    found = [keys()]
    for version in ("12.2.0", "12.2.0", "14.1.0"):
        compiler.write_text(f"#!/bin/sh\necho 'g++ {version}'\necho 'more words'\n")
        compiler.chmod(0o755)
        found.append(keys())
    none, first, same, other = found
    assert same == first
    for one in (none, other):
        assert [before == after for before, after in zip(first, one, strict=True)] == [True, True, True, True, False]
