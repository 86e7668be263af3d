import json
from pathlib import Path

import pytest
from rattler import Subdir

from bundle import base, stand_in, variants
from bundle.errors import ToolError
from bundle.folders import Folders

ROOT = Path(__file__).parents[3]


@pytest.fixture
def where(tmp_path: Path) -> Folders:
    (tmp_path / "out/bundle").mkdir(parents=True)
    return Folders(tmp_path, tmp_path / "out")


def test_what_the_channel_was_built_against_is_remembered(where: Folders) -> None:
    base.remember(base.Base("stand-in", ("file:///a",), "a reason"), where)
    for asked in (None, "auto", "stand-in"):  # `make channel BASE=auto`, then `make env BASE=auto`
        found = base.remembered(where, asked)
        assert (found.name, found.channels) == ("stand-in", ("file:///a",))
    assert base.remembered(where, "conda-forge").channels == ("conda-forge",)


def test_a_stand_in_that_the_channel_was_not_built_against_is_an_error(where: Folders) -> None:
    base.remember(base.Base("conda-forge", ("conda-forge",), "a reason"), where)
    with pytest.raises(ToolError, match="was built against conda-forge: `make channel BASE=stand-in` first"):
        base.remembered(where, "stand-in")
    assert base.remembered(where, "auto").channels == ("conda-forge",)


@pytest.mark.parametrize("text", ["", '{"name": "stand', "[]", '{"name": "stand-in"}'])
def test_a_note_that_was_written_in_part_is_none(where: Folders, text: str) -> None:
    (where.work / "base.json").write_text(text)
    with pytest.raises(ToolError, match="run `make channel` first"):
        base.remembered(where, None)


def test_a_stand_in_is_known_by_what_lies_in_it_and_not_by_its_name(where: Folders) -> None:
    folder = where.tree / "a channel"
    folder.mkdir()
    base.remember(base.Base("conda-forge", ("conda-forge",), "a reason"), where)
    assert not base.remembered(where, str(folder)).is_stand_in
    (folder / stand_in.MARK).touch()
    assert base.remembered(where, str(folder)).is_stand_in
    assert not base.remembered(where, None).is_stand_in


def test_a_folder_that_is_asked_for_is_found_whatever_its_name(where: Folders) -> None:
    base.remember(base.Base("stand-in", ("file:///a",), "a reason"), where)
    folder = where.tree / "a channel"
    folder.mkdir()
    assert base.remembered(where, str(folder)).channels == (folder.as_uri(),)
    assert "%20" in folder.as_uri()


def test_without_a_channel_the_error_says_what_makes_one(where: Folders) -> None:
    with pytest.raises(ToolError, match="run `make channel` first"):
        base.remembered(where, None)


def test_the_content_of_a_folder_is_known(tmp_path: Path) -> None:
    records = {
        "python-3.11.7-0.conda": {"name": "python", "version": "3.11.7", "sha256": "a", "depends": []},
        "python-3.12.1-0.conda": {"name": "python", "version": "3.12.1", "sha256": "b", "depends": []},
        "blas-1.0-0.conda": {"name": "blas", "version": "1.0", "sha256": "d", "depends": []},
        "numpy-2.4-0.conda": {"name": "numpy", "version": "2.4", "sha256": "c", "depends": ["blas >=1", "python"]},
        "scipy-1.9-0.conda": {"name": "scipy", "version": "1.9", "sha256": "e", "depends": ["numpy"]},
    }
    index = tmp_path / "linux-64/repodata.json"
    index.parent.mkdir()
    index.write_text(json.dumps({"packages.conda": records}))
    found = base.of_folder("mine", tmp_path, "linux-64", "a test")
    assert found.pythons == ["3.11", "3.12"]
    assert set(found.checksums) == {"python", "blas", "numpy", "scipy"}
    for package, others in (("numpy-2.4", {"numpy", "scipy"}), ("blas-1.0", {"blas", "numpy", "scipy"})):
        now = records | {f"{package}-0.conda": records[f"{package}-0.conda"] | {"sha256": "another"}}
        index.write_text(json.dumps({"packages.conda": now}))
        changed = base.of_folder("mine", tmp_path, "linux-64", "a test").checksums
        assert {name for name in changed if changed[name] != found.checksums[name]} == others


def test_a_channel_that_does_not_answer_is_given_with_the_reason() -> None:
    reason = base.unreachable("http://127.0.0.1:9/nothing")
    assert reason is not None
    assert "refused" in reason.lower()


def choose(where: Folders, asked: str) -> base.Base:
    return base.choose(asked, where, ["pytorch"], variants.read(ROOT / "conda_build_config.yaml"))


def test_conda_forge_is_built_against_where_it_answers(
    where: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(base, "unreachable", lambda channel: None)
    found = choose(where, base.AUTO)
    assert (found.name, found.channels, found.pythons, found.reason) == (
        "conda-forge", ("conda-forge",), None, "it answers",
    )  # fmt: skip
    assert found.left_out == {"tensorflow"}  # nobody asked for it
    assert capsys.readouterr().err == "bundle: the packages are built against conda-forge (it answers)\n"


def test_where_it_does_not_the_stand_in_is_made_and_the_reason_is_kept(
    where: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def make(folder: Path, names: list[str], *_: object) -> Path:
        asked.append(names)
        index = folder / f"channel/{Subdir.current()}/repodata.json"
        index.parent.mkdir(parents=True)
        index.write_text('{"packages.conda": {}}')
        return folder / "channel"

    monkeypatch.setattr(base, "unreachable", lambda channel: "no route")
    monkeypatch.setattr(stand_in, "make", make)
    found = choose(where, base.AUTO)
    assert (found.name, found.reason) == ("stand-in", "conda-forge does not answer: no route")
    assert found.left_out == {"tensorflow"}
    assert "built against a stand-in for conda-forge (conda-forge does not answer: no route)" in capsys.readouterr().err
    assert "torch" in asked[0]
    assert "tensorflow" not in asked[0]


@pytest.mark.parametrize("name", ["conda-forge", "https://example.org/mirror"])
def test_a_channel_for_other_machines_does_not_become_one_for_this_alone_when_the_network_is_down(
    where: Folders, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(base, "unreachable", lambda channel: "no route")
    monkeypatch.setattr(stand_in, "make", lambda *_: pytest.fail("a stand-in was made"))
    base.remember(base.Base(name, (name,), "a reason"), where)
    with pytest.raises(ToolError, match=rf"was built against {name}, and .* not answer \(no route\).*BASE=stand-in"):
        choose(where, base.AUTO)
    assert choose(where, "conda-forge").name == "conda-forge"


def test_conda_forge_that_is_asked_for_is_not_replaced(where: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in, "make", lambda *_: pytest.fail("a stand-in was made"))
    assert choose(where, "conda-forge").channels == ("conda-forge",)


def test_every_framework_of_the_stand_in_has_its_packages_name() -> None:
    assert set(stand_in.CONDA_NAMES) | {stand_in.BASE} == set(stand_in.GROUPS)


def test_nobody_is_told_to_install_with_conda_from_what_may_be_built_against_the_stand_in() -> None:
    told = 0
    for path in (ROOT / "README.md", ROOT / "docs/conda.md", *ROOT.glob("envs/*.yaml")):
        for block in path.read_text().split("\n\n"):
            if "conda env create -f envs/" in block.partition("dependencies:")[0]:
                before = block.partition("conda env create -f envs/")[0]
                assert "make channel BASE=conda-forge" in before, (path, block)
                told += 1
    assert told == 7
