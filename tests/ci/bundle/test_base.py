from pathlib import Path

import pytest

from bundle import base, stand_in
from bundle.errors import BundleError
from bundle.folders import Folders

ROOT = Path(__file__).parents[3]


@pytest.fixture
def where(tmp_path: Path) -> Folders:
    return Folders(tmp_path, tmp_path / "out")


def test_what_the_channel_was_built_against_is_remembered(where: Folders) -> None:
    base.remember(base.Base("stand-in", "file:///a"), where)
    for asked in (None, "stand-in"):
        assert base.remembered(where, asked).address == "file:///a"
    assert base.remembered(where, "conda-forge").address == "conda-forge"
    (where.tree / "a channel").mkdir()
    assert base.remembered(where, str(where.tree / "a channel")).address.endswith("/a%20channel")


@pytest.mark.parametrize("text", [None, "", '["stand', "{}", '["stand-in"]'])
def test_without_a_channel_the_error_says_what_makes_one(where: Folders, text: str | None) -> None:
    if text is not None:
        where.work.mkdir(parents=True)
        (where.work / "base.json").write_text(text)
    with pytest.raises(BundleError, match="run `make channel` first"):
        base.remembered(where)


def test_a_stand_in_is_known_by_what_lies_in_it_and_not_by_its_name(where: Folders) -> None:
    folder = where.tree / "a channel"
    folder.mkdir()
    base.remember(base.Base("conda-forge", "conda-forge"), where)
    assert not base.remembered(where, str(folder)).is_stand_in
    (folder / stand_in.MARK).touch()
    assert base.remembered(where, str(folder)).is_stand_in
    assert not base.remembered(where).is_stand_in


def test_a_channel_that_does_not_answer_is_given_with_the_reason() -> None:
    assert "refused" in str(base.unreachable("http://127.0.0.1:9/nothing")).lower()


def test_conda_forge_is_built_against_if_it_answers_and_nothing_takes_its_place_unasked(
    where: Folders, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(base, "unreachable", lambda name: None)
    found = base.choose(None, where, ["pytorch"])
    assert (found.name, found.address, found.left_out) == ("conda-forge", "conda-forge", {"tensorflow"})
    assert capsys.readouterr().err == "bundle: the packages are built against conda-forge\n"
    monkeypatch.setattr(base, "unreachable", lambda name: "no route")
    with pytest.raises(BundleError, match=r"does not answer: no route\n.*BASE=stand-in makes one"):
        base.choose(None, where, ["pytorch"])
    assert base.choose("https://example.org/mirror", where, []).address == "https://example.org/mirror"


def test_nobody_is_told_to_install_before_a_channel_was_made() -> None:
    told, environments = 0, list(ROOT.glob("envs/*.yaml"))
    for path in (ROOT / "README.md", ROOT / "docs/conda.md", *environments):
        for block in path.read_text().split("\n\n"):
            if "conda env create -f envs/" in block.partition("dependencies:")[0]:
                assert "make channel" in block.partition("conda env create -f envs/")[0], (path, block)
                told += 1
    assert told > len(environments)
