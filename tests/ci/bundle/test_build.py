"""Real builds of the small channel, and what is to be done in which order."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import rattler_build
from rattler.package_streaming import extract
from small_channel import PLATFORM, Small

from bundle import build, channel, install
from bundle.base import Base
from bundle.build import Step
from bundle.errors import BundleError
from bundle.folders import Folders
from bundle.recipes import Package

pytestmark = pytest.mark.timeout(600)  # the first test makes the small channel


def done(small: Small, where: Folders, below: Base | None = None) -> list[str]:
    steps = build.build(where, below or small.base, PLATFORM)
    return [f"{step.package.name} {'tested' if step.tests else 'built'}" for step in steps]


@pytest.fixture
def copied(small: Small, tmp_path: Path) -> Folders:
    """The small tree and its finished channel, for a test to change."""
    shutil.copytree(small.where.tree, tmp_path / "copy", symlinks=True)
    return Folders(tmp_path / "copy", tmp_path / "copy/out")


def change(where: Folders) -> None:
    with (where.tree / "recipes/bascule-tools/src/bascule/care.py").open("a") as file:
        file.write("# a change\n")


def test_what_was_built_and_tested_is_in_the_channel_with_an_index(small: Small) -> None:
    found = {str(path.relative_to(small.where.channel)) for path in small.where.channel.glob("*/*.conda")}
    assert {name.partition("-0.1.0-")[0] for name in found} == {"noarch/bascule-tools", "noarch/small"}
    assert {one["name"] for one in channel.records(small.where.channel)} == {"bascule-tools", "small"}


def test_a_second_run_does_nothing(small: Small, copied: Folders) -> None:
    assert done(small, copied) == []


def test_a_package_that_is_damaged_is_there_again_after_the_next_run(small: Small, copied: Folders) -> None:
    for folder, expected in ((copied.channel, []), (copied.work / "channel", ["bascule-tools built"])):
        (path,) = folder.glob("noarch/bascule-tools-*.conda")
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.unlink()
        path.write_bytes(content)
        assert done(small, copied)[:1] == expected
        records = channel.solve(["small"], [copied.channel.as_uri(), small.base.address])
        install.install(records, copied.tree / "env")  # which looks at checksums
        shutil.rmtree(copied.tree / "env")


def test_an_index_is_written_again_if_it_is_damaged_and_else_left_as_it_is(small: Small, copied: Folders) -> None:
    index = [copied.work / "channel/noarch" / name for name in ("repodata.json", "repodata.json.zst")]
    before = [path.stat().st_mtime_ns for path in index]
    assert done(small, copied) == []
    assert [path.stat().st_mtime_ns for path in index] == before
    for path in index:
        path.write_bytes(damaged := b"?" * path.stat().st_size)
        assert done(small, copied) == []
        assert path.read_bytes() != damaged


@pytest.mark.slow
def test_a_changed_source_builds_it_again_and_tests_what_runs_with_it(small: Small, copied: Folders) -> None:
    change(copied)
    assert sorted(done(small, copied)) == ["bascule-tools built", "bascule-tools tested", "small tested"]


def test_what_was_built_is_tested_and_not_what_the_builder_has_unpacked_before(small: Small, copied: Folders) -> None:
    (old,) = copied.channel.glob("noarch/bascule-tools-*")
    unpacked = Path(os.environ["RATTLER_CACHE_DIR"], "pkgs", old.stem)
    extract(old, unpacked)
    tests = unpacked / "info/tests/tests.yaml"
    tests.write_text(tests.read_text().replace("bascule info", "bascule inof"))
    results = rattler_build.Package.from_file(old).run_tests(channel=small.channels)
    assert not all(result.success for result in results)  # the builder takes what it finds: else this shows nothing
    change(copied)
    assert "bascule-tools tested" in done(small, copied)


def test_a_test_whose_first_command_fails_keeps_the_channel_as_it_was(small: Small, copied: Folders) -> None:
    before = sorted(path.name for path in copied.channel.rglob("*"))
    meta = copied.tree / "meta.yaml"
    meta.write_text(
        meta.read_text()
        .replace("- bascule info", "- bascule inof\n        - 'true'")
        .replace("- name: small", "- name: other")
    )
    with pytest.raises(BundleError, match=r"^other-0\.1\.0-.*its test fails") as caught:
        build.build(copied, small.base, PLATFORM)
    assert "all of it: " in str(caught.value)
    assert sorted(path.name for path in copied.channel.rglob("*")) == before


def test_a_package_whose_recipe_is_gone_leaves_the_channel(small: Small, copied: Folders) -> None:
    meta = copied.tree / "meta.yaml"
    meta.write_text(meta.read_text().replace("- name: small", "- name: other"))
    assert done(small, copied) == ["other built", "other tested"]
    assert {one["name"] for one in channel.records(copied.channel)} == {"bascule-tools", "other"}


def test_what_lacks_a_framework_is_not_tested_and_what_is_built_with_it_not_built(
    small: Small, copied: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    change(copied)
    assert done(small, copied, replace(small.base, left_out=frozenset({"hatchling"}))) == []
    said = capsys.readouterr().err
    assert "bascule-tools-0.1.0-" in said
    assert "is not built, for lack of hatchling (FRAMEWORKS names them)" in said


def test_a_folder_with_a_space_is_refused_before_anything_is_done(small: Small, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="with spaces in its name: make channel OUT=DIR"):
        build.build(Folders(small.where.tree, tmp_path / "my out"), small.base, PLATFORM)
    assert not (tmp_path / "my out").exists()


def test_a_recipe_without_tests_and_a_key_that_no_metapackage_has_are_refused(small: Small, copied: Folders) -> None:
    meta = copied.tree / "meta.yaml"
    before = meta.read_text()
    meta.write_text(before + "    script: touch x\n")
    with pytest.raises(BundleError, match=r"meta\.yaml: small: no metapackage needs script"):
        build.build(copied, small.base, PLATFORM)
    meta.write_text(before)
    recipe = copied.tree / "recipes/bascule-tools/recipe.yaml"
    text = recipe.read_text()
    recipe.write_text(text[: text.index("\ntests:")] + text[text.index("\nabout:") :])
    with pytest.raises(BundleError, match="bascule-tools has no tests"):
        build.build(copied, small.base, PLATFORM)
    recipe.write_text(text.replace("requirements:", "requirement:", 1))
    with pytest.raises(BundleError, match=r"^\S+bascule-tools/recipe\.yaml: "):
        build.build(copied, small.base, PLATFORM)


def package(name: str, builds: str = "", runs: str = "", tests: str = "", content: str = "1") -> Package:
    needs = (frozenset(words.split()) for words in (builds, runs, tests))
    return Package(Path(name), name, f"{name}-1-0.conda", f"noarch/{name}-1-0.conda", *needs, content)


PACKAGES = [
    package("lib", builds="cmake", runs="libc"),
    package("plugin", builds="mpi", runs="lib mpi", tests="cmake"),
    package("front", builds="pip", runs="lib plugin"),
    package("pool", builds="torch", runs="torch front"),
    package("all", runs="pool"),
]
BELOW = Base("x", "file:///x", checksums=dict.fromkeys(("cmake", "libc", "mpi", "pip", "torch"), "1"))


def changed(packages: list[Package] = PACKAGES, below: Base = BELOW) -> set[str]:
    """Which keys of what another tree, or another channel below, makes are others."""
    before, after = build.keyed(PACKAGES, BELOW), build.keyed(packages, below)
    parts = ("built", "tested")
    return {
        f"{one.name} {part}"
        for one in PACKAGES
        for part in parts
        if getattr(before[one.file], part) != getattr(after[one.file], part)
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lib", {"lib built", "lib tested", "plugin tested", "front tested", "pool tested", "all tested"}),
        ("front", {"front built", "front tested", "pool tested", "all tested"}),
        ("all", {"all built", "all tested"}),
    ],
)
def test_what_a_package_is_made_of_builds_it_and_what_it_runs_with_tests_it(name: str, expected: set[str]) -> None:
    assert changed([replace(one, content="2") if one.name == name else one for one in PACKAGES]) == expected


def test_what_needs_a_framework_that_is_left_out_has_no_key() -> None:
    keys = build.keyed(PACKAGES, replace(BELOW, left_out=frozenset({"torch"})))
    assert [one.name for one in PACKAGES if not keys[one.file].built] == ["pool"]
    assert [one.name for one in PACKAGES if not keys[one.file].tested] == ["pool", "all"]


def test_a_step_comes_after_the_builds_of_all_that_it_needs_and_never_waits_for_a_test() -> None:
    todo = [Step(one, tests) for one in PACKAGES for tests in (False, True)]
    found = {
        str(step): {str(one).split("-")[0] for one in before} for step, before in build.order(todo, PACKAGES).items()
    }
    assert found["lib-1-0.conda: built"] == set()
    assert found["pool-1-0.conda: built"] == set()
    assert found["plugin-1-0.conda: tested"] == {"plugin", "lib"}
    assert found["all-1-0.conda: tested"] == {"all", "pool", "front", "plugin", "lib"}
    assert all(not one.tests for before in build.order(todo, PACKAGES).values() for one in before)
