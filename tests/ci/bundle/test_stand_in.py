import json
import os
import subprocess
from pathlib import Path

import pytest
from small_channel import ROOT, STAND_IN

from bundle import interpreter, stand_in, stubs, variants, wheels
from bundle.errors import ToolError

pytestmark = pytest.mark.timeout(600)  # the first test makes the small channel


def test_the_stand_in_holds_what_was_asked_for_and_what_that_needs(stand_in_channel: Path) -> None:
    index = json.loads((stand_in_channel / "linux-64/repodata.json").read_text())["packages.conda"]
    records = {record["name"]: record for record in index.values()}
    assert {"python", "pip", "hatchling", "pathspec", "mpi", "gxx_linux-64", "sysroot_linux-64"} <= set(records)
    assert "pathspec >=0.10.1" in records["hatchling"]["depends"]
    assert all(record["depends"] is not None and record["sha256"] for record in records.values())


def test_a_second_run_packs_nothing(stand_in_channel: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in stand_in_channel.rglob("*.conda")}
    known = variants.read(ROOT / "conda_build_config.yaml")
    again = stand_in.make(stand_in_channel.parent, STAND_IN, known, ROOT / "ci/constraints.txt")
    assert again == stand_in_channel
    assert {path: path.stat().st_mtime_ns for path in stand_in_channel.rglob("*.conda")} == before


def test_an_index_of_what_a_killed_run_has_removed_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pack(todo: list[stand_in.Item], target: Path, *_: object) -> None:
        for item in todo:
            (target / item.file).touch()

    indexed: list[Path] = []

    def index(channel: Path) -> None:
        indexed.append(channel)
        for path in channel.glob("linux-*"):
            (path / "repodata.json").touch()

    monkeypatch.setattr(interpreter, "obstacle", lambda: None)
    monkeypatch.setattr(wheels, "download", lambda *_: [])
    monkeypatch.setattr(stand_in, "_pack", pack)
    monkeypatch.setattr(stand_in.index, "index", index)
    for compilers, times in ((["14", "13"], 1), (["14"], 2), (["14"], 2)):
        if times == 2 and len(indexed) == 1:  # as a run does that is killed before the index
            next(tmp_path.glob("channel/*/gxx_linux-64-13-0.conda")).unlink()
        stand_in.make(tmp_path, [], {"cxx_compiler_version": compilers}, ROOT / "ci/constraints.txt")
        assert len(indexed) == times


def test_a_wheel_that_was_cut_off_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "thing-1.0-py3-none-any.whl"
    path.write_bytes(b"PK")
    with pytest.raises(ToolError, match=rf"^{path} is damaged .*: remove it and run this again"):
        stand_in.plan([path], {}, "linux-64")


def test_a_wheel_that_was_cut_off_is_fetched_again(tmp_path: Path) -> None:
    (file,) = (one for one in wheels.download(["tqdm"], ROOT / "ci/constraints.txt", tmp_path))
    whole = file.read_bytes()
    file.write_bytes(whole[:1000])
    for record in tmp_path.glob("*.json"):  # a full disk comes before it
        record.unlink()
    assert wheels.download(["tqdm"], ROOT / "ci/constraints.txt", tmp_path) == [file]
    assert file.read_bytes() == whole


def test_a_python_that_cannot_be_moved_is_said_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreter, "obstacle", lambda: "it keeps packages elsewhere: make setup PYTHON=...")
    monkeypatch.setattr(wheels, "download", lambda *_: pytest.fail("wheels were fetched"))
    with pytest.raises(ToolError, match="make setup PYTHON="):
        stand_in.make(tmp_path, [], {}, ROOT / "ci/constraints.txt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.root
def test_a_full_disk_is_named_and_leaves_no_package_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = tmp_path / "full"
    full.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", full]).returncode:
        pytest.skip("only root can make a small file system")
    monkeypatch.setattr(interpreter, "obstacle", lambda: None)
    monkeypatch.setattr(wheels, "download", lambda *_: [])
    try:
        with pytest.raises(ToolError, match=r"^\S+ could not be packed: .*No space left on device"):
            stand_in.make(full, [], variants.read(ROOT / "conda_build_config.yaml"), ROOT / "ci/constraints.txt")
        left = {str(path.relative_to(full)) for path in full.rglob("*") if path.is_file()}
        assert {name for name in left if "python" in name or name.startswith(".stage")} == set()
    finally:
        subprocess.run(["umount", full], check=True)


def test_the_versions_of_compilers_are_those_that_recipes_ask_for() -> None:
    made = stubs.stubs(["14"], ["2.28"], "linux-64")
    named = {(stub.name, stub.version, stub.build) for stub in made}
    assert {("gxx_linux-64", "14", "0"), ("sysroot_linux-64", "2.28", "0"), ("mpi", "1.0", "mpich")} <= named


def test_another_compiler_of_the_systems_is_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "g++"
    monkeypatch.setenv("PATH", str(tmp_path))

    def keys() -> dict[str, str]:
        known = {"cxx_compiler_version": ["14"], "c_stdlib_version": ["2.28"]}
        return {item.name: item.key for item in stand_in.plan([], known, "linux-64")}

    found = [keys()]
    for version in ("12.2.0", "12.2.0", "14.1.0"):
        compiler.write_text(f"#!/bin/sh\necho 'g++ {version}'\necho 'more words'\n")
        compiler.chmod(0o755)
        found.append(keys())
    none, first, same, other = found
    assert same == first
    for one in (none, other):
        assert {name for name in first if one[name] != first[name]} == {"gxx_linux-64"}


def test_an_activated_compiler_is_the_systems(tmp_path: Path) -> None:
    (stub,) = (one for one in stubs.stubs(["14"], [], "linux-64") if one.name == "gxx_linux-64")
    stub.stage(tmp_path)
    script = next(tmp_path.glob("etc/conda/activate.d/*.sh"))
    shell = ["/bin/sh", "-c", f'. "{script}"; echo "$CXX"']
    found = subprocess.run(shell, capture_output=True, text=True, check=True, timeout=30)
    assert found.stdout.strip() in ("g++", "c++")
    none = subprocess.run(shell, env={"PATH": "/nowhere"}, capture_output=True, text=True, timeout=30)
    assert "no C++ compiler: looked for g++ c++; install one (Debian, Ubuntu: g++)" in none.stderr
