import shutil
from pathlib import Path

import pytest

from bundle import published

OLD = {"noarch/a-1.conda": "a", "noarch/gone-1.conda": "g", "noarch/repodata.json": "old"}
NEW = {"linux-64/c-1.conda": "c", "noarch/a-1.conda": "b", "noarch/repodata.json": "new"}


def laid(folder: Path, content: dict[str, str]) -> Path:
    for place, text in content.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text)
    return folder


def held(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    return laid(tmp_path / "staged", NEW)


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    return laid(tmp_path / "channel", OLD)


def test_packages_come_before_the_index_and_go_after_it(
    staged: Path, channel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced: list[str] = []
    replace = Path.replace

    def note(self: Path, target: Path) -> Path:
        replaced.append(target.name)
        assert (channel / "noarch/gone-1.conda").exists()
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", note)
    published.publish(staged, channel)
    assert replaced == ["c-1.conda", "a-1.conda", "repodata.json"]
    assert held(channel) == NEW
    published.publish(staged, channel)
    assert len(replaced) == 3


@pytest.mark.parametrize("name", NEW)
def test_a_copy_that_fails_leaves_the_old_channel(
    staged: Path, channel: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    copy = shutil.copy2

    def full(source: Path, target: Path) -> None:
        copy(source, target)
        if source == staged / name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copy2", full)
    with pytest.raises(OSError, match="No space left"):
        published.publish(staged, channel)
    assert held(channel) == OLD
