from pathlib import Path

import pytest
from small_channel import ROOT, SHARED

from bundle import base, channel, interpreter, stand_in, wheels
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


def test_a_wheel_that_was_cut_off_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "thing-1.0-py3-none-any.whl"
    path.write_bytes(b"PK")
    with pytest.raises(BundleError, match=rf"^{path} is damaged .*: remove it and run this again"):
        stand_in.plan([path], VARIANTS, "linux-64")


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

    def keys() -> dict[str, str]:
        return {item.file: item.key for item in stand_in.plan([], VARIANTS, "linux-64")}

    found = [keys()]
    for version in ("12.2.0", "12.2.0", "14.1.0"):
        compiler.write_text(f"#!/bin/sh\necho 'g++ {version}'\necho 'more words'\n")
        compiler.chmod(0o755)
        found.append(keys())
    none, first, same, other = found
    assert same == first
    for one in (none, other):
        assert {name for name in first if one[name] != first[name]} == {"gxx_linux-64-14-0.conda"}
