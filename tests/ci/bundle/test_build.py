"""Real builds of the small channel."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import rattler_build
from rattler.package_streaming import extract
from small_channel import PLATFORM, Small

from bundle import build, index, install, published
from bundle.base import Base
from bundle.errors import BuildError, RecipeError, ToolError
from bundle.folders import Folders

pytestmark = pytest.mark.timeout(600)  # the first test makes the small channel

TOOLS = "bascule-tools-0.1.0-pyh"


def reasons(small: Small, where: Folders) -> dict[str, str | None]:
    done = build.build(where, small.base, PLATFORM)
    return {step.package.name: step.reason for step in done}


@pytest.fixture
def copied(small: Small, tmp_path: Path) -> Folders:
    """The small tree and its finished channel, for a test to change."""
    shutil.copytree(small.where.tree, tmp_path / "copy", symlinks=True)
    return Folders(tmp_path / "copy", tmp_path / "copy/out")


def test_what_was_built_and_tested_is_in_the_channel_with_an_index(small: Small) -> None:
    found = sorted(str(path.relative_to(small.where.channel)) for path in small.where.channel.glob("*/*.conda"))
    assert [name.partition("-0.1.0-")[0] for name in found] == ["noarch/bascule-tools", "noarch/small"]
    index = (small.where.channel / "noarch/repodata.json").read_text()
    assert all(Path(name).name in index for name in found)


def test_a_package_that_is_damaged_in_the_channel_is_there_again_after_the_next_run(
    small: Small, copied: Folders
) -> None:
    for channel, reason in ((copied.channel, None), (copied.staged, "its file is damaged")):
        (path,) = channel.glob("noarch/bascule-tools-*.conda")
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)
        assert reasons(small, copied)["bascule-tools"] == reason
        records = install.solve(["small"], [copied.channel.as_uri(), *small.base.channels])
        install.install(records, copied.tree / "env")  # which looks at checksums
        shutil.rmtree(copied.tree / "env")


def test_an_index_that_names_what_is_gone_is_written_anew(small: Small, copied: Folders) -> None:
    for channel in (copied.channel, copied.staged):
        path = channel / "noarch/repodata.json"
        path.write_text(path.read_text().replace('"small-0.1.0', '"gone-0.1.0'))
    assert set(reasons(small, copied).values()) == {None}
    assert set(index.indexed(copied.channel)) == set(published.files(copied.channel))


@pytest.mark.parametrize("content", ["", "{", '{"noarch/small": "of an older version"}'])
def test_a_state_that_cannot_be_read_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "state.json").write_text(content)
    assert build._State(tmp_path / "state.json").finished == {}


def test_the_last_checksum_of_what_is_left_out_is_kept(tmp_path: Path) -> None:
    full = Base("stand-in", (), "a test", checksums={"python": "a", "torch": "b", "tqdm": "c"})
    less = replace(full, checksums={"python": "d"}, left_out=frozenset({"torch", "tensorflow"}))
    for below, known in (
        (full, full.checksums),
        (less, {"python": "d", "torch": "b"}),
        (less, {"python": "d", "torch": "b"}),
    ):
        state = build._State(tmp_path / "state.json")
        state.see(below)
        assert state.below == known
        assert build._State(tmp_path / "state.json").below == known
    state.see(Base("conda-forge", ("conda-forge",), "a test"))  # of which nothing is known
    assert state.below == {}


def test_leaving_out_what_it_was_built_with_removes_no_package(small: Small, copied: Folders) -> None:
    checksums = {name: one for name, one in small.base.checksums.items() if name != "hatchling"}
    without = replace(small.base, checksums=checksums, left_out=frozenset({"hatchling"}))
    done = build.build(copied, without, PLATFORM)
    assert {step.package.name: step.reason for step in done} == {"bascule-tools": None, "small": None}
    assert list(copied.channel.glob("noarch/bascule-tools-*"))


def test_another_channel_below_whose_content_is_not_known_builds_everything() -> None:
    first, second = (Base(name, (name,), "a test") for name in ("conda-forge", "https://our.mirror/conda-forge"))
    assert build.tools(first) != build.tools(second)
    known = replace(first, checksums={"python": "a"}), replace(second, checksums={"python": "a"})
    assert build.tools(known[0]) == build.tools(known[1])


def test_a_recipe_with_variants_of_its_own_is_refused(small: Small, copied: Folders) -> None:
    path = copied.tree / "recipes/bascule-tools/conda_build_config.yaml"
    path.write_text('python:\n  - "3.11"\n')
    with pytest.raises(RecipeError, match=rf"^{path}:1: is not read"):
        build.build(copied, small.base, PLATFORM)


def test_what_cannot_be_built_any_more_does_not_stay_beside_newer_packages(small: Small, copied: Folders) -> None:
    (copied.tree / "LICENSE").write_text("Another text.\n")  # of which the metapackage is made
    without = replace(small.base, left_out=frozenset({"hatchling"}))
    (step,) = (one for one in build.build(copied, without, PLATFORM) if one.package.name == "bascule-tools")
    assert (step.reason, step.unbuilt) == (None, ("hatchling",))  # it is as it was
    source = copied.tree / "recipes/bascule-tools/src/bascule/care.py"
    source.write_text(f"{source.read_text()}# a change\n")
    (step,) = (one for one in build.build(copied, without, PLATFORM) if one.package.name == "small")
    assert step.untested == ("bascule-tools",)
    assert list(copied.channel.glob("noarch/bascule-tools-*")) == []


def test_a_second_run_builds_nothing(small: Small, copied: Folders) -> None:
    assert reasons(small, copied) == {"bascule-tools": None, "small": None}


@pytest.mark.slow
def test_a_changed_source_builds_it_again_and_what_needs_it(small: Small, copied: Folders) -> None:
    with (copied.tree / "recipes/bascule-tools/src/bascule/care.py").open("a") as file:
        file.write("# a change\n")
    assert reasons(small, copied) == {
        "bascule-tools": "what it is made from has changed",
        "small": "what it runs with has changed",
    }


def test_what_was_built_is_tested_and_not_what_the_builder_has_unpacked_before(small: Small, copied: Folders) -> None:
    (old,) = copied.channel.glob("noarch/bascule-tools-*")
    unpacked = Path(os.environ["RATTLER_CACHE_DIR"], "pkgs", old.stem)
    extract(old, unpacked)
    tests = unpacked / "info/tests/tests.yaml"
    tests.write_text(tests.read_text().replace("bascule info", "bascule inof"))
    results = rattler_build.Package.from_file(old).run_tests(channel=small.channels)
    assert not all(result.success for result in results)  # the builder takes what it finds: else this shows nothing
    with (copied.tree / "recipes/bascule-tools/src/bascule/care.py").open("a") as file:
        file.write("# a change\n")
    assert reasons(small, copied)["bascule-tools"] == "what it is made from has changed"


@pytest.mark.slow
def test_a_package_whose_recipe_is_gone_leaves_the_channel(small: Small, copied: Folders) -> None:
    meta = copied.tree / "meta.yaml"
    meta.write_text(meta.read_text().replace("- name: small", "- name: other"))
    assert set(reasons(small, copied)) == {"bascule-tools", "other"}
    assert list(copied.channel.glob("noarch/small-*")) == []
    assert '"small-0.1.0' not in (copied.channel / "noarch/repodata.json").read_text()


@pytest.mark.slow
def test_a_test_that_fails_keeps_the_package_out_and_shows_what_it_said(small: Small, copied: Folders) -> None:
    path = copied.tree / "recipes/bascule-tools/meta.yaml"
    path.write_text(path.read_text().replace("    - bascule info\n", "    - bascule inof\n    - bascule info\n"))
    before = {one: one.read_bytes() for one in copied.channel.glob("noarch/*.conda")}
    with pytest.raises(BuildError, match="its test fails") as caught:
        build.build(copied, small.base, PLATFORM)
    assert "invalid choice: 'inof'" in str(caught.value)
    assert {one: one.read_bytes() for one in copied.channel.glob("noarch/*.conda")} == before
    path.write_text(path.read_text().replace("    - bascule inof\n", ""))
    assert reasons(small, copied)["bascule-tools"] == "what it is made from has changed"


def test_a_script_that_fails_shows_the_end_of_its_log(small: Small, copied: Folders) -> None:
    path = copied.tree / "recipes/bascule-tools/meta.yaml"
    path.write_text(path.read_text().replace("script: {{ PYTHON }}", "script: echo its words; exit 3; {{ PYTHON }}"))
    with pytest.raises(BuildError, match="could not be built") as caught:
        build.build(copied, small.base, PLATFORM)
    assert "its words" in str(caught.value)


def test_a_requirement_that_no_channel_has_is_explained_by_the_solver(small: Small, copied: Folders) -> None:
    path = copied.tree / "recipes/bascule-tools/meta.yaml"
    path.write_text(path.read_text().replace("hatchling >=1.27", "hatchling >=99"))
    with pytest.raises(BuildError) as caught:
        build.build(copied, small.base, PLATFORM)
    assert "hatchling >=99" in str(caught.value)


def test_a_compiler_that_is_missing_is_named(
    small: Small, copied: Folders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = copied.tree / "recipes/bascule-tools/meta.yaml"
    text = path.read_text().replace("  host:\n", '  build:\n    - {{ compiler("cxx") }}\n  host:\n', 1)
    path.write_text(text.replace("script: {{ PYTHON }}", "script: $CXX --version && {{ PYTHON }}"))
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("bash", "env", "cat", "rm", "mkdir", "ls", "dirname", "readlink", "uname", "sh"):
        (programs / name).symlink_to(shutil.which(name) or name)
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(BuildError) as caught:
        build.build(copied, small.base, PLATFORM)
    assert "no C++ compiler: looked for g++ c++; install one" in str(caught.value)


# Its folder in a file of text, and between zeros as a program's constant.
MARKED = """\
package:
  name: marked
  version: 0.1.0
build:
  number: 0
  script: bash $RECIPE_DIR/mark.sh
test:
  commands:
    - grep "^$PREFIX/share$" $PREFIX/share/marked/text
about:
  license: Apache-2.0
"""
MARK = r"""
mkdir -p "$PREFIX/share/marked"
echo "$PREFIX/share" >"$PREFIX/share/marked/text"
printf 'a\0%s/share\0b' "$PREFIX" >"$PREFIX/share/marked/binary"
"""


def add_marked(where: Folders, recipe: str) -> Path:
    folder = where.tree / "recipes/marked"
    folder.mkdir()
    (folder / "meta.yaml").write_text(recipe)
    (folder / "mark.sh").write_text(MARK)
    return folder / "meta.yaml"


def test_a_package_without_tests_is_refused(small: Small, copied: Folders) -> None:
    start, end = MARKED.index("test:"), MARKED.index("about:")
    path = add_marked(copied, MARKED[:start] + MARKED[end:])
    with pytest.raises(RecipeError, match=rf"^{path}:1: marked has no tests, and would count as tested: give it"):
        build.build(copied, small.base, PLATFORM)


def test_the_folder_that_a_program_was_built_for_becomes_a_long_prefix_and_nothing_moves(
    small: Small, copied: Folders, tmp_path: Path
) -> None:
    add_marked(copied, MARKED)
    assert reasons(small, copied)["marked"] == "it is not in the channel"
    prefix = tmp_path / ("a" * 60) / ("b" * 60)
    prefix.parent.mkdir()
    install.install(install.solve(["marked"], [copied.channel.as_uri()]), prefix)
    assert (prefix / "share/marked/text").read_text() == f"{prefix}/share\n"
    binary = (prefix / "share/marked/binary").read_bytes()
    assert binary.startswith(f"a\0{prefix}/share\0".encode())
    assert binary.endswith(b"\0b")
    assert len(binary) == 255 + len(b"a\0/share\0b")  # as long as with conda's longest prefix


def test_a_folder_with_a_space_is_refused_before_anything_is_done(small: Small, tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="with spaces in its name; name another: `make channel OUT=DIR`"):
        build.build(Folders(small.where.tree, tmp_path / "my out"), small.base, PLATFORM)
    assert not (tmp_path / "my out").exists()


def test_a_python_that_the_base_lacks_is_an_error_that_says_which_it_has(small: Small, copied: Folders) -> None:
    with pytest.raises(RecipeError, match=r"python: none of them is in stand-in, which has \['2.7'\]"):
        build.build(copied, replace(small.base, pythons=["2.7"]), PLATFORM)
